"""Tokenizers in the metadata of GGUF files, in both directions: byte-level BPE, and the BPE of SentencePiece.

Of byte-level BPE, GGUF keeps tokens and merges, and of how text is split before merging a name that llama.cpp knows; of
SentencePiece, tokens and scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from toolkit import sentencepiece_bpe

if TYPE_CHECKING:
    from toolkit.gguf_files import GGUFFile

__all__ = ["from_metadata", "names_of_special", "to_metadata"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""`tokenizer.ggml.token_type`."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES, _GPT2 = ("ByteLevel", False), ("ByteLevel", True)

SPLITS: dict[str, tuple[tuple[str, Any], ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (("Digits", True), _GPT2),
    "llama-bpe": (("Split", _WORDS % "{1,3}"), _BYTES),
    "qwen2": (("Split", _WORDS % ""), _BYTES),
}
"""`tokenizer.ggml.pre` -> what splits text in tokenizer.json."""

SAME = {
    "olmo": "gpt-2",
    "mpt": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "exaone": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "dbrx": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "stablelm2": "qwen2",
}
"""Other names for the same splits."""

WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
"""Names where a word that is a token is not merged from its parts."""

LONG = r"\S{256}|\s{256}"
"""What our own tokenizers cut before; in GGUF such runs stay whole."""

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Name of transformers -> of GGUF."""

MOST_LETTERS = 512
"""Of a token of SentencePiece, which has 16 unless asked for more: each of its cuts is looked up."""

SENTENCEPIECE = {"bos": 1, "eos": 2, "unk": 0}
"""Ids in a file of SentencePiece that does not name them."""


