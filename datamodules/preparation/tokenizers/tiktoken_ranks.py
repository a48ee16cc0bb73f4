"""Reads a file of tiktoken's ranks into a tokenizer of the `tokenizers` library that gives the same ids."""

from __future__ import annotations

import base64
import json
import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"r50k_base": _GPT2, "p50k_base": _GPT2, "cl100k_base": _CL100K, "o200k_base": _O200K}
"""Name of an encoding of tiktoken -> the regular expression that cuts a text before merging."""

SPECIAL = {
    "r50k_base": {END_OF_TEXT: 50256},
    "p50k_base": {END_OF_TEXT: 50256},
    "cl100k_base": {
        END_OF_TEXT: 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    },
    "o200k_base": {END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
}
"""Name of an encoding -> its special tokens, which its file does not hold."""

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*")


def is_ranks(content: bytes) -> bool:
    """Returns whether a file begins as one of tiktoken's ranks."""
    return _LINE.fullmatch(content[:4096].partition(b"\n")[0]) is not None


def convert(content: bytes, name: str, pattern: str | None, end_of_text: str | None) -> Tokenizer:
    """Returns the tokenizer.

    Args:
        content: Lines of a token's bytes in base64 and its rank, which is its id.
        name: The file's name without its ending; that of an encoding says its pattern and special tokens.
        pattern: A name of :data:`PATTERNS`, or a regular expression; None: by the file's name.
        end_of_text: Of a file of another name: its one special token, with the id behind the last rank.

    Raises:
        ValueError: If it is damaged, or no pattern is known.
    """
    if pattern is None and name not in PATTERNS:
        raise ValueError(
            f"a file of ranks does not say how texts are cut, and {name!r} is not {', '.join(PATTERNS)}: set pattern to"
            " one of these names or to a regular expression"
        )
    ranks = _ranks(content)
    tokenizer = Tokenizer(models.BPE(*_merges(ranks), ignore_merges=True))
    cut = Regex(PATTERNS.get(pattern or name) or str(pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cut, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(
        tokenizer, SPECIAL.get(name) or {end_of_text or END_OF_TEXT: max(ranks.values()) + 1}
    )


def _with_special(tokenizer: Tokenizer, special: dict[str, int]) -> Tokenizer:
    """Returns the tokenizer with special tokens of these ids, which need not follow each other."""
    described = json.loads(tokenizer.to_str())
    taken = set(described["model"]["vocab"].values())
    if clash := [name for name, id in special.items() if id in taken]:
        raise ValueError(f"its ranks have the id of {clash[0]}: it is not the encoding that its name says")
    form = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described["added_tokens"] = [
        {"id": id, "content": name, **form, "special": True} for name, id in special.items()
    ]
    described["model"]["vocab"] |= special  # the library gives other tokens the next free id
    return Tokenizer.from_str(json.dumps(described))


def _ranks(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"line {number} is no token in base64 with its rank") from None
    if len(set(ranks.values())) != len(content.splitlines()) or b"" in ranks:
        raise ValueError("a token or a rank occurs twice, or is empty")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"the byte {missing[0]} has no rank")
    return ranks


def _merges(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns vocabulary and merges: all pairs of tokens that are a token together, by its rank.

    tiktoken merges any two neighbours whose bytes together are a token, the lowest rank first.
    """
    spelt = _byte_letters()
    names = {token: "".join([spelt[byte] for byte in token]) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(names[first], names[second]) for first, second in known]
    return {names[token]: rank for token, rank in ranks.items()}, merges


def _byte_letters() -> list[str]:
    """Returns the letter that stands for each byte in byte-level vocabularies: GPT-2's."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
