"""Byte-level BPE tokenizers in the metadata of GGUF files, in both directions.

GGUF keeps tokens and merges, and of how text is split before merging a name that llama.cpp knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError
from toolkit.gguf_files import GGUFFile

__all__ = ["from_metadata", "names_of_special", "to_metadata"]

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
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
"""Further names that split alike."""

WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
"""Names where a word that is a token is not merged from its parts."""

LONG = r"\S{256}|\s{256}"
"""What our own tokenizers cut before; in GGUF such runs stay whole."""

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Name of transformers -> of GGUF."""


def to_metadata(tokenizer: str, rows: int, ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Returns the metadata for a tokenizer.json.

    Args:
        tokenizer: Its text.
        rows: Of the embedding; ids without a token are unused ones.
        ids: "bos", "eos", "unk", "pad" -> the id.

    Raises:
        ConfigError: If it is none of byte-level BPE with a known split, or has more tokens than rows.
    """
    found = json.loads(tokenizer)
    model = found["model"]
    name = _split_name(found)
    vocabulary = {number: (token, NORMAL) for token, number in model["vocab"].items()}
    for token in found.get("added_tokens") or ():
        vocabulary[token["id"]] = (token["content"], CONTROL if token["special"] else USER_DEFINED)
    if vocabulary and max(vocabulary) >= rows:
        raise ConfigError(
            f"The tokenizer has {max(vocabulary) + 1:,} tokens, the network {rows:,} rows for them."
        )
    if not model["merges"]:
        raise ConfigError("The tokenizer has no merges; llama.cpp reads none without.")
    tokens = [vocabulary.get(number, (f"[PAD{number}]", UNUSED)) for number in range(rows)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata = {
        "model": "gpt2",
        "pre": name,
        "tokens": [token for token, _ in tokens],
        "token_type": [kind for _, kind in tokens],
        "merges": merges,
        "add_bos_token": False,
        "add_space_prefix": False,
    } | {f"{SPECIAL[key]}_token_id": number for key, number in ids.items() if number is not None}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def _split_name(found: Mapping[str, Any]) -> str:
    """Returns GGUF's name for how a tokenizer.json splits text."""
    model, kind = found["model"], found["model"].get("type", "BPE")
    decoder = (found.get("decoder") or {}).get("type")
    if kind != "BPE" or decoder != "ByteLevel" or model.get("byte_fallback"):
        what = kind if kind != "BPE" else f"BPE with the decoder {decoder}"
        raise ConfigError(f"The tokenizer is {what}; byte-level BPE is written as GGUF.")
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
        ConfigError: If its tokenizer is none of byte-level BPE with a known split, or damaged.
    """
    found = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = found.get("model", "none")
    if kind == "none":
        return None
    if kind != "gpt2":
        raise ConfigError(
            f"{file.path} has a tokenizer of the kind {ascii(kind)[:40]}; gpt2, byte-level BPE, can be read."
        )
    name = str(found.get("pre", "gpt-2"))
    name = "gpt-2" if name == "default" else name
    if (split := SAME.get(name, name)) not in SPLITS:
        raise ConfigError(
            f"{file.path} splits text as {ascii(name)[:40]} does; {', '.join([*SPLITS, *SAME])} can be read."
        )
    tokens, merges = found.get("tokens", []), found.get("merges", [])
    kinds = found.get("token_type") or [NORMAL] * len(tokens)
    lists = all(isinstance(one, list) for one in (tokens, merges, kinds)) and tokens
    if not lists or len(tokens) != len(kinds) or not all(isinstance(text, str) for text in tokens + merges):
        raise ConfigError(f"{file.path}: its tokens, their types and merges are no lists that fit together.")
    return json.dumps(_described(split, name in WHOLE_WORDS, tokens, kinds, merges), ensure_ascii=False)


def _described(
    split: str, whole: bool, tokens: list[str], kinds: list[int], merges: list[str]
) -> dict[str, Any]:
    """Returns tokenizer.json."""
    pieces = [
        {"type": "Split", "pattern": {"Regex": value}, "behavior": "Isolated", "invert": False}
        if step == "Split"
        else {"type": "Digits", "individual_digits": value}
        if step == "Digits"
        else {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": value}
        for step, value in SPLITS[split]
    ]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": token, **plain, "special": kind == CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    normalizer = _normalizer(split)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": normalizer} if normalizer else None,
        "pre_tokenizer": pieces[0] if len(pieces) == 1 else {"type": "Sequence", "pretokenizers": pieces},
        "post_processor": None,
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
            "vocab": {
                token: number
                for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                if kind != UNUSED
            },
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def names_of_special(file: GGUFFile) -> dict[str, tuple[int, str]]:
    """Returns "bos", "eos", "unk", "pad" -> id and token, of those that a file names."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    ids = {key: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in SPECIAL.items()}
    return {
        key: (number, tokens[number])
        for key, number in ids.items()
        if isinstance(number, int) and 0 <= number < len(tokens)
    }
