"""Encodes with a tokenizer.json in worker processes, with bounded memory for long documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from datamodules.preparation.tokenizers.library_tokenizer import LONG_RUNS

_TOGETHER = 1 << 15
"""Characters that are encoded at once: an encoding takes some 100 bytes of memory per byte of text."""

_WORD_BOUNDARY = re.compile(r"(?<=[!-~\w]) (?=[!-~\w])")
"""A single space between two characters that are no white space."""


@dataclass
class JSONEncoder:
    """Encodes with the tokenizer of a tokenizer.json, which each process loads at first use.

    Args:
        path: The tokenizer.json.
        special_tokens: Whether the spelling of a special token becomes that token; else it is text.
        content: What to take for the file's content; None: it is read.
    """

    path: Path
    special_tokens: bool = False
    content: str | None = None

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self._content)
        tokenizer.encode_special_tokens = not self.special_tokens  # not stored in the JSON
        return tokenizer

    @cached_property
    def _content(self) -> str:
        return self.path.read_text(encoding="utf-8") if self.content is None else self.content

    @cached_property
    def _divisible(self) -> bool:
        return not self.special_tokens and splits_at_spaces(json.loads(self._content))

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text; long texts are encoded in parts where that gives the same ids."""
        found: list[list[int]] = [[] for _ in texts]
        group: list[tuple[int, str]] = []
        size = 0
        for index, text in enumerate(texts):
            for part in self._parts(text):
                group.append((index, part))
                size += len(part)
                if size >= _TOGETHER:
                    self._encode(group, found)
                    group, size = [], 0
        self._encode(group, found)
        return found

    def _parts(self, text: str) -> Iterator[str]:
        begin = 0
        while len(text) - begin > _TOGETHER and self._divisible:
            cut = _WORD_BOUNDARY.search(text, begin + _TOGETHER)
            if cut is None:
                break
            yield text[begin : cut.start()]
            begin = cut.start()
        yield text[begin:]

    def _encode(self, group: list[tuple[int, str]], found: list[list[int]]) -> None:
        encodings = self._tokenizer.encode_batch_fast([part for _, part in group], add_special_tokens=False)
        for (index, _), encoding in zip(group, encodings, strict=True):
            found[index] += encoding.ids

    def __reduce__(self) -> tuple[Any, ...]:
        return JSONEncoder, (self.path, self.special_tokens, self.content)


def splits_at_spaces(tokenizer: Mapping[str, Any]) -> bool:
    """Returns whether a text may be divided before any single space between two words without changing its ids.

    That holds for GPT-2's byte-level pattern, which puts a single space at the start of the next word: no match
    crosses that place, and none depends on what is beyond it. False means that it is not known to hold.

    Args:
        tokenizer: The content of a tokenizer.json.
    """
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers") or [steps]
    long_runs = {"type": "Split", "pattern": {"Regex": LONG_RUNS}, "behavior": "Isolated", "invert": False}
    first = steps[1] if steps[0] == long_runs and len(steps) > 1 else steps[0]
    return (
        tokenizer.get("normalizer") is None
        and all(token["special"] for token in tokenizer.get("added_tokens") or ())
        and first.get("type") == "ByteLevel"
        and first.get("use_regex") is True
        and first.get("add_prefix_space") is False
    )
