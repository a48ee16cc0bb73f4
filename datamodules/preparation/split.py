"""Splits documents into training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from core.errors import ConfigError

_SEEN_BYTES = 1 << 28
"""After 256 MiB, a source has enough documents if both splits have one."""

_LEAST_BYTES, _PARTS = 1000, 2000
"""Documents whose tails are held out have at least 1,000 bytes and at least a 2,000th of the text."""


@dataclass
class Split:
    """Splits by a hash of the document's text; if documents are few or very unequal, by the tails of long ones.

    Args:
        bound: Documents with a hash below it are held out; see :func:`text_hash`.
        fraction: Share of a long document that is held out.
        tails_from: Least size of a long document, in bytes; None: documents are not cut.
    """

    bound: int
    fraction: float = 0.0
    tails_from: int | None = None

    def parts(self, text: str) -> list[tuple[int, str]]:
        """Returns (0 for training or 1 for validation, text) of a document's parts."""
        raw = text.encode()
        if self.tails_from is not None and len(raw) >= self.tails_from and (cut := self._cut(text)):
            return [(0, text[:cut]), (1, text[cut:])]
        return [(int(text_hash(raw) < self.bound), text)]

    def _cut(self, text: str) -> int:
        """Returns where the tail begins, after a line or a word; 0 if one of the parts would be blank."""
        cut = int(len(text) * (1 - self.fraction))
        most = cut + (len(text) - cut) // 4
        for end in ("\n", " "):
            if (found := text.find(end, cut, most)) >= 0:
                cut = found + 1
                break
        return cut if text[:cut].strip() and text[cut:].strip() else 0


def chosen_split(texts: Iterable[str], fraction: float, label: str) -> Split:
    """Returns the split: by hash, unless it holds out less than half of what is wanted, or more than twice.

    No split is empty: if necessary, the smallest hash is held out and the largest is trained on.

    Args:
        texts: All documents, in any order; read until the split is decided.
        fraction: Share of the text to hold out.
        label: Name of the source, for messages.

    Raises:
        ConfigError: If there is no text, or too little to split.
    """
    bound = int(fraction * 2**64)
    least, most, total, held, longest = 2**64, -1, 0, 0, ""
    for text in texts:
        raw = text.encode()
        place = text_hash(raw)
        least, most, total = min(least, place), max(most, place), total + len(raw)
        held += len(raw) if place < bound else 0
        longest = max(longest, text, key=len)
        if total > _SEEN_BYTES and least < bound <= most:
            return Split(bound)
    if most == -1:
        raise ConfigError(
            f"{label}: there is no text: all documents are blank, unusable, or dropped by a transform."
        )
    if least < bound <= most and fraction / 2 <= held / total <= fraction * 2:
        return Split(bound)
    tails = Split(bound, fraction, max(_LEAST_BYTES, total // _PARTS))
    if len(tails.parts(longest)) == 2:
        return tails
    if least == most:
        raise ConfigError(
            "data.source holds a single document: training and validation need different ones.\n"
            'Cut the text into several files, or into the lines of a .jsonl file: {"text": "..."}.'
        )
    return Split(min(max(bound, least + 1), most))


def text_hash(text: bytes) -> int:
    """Returns a hash of a text from 0 to 2**64 - 1, uniform over texts; equal texts have equal hashes."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