def to_metadata(tokenizer: str, rows: int, ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Returns the metadata for a tokenizer.json.

    Args:
        tokenizer: Its text.
        rows: Of the embedding; ids without a token are unused ones.
        ids: "bos", "eos", "unk", "pad" -> the id.

    Raises:
        ConfigError: If it is neither byte-level BPE with a known split nor SentencePiece's, or has more tokens than rows.
    """
    found = json.loads(tokenizer)
    if leading := _leading(tokenizer, found):
        ids = {**ids, "bos": leading[0]}
    about: dict[str, Any] = {"add_bos_token": bool(leading)}
    if found["model"].get("type", "BPE") == "BPE" and found["model"].get("byte_fallback"):
        prefix, scores = sentencepiece_bpe.prefix_and_scores(found)
        tokens = _tokens(found, rows)
        about |= {"model": "llama", "pre": "default", "add_space_prefix": prefix}
        ids = {**ids, "unk": found["model"]["vocab"].get(found["model"].get("unk_token"))}
        about["scores"] = [scores.get(token, sentencepiece_bpe.UNREACHED) for token, _ in tokens]
    else:
        about |= {"model": "gpt2", "pre": _split_name(found), "add_space_prefix": False}
        tokens = _tokens(found, rows)
        if not found["model"]["merges"]:
            raise ConfigError("The tokenizer has no merges; llama.cpp reads none without.")
        merges = found["model"]["merges"]
        about["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    about |= {"tokens": [token for token, _ in tokens], "token_type": [kind for _, kind in tokens]}
    about |= {f"{SPECIAL[key]}_token_id": number for key, number in ids.items() if number is not None}
    return {f"tokenizer.ggml.{key}": value for key, value in about.items()}


def _leading(tokenizer: str, found: Mapping[str, Any]) -> list[int]:
    """Returns the id that texts begin with, if any."""
    if found.get("post_processor") is None:
        return []
    from tokenizers import Tokenizer

    from toolkit.generation.prompts import leading_ids

    ids = leading_ids(Tokenizer.from_str(tokenizer))
    if len(ids) > 1:
        raise ConfigError(f"The tokenizer begins texts with {len(ids)} tokens; GGUF has a form for one.")
    return ids


def _tokens(found: Mapping[str, Any], rows: int) -> list[tuple[str, int]]:
    """Returns the token of each row, and its type."""
    model = found["model"]
    vocabulary = {number: (token, NORMAL) for token, number in model["vocab"].items()}
    if model.get("byte_fallback"):
        vocabulary |= {
            model["vocab"][byte]: (byte, sentencepiece_bpe.BYTE) for byte in sentencepiece_bpe.BYTES
        }
        if (unknown := model.get("unk_token")) in model["vocab"]:
            vocabulary[model["vocab"][unknown]] = (unknown, UNKNOWN)
    for token in found.get("added_tokens") or ():
        text, kind = token["content"], CONTROL if token["special"] else USER_DEFINED
        if vocabulary.get(token["id"], ("", NORMAL))[1] != UNKNOWN:
            spaced = model.get("byte_fallback") and kind == USER_DEFINED  # such as Gemma's runs of spaces
            vocabulary[token["id"]] = (text.replace(sentencepiece_bpe.SPACE, " ") if spaced else text, kind)
    if vocabulary and max(vocabulary) >= rows:
        raise ConfigError(
            f"The tokenizer has {max(vocabulary) + 1:,} tokens, the network {rows:,} rows for them."
        )
    return [vocabulary.get(number, (f"[PAD{number}]", UNUSED)) for number in range(rows)]


def _split_name(found: Mapping[str, Any]) -> str:
    """Returns GGUF's name for how a tokenizer.json splits text."""
    model, kind = found["model"], found["model"].get("type", "BPE")
    decoder = (found.get("decoder") or {}).get("type")
    if kind != "BPE" or decoder != "ByteLevel" or model.get("byte_fallback"):
        what = kind if kind != "BPE" else f"BPE with the decoder {decoder}"
        raise ConfigError(f"The tokenizer is {what}; BPE of bytes or of SentencePiece is written as GGUF.")
    normalizer = (found.get("normalizer") or {}).get("type")
    steps = tuple(_steps(found.get("pre_tokenizer")))
    whole = bool(model.get("ignore_merges"))
    for name, known in SPLITS.items():
        if steps == known and normalizer in (None, _normalizer(name)) and whole == (name in WHOLE_WORDS):
            return name
    shown = " ".join(f"{kind}({value})" for kind, value in steps)
    more = f" after {normalizer}" if normalizer else ""
    raise ConfigError(
        f"GGUF has no name for how the tokenizer splits text: {shown[:160] or 'not at all'}{more}"
        f"{', whole words first' if whole else ''}.\nKnown are {', '.join(SPLITS)}; `--format hf` writes any."
    )


def _normalizer(name: str) -> str | None:
    return "NFC" if name == "qwen2" else None


def _steps(splitter: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """Returns what splits text, one after the other."""
    kind = (splitter or {}).get("type")
    if splitter is None:
        return []
    if kind == "Sequence":
        return [step for part in splitter["pretokenizers"] for step in _steps(part)]
    if kind == "ByteLevel" and not splitter.get("add_prefix_space"):
        return [(kind, bool(splitter.get("use_regex", True)))]
    if kind == "Digits":
        return [(kind, bool(splitter["individual_digits"]))]
    if kind == "Split" and splitter["behavior"] == "Isolated" and not splitter.get("invert"):
        pattern = splitter["pattern"].get("Regex")
        return [] if pattern == LONG else [(kind, pattern)]
    return [(str(kind), {key: value for key, value in splitter.items() if key != "type"})]


def from_metadata(file: GGUFFile) -> str | None:
    """Returns tokenizer.json for a file; None: it has no tokenizer.

    Raises:
        ConfigError: If its tokenizer is neither byte-level BPE with a known split nor SentencePiece's, or damaged.
    """
    found = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = found.get("model", "none")
    if kind == "none":
        return None
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"{file.path} has a tokenizer of the kind {ascii(kind)[:40]}; gpt2, byte-level BPE, and llama, "
            "SentencePiece's BPE, can be read."
        )
    tokens = _listed(file, found)
    if kind == "llama":
        parts, begins = _sentencepiece(file, tokens, found), True
    else:
        parts, begins = _byte_level(file, tokens, found)
    bos = names_of_special(file).get("bos")
    if bos is not None and found.get("add_bos_token", begins) is True:
        parts["post_processor"] = _beginning(*bos)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": token, **plain, "special": kind != USER_DEFINED}
        for number, (token, kind) in enumerate(tokens)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    same = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
    }
    return json.dumps(same | parts, ensure_ascii=False)


