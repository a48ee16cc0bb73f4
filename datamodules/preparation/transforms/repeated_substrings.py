"""Removes passages that were there before, byte for byte, whatever is around them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from core.contracts import Transform
from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.duplicates.duplicate_filter import identities, scratch_folder
from datamodules.preparation.duplicates.noted_texts import write_noted
from datamodules.preparation.duplicates.repeated_passages import Cuts, read_cuts, write_cuts
from datamodules.preparation.duplicates.shingles import UNSPACED
from datamodules.preparation.duplicates.window_hashes import WORD, fingerprints
from toolkit.arrow_columns import flags, strings

MOST_BYTES = 1 << 16
"""Limit of `min_bytes`."""

_LETTER = rf"[^\W{UNSPACED}]"
_LONGEST_WORD = 40
_REST = re.compile(rf"{_LETTER}{{1,{_LONGEST_WORD}}}(?!{_LETTER})")
_START = re.compile(rf"(?<!{_LETTER}){_LETTER}{{1,{_LONGEST_WORD}}}\Z")
_SPLITS = re.compile(rf"{_LETTER}{{2}}")


@technique(
    paper="Exact substring deduplication: Lee et al., arXiv:2107.06499, section 4.1, passages of 50 BPE tokens; "
    "winnowing: Schleimer et al., SIGMOD 2003"
)
class RepeatedSubstrings(Transform):
    """Removes passages of at least `min_bytes` that are in the corpus more than once, in any documents, whatever is around them.

    Passages are compared byte for byte, by 128 bits of hashes; what was changed by a character is another passage. Each
    passage in a document that is somewhere else too, as long as it is, is found, as with a suffix array. A byte is removed
    if it is in a passage that was there before, in the order of the source; with `keep_first: false`, as in the paper, in
    one that is also somewhere else. The paper's 50 tokens are about 200 bytes of English.

    Words and characters of which only a part is repeated stay, as do blanks and line ends between what is left. Of a passage
    that repeats itself, such as a line of hyphens, the beginning stays.

    Instead of a suffix array, a few windows of half the length are noted of each document: any two places with the same
    `min_bytes` have one in common (winnowing). Only around those that are there twice is each window of `min_bytes` hashed,
    and sorted on disk. While it works, the disk holds 1.3 bytes for each byte of text, and 24 for each that may be repeated;
    memory does not grow with the corpus. Put ExactDuplicates and NearDuplicates before it.

    Args:
        min_bytes: Length of the shortest passage, in bytes of UTF-8; 16 to 65,536.
        keep_first: Whether a passage stays where it is for the first time.
        min_left: Documents that something was removed from, and of which fewer characters are left, are dropped; at least
            0. Those that become empty are always dropped.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        data:
          init_args:
            transforms:
              - class_path: RepeatedSubstrings
                init_args: {min_bytes: 200, keep_first: true, min_left: 100}
    """

    needs_all_documents = True
    _cuts: Cuts | None = None

    def __init__(self, min_bytes: int = 200, keep_first: bool = True, min_left: int = 100) -> None:
        if not 2 * WORD <= min_bytes <= MOST_BYTES:
            raise ConfigError(
                f"RepeatedSubstrings: min_bytes is {min_bytes}; it is from {2 * WORD} to {MOST_BYTES:,}."
            )
        if min_left < 0:
            raise ConfigError(f"RepeatedSubstrings: min_left is {min_left}; it is at least 0.")
        self.min_bytes, self.keep_first, self.min_left = min_bytes, keep_first, min_left
        self._counts: Counter[str] = Counter()

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def map(self, batches: Iterator[pyarrow.RecordBatch], findings: Path) -> None:
        """Writes the texts of a piece that are long enough, with their fingerprints."""
        with findings.open("wb") as file:
            for batch in batches:
                encoded = [text.encode() for text in batch["text"].to_pylist()]
                long = [len(text) >= self.min_bytes for text in encoded]
                if any(long):
                    ends = np.cumsum([len(text) for text in compress(encoded, long)])
                    joined = b"".join(compress(encoded, long))
                    found = fingerprints(np.frombuffer(joined, np.uint8), ends, self.min_bytes)
                    write_noted(file, identities(batch)[long], ends, found, joined)

    def reduce(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Writes which passages of which documents are repeated."""
        with scratch_folder(conclusion) as scratch:
            write_cuts(findings, self.min_bytes, self.keep_first, scratch, conclusion)

    def load(self, conclusion: Path) -> None:
        """Maps the passages, sorted by document; they stay on disk."""
        self._cuts = read_cuts(conclusion)

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Removes the repeated passages; drops documents of which too little is left."""
        if self._cuts is None:
            raise RuntimeError("RepeatedSubstrings.apply is called after `load`")
        documents, ranges = self._cuts
        if not len(documents):
            return batch
        found = identities(batch)
        first, last = (np.searchsorted(documents, found, side) for side in ("left", "right"))
        rows = np.flatnonzero(last > first).tolist()
        if not rows:
            return batch
        texts, shown = batch["text"].to_pylist(), {}
        for row in rows:
            texts[row], passages = self._without(texts[row], ranges[first[row] : last[row]].tolist())
            if passages and len(texts[row].strip()) < max(self.min_left, 1):
                shown[row] = passages[0]
        batch = batch.set_column(batch.schema.get_field_index("text"), "text", strings(texts))
        if shown:
            drop("too short without repeated passages", list(shown), list(shown.values()))
            batch = batch.filter(flags([row not in shown for row in range(len(texts))]))
        return batch

    def _without(self, text: str, ranges: Sequence[Sequence[int]]) -> tuple[str, list[str]]:
        """Returns a document without the bytes in these ranges, and what was removed; counts it."""
        kept, repeated = _in_whole_words(*_decoded(text.encode(), ranges))
        found, passages = _joined(kept, repeated), [passage for passage in repeated if passage.strip()]
        self._counts["passages removed"] += len(passages)
        self._counts["bytes removed"] += len(text.encode()) - len(found.encode())
        return found, passages

    def take_counts(self) -> Mapping[str, int]:
        """Returns how many passages and bytes were removed since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what `load` has read: a process that gets a copy reads it itself."""
        return {name: value for name, value in vars(self).items() if name != "_cuts"}


def _decoded(text: bytes, ranges: Sequence[Sequence[int]]) -> tuple[list[str], list[str]]:
    """Returns what is outside of the ranges, one more than there are, and what is in them: whole characters only."""
    kept, repeated, at = [], [], 0
    for begin, end in ranges:
        while begin < end and text[begin] & 0xC0 == 0x80:  # inside of a character
            begin += 1
        while begin < end < len(text) and text[end] & 0xC0 == 0x80:
            end -= 1
        kept.append(text[at:begin].decode())
        repeated.append(text[begin:end].decode())
        at = end
    return [*kept, text[at:].decode()], repeated


def _in_whole_words(kept: list[str], repeated: list[str]) -> tuple[list[str], list[str]]:
    """Moves the parts of words at the ends of what is repeated to what is kept beside them."""
    for number, passage in enumerate(repeated):
        if _SPLITS.fullmatch(kept[number][-1:] + passage[:1]) and (rest := _REST.match(passage)):
            kept[number] += rest[0]
            passage = passage[rest.end() :]
        if _SPLITS.fullmatch(passage[-1:] + kept[number + 1][:1]) and (start := _START.search(passage)):
            kept[number + 1] = start[0] + kept[number + 1]
            passage = passage[: start.start()]
        repeated[number] = passage
    return kept, repeated


def _joined(kept: Sequence[str], repeated: Sequence[str]) -> str:
    """Returns what is kept in one text. Of the white space before and behind what is removed, that of more lines stays."""
    found, gap = [kept[0].rstrip()], _space_behind(kept[0])
    for passage, piece in zip(repeated, kept[1:], strict=True):
        if passage:
            before, behind = gap + _space_before(passage), _space_behind(passage) + _space_before(piece)
            gap = max(before, behind, key=lambda space: (space.count("\n"), len(space)))
        else:
            gap += _space_before(piece)
        if core := piece.strip():
            found += [gap if any(found) else "", core]
            gap = _space_behind(piece)
    return "".join(found) + (gap if kept[-1].strip() else "")


def _space_before(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _space_behind(text: str) -> str:
    return text[len(text.rstrip()) :]