def _listed(file: GGUFFile, found: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Returns tokens and their types."""
    tokens = found.get("tokens")
    if isinstance(tokens, list) and tokens and all(isinstance(text, str) for text in tokens):
        kinds = found.get("token_type") or [NORMAL] * len(tokens)
        if isinstance(kinds, list) and len(tokens) == len(kinds):
            return list(zip(tokens, kinds, strict=True))
    raise ConfigError(f"{file.path}: its tokens and their types are no lists that fit together.")


def _byte_level(
    file: GGUFFile, tokens: list[tuple[str, int]], found: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Returns parts of tokenizer.json, and whether texts begin with BOS if the file does not say so."""
    name = str(found.get("pre", "gpt-2"))
    name = "gpt-2" if name == "default" else name
    if (split := SAME.get(name, name)) not in SPLITS:
        raise ConfigError(
            f"{file.path} splits text as {ascii(name)[:40]} does; {', '.join([*SPLITS, *SAME])} can be read."
        )
    merges = found.get("merges", [])
    if not isinstance(merges, list) or not all(isinstance(text, str) for text in merges):
        raise ConfigError(f"{file.path}: its merges are no list of texts.")
    whole = name in WHOLE_WORDS
    return _described(split, whole, tokens, merges), whole


def _sentencepiece(file: GGUFFile, tokens: list[tuple[str, int]], found: Mapping[str, Any]) -> dict[str, Any]:
    scores = found.get("scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(tokens)
        or not all(isinstance(one, float) and math.isfinite(one) for one in scores)
    ):
        raise ConfigError(f"{file.path}: its scores are no list of a number for each token.")
    bytes_there = {token for token, kind in tokens if kind == sentencepiece_bpe.BYTE}
    if missing := [byte for byte in sentencepiece_bpe.BYTES if byte not in bytes_there]:
        raise ConfigError(f"{file.path}: its tokenizer has no token {missing[0]} for a byte.")
    pieces = [(token, score) for (token, kind), score in zip(tokens, scores, strict=True) if kind == NORMAL]
    if long := next((token for token, _ in pieces if len(token) > MOST_LETTERS), None):
        raise ConfigError(f"{file.path}: a token has {len(long):,} characters; {MOST_LETTERS} can be read.")
    vocabulary = {token: number for number, (token, kind) in enumerate(tokens) if kind != UNUSED}
    unknown = next((token for token, kind in tokens if kind == UNKNOWN), None)
    return sentencepiece_bpe.described(pieces, vocabulary, unknown, bool(found.get("add_space_prefix", True)))


def _beginning(number: int, token: str) -> dict[str, Any]:
    """Returns the post-processor that puts a token in front of texts."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    one, two = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [first, one],
        "pair": [first, one, two],
        "special_tokens": special,
    }


def _described(split: str, whole: bool, tokens: list[tuple[str, int]], merges: list[str]) -> dict[str, Any]:
    """Returns the parts of tokenizer.json that are of byte-level BPE."""
    pieces = [
        {"type": "Split", "pattern": {"Regex": value}, "behavior": "Isolated", "invert": False}
        if step == "Split"
        else {"type": "Digits", "individual_digits": value}
        if step == "Digits"
        else {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": value}
        for step, value in SPLITS[split]
    ]
    normalizer = _normalizer(split)
    return {
        "normalizer": {"type": normalizer} if normalizer else None,
        "pre_tokenizer": pieces[0] if len(pieces) == 1 else {"type": "Sequence", "pretokenizers": pieces},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole,
            "vocab": {token: number for number, (token, kind) in enumerate(tokens) if kind != UNUSED},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def names_of_special(file: GGUFFile) -> dict[str, tuple[int, str]]:
    """Returns "bos", "eos", "unk", "pad" -> id and token, of those that a file names."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    defaults = {}
    if file.metadata.get("tokenizer.ggml.model") == "llama" and isinstance(kinds, list):
        special = (UNKNOWN, CONTROL)
        defaults = {key: id for key, id in SENTENCEPIECE.items() if id < len(kinds) and kinds[id] in special}
    ids = {
        key: file.metadata.get(f"tokenizer.ggml.{name}_token_id", defaults.get(key))
        for key, name in SPECIAL.items()
    }
    return {
        key: (number, tokens[number])
        for key, number in ids.items()
        if isinstance(number, int) and 0 <= number < len(tokens)
    }
