"""Splits documents into training, validation and test."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import pyarrow

from core.errors import ConfigError

SPLITS = ("train", "validation", "test")
"""In the order of :meth:`Split.parts`; without `data.test_fraction` nothing is in the last."""

SPLIT_KEY = "split_key"
"""Column of the documents that stay together: those with equal values; the name of a split puts them there."""

_SEEN_BYTES = 1 << 28
"""After 256 MiB, a source has enough documents if both splits have one."""

_MANY_GROUPS = 1000
"""With so many groups of documents, a hash of their keys gives nearly the wanted shares."""

_MOST_SEEN_BYTES = 1 << 32
"""What decides how few groups are split: the first 4 GiB. Groups that come later are split by their hash."""

_LEAST_BYTES, _PARTS = 1000, 2000
"""Documents whose tails are held out have at least 1,000 bytes and at least a 2,000th of the text."""


@dataclass
class Split:
    """Splits by a hash of the document's text; if documents are few or very unequal, by the tails of long ones.

    Args:
        bound: Documents with a hash below it are held out for validation; see :func:`text_hash`.
        fraction: Share of a long document that is held out for validation.
        tails_from: Least size of a long document, in bytes; None: documents are not cut.
        test_bound: Documents with a hash from `bound` up to, not including it are held out for tests; 0: none.
        test_fraction: Share of a long document that is held out for tests, behind that for validation.
        groups: Where the documents with a key belong, by the key's hash, if hashes would split them very unequally.
    """

    bound: int
    fraction: float = 0.0
    tails_from: int | None = None
    test_bound: int = 0
    test_fraction: float = 0.0
    groups: Mapping[int, int] = field(default_factory=dict)

    def parts(self, text: str, key: str | None = None) -> list[tuple[int, str]]:
        """Returns (0 for training, 1 for validation or 2 for tests, text) of a document's parts.

        Args:
            text: The document.
            key: Its group, of which all documents are in one split, or the name of its split; None: it is its own.
        """
        if key is not None:
            return [(self.side_of_group(key), text)]
        raw = text.encode()
        if self.tails_from is not None and len(raw) >= self.tails_from and (tails := self._tails(text)):
            return tails
        return [(self.side(text_hash(raw)), text)]

    def side(self, place: int) -> int:
        """Returns where a document with this hash belongs if it is not cut: 0, 1 or 2."""
        return 1 if place < self.bound else 2 if place < self.test_bound else 0

    def side_of_group(self, key: str) -> int:
        """Returns where the documents with a key belong."""
        if key in SPLITS:
            return SPLITS.index(key)
        place = text_hash(key.encode())
        return self.groups.get(place, self.side(place))

    def _tails(self, text: str) -> list[tuple[int, str]]:
        """Returns the parts of a long document; none if one of them would be blank."""
        held_out = self.fraction + self.test_fraction
        cut = _cut(text, held_out)
        head, tail = text[:cut], text[cut:]
        if not cut or not self.test_fraction:
            return [(0, head), (1, tail)] if cut else []
        cut = _cut(tail, self.test_fraction / held_out)
        return [(0, head), (1, tail[:cut]), (2, tail[cut:])] if cut else []


def _cut(text: str, fraction: float) -> int:
    """Returns where the tail begins, after a line or a word; 0 if one of the parts would be blank."""
    cut = int(len(text) * (1 - fraction))
    most = cut + (len(text) - cut) // 4
    for end in ("\n", " "):
        if (found := text.find(end, cut, most)) >= 0:
            cut = found + 1
            break
    return cut if text[:cut].strip() and text[cut:].strip() else 0


def chosen_split(texts: Iterable[str], fraction: float, label: str, test_fraction: float = 0.0) -> Split:
    """Returns the split: by hash, unless it holds out less than half of what is wanted, or more than twice.

    No split is empty: if necessary, the smallest hashes are held out and the largest is trained on.

    Args:
        texts: All documents, in any order; read until the split is decided.
        fraction: Share of the text to hold out for validation.
        label: Name of the source, for messages.
        test_fraction: Share of the text to hold out for tests, of other documents.

    Raises:
        ConfigError: If there is no text, or too little to split.
    """
    wanted = {1: fraction} | ({2: test_fraction} if test_fraction else {})
    bound, test_bound = int(fraction * 2**64), int((fraction + test_fraction) * 2**64) if test_fraction else 0
    split = Split(bound, test_bound=test_bound)
    held, smallest, most, longest = [0, 0, 0], list[int](), -1, ""
    for text in texts:
        raw = text.encode()
        place = text_hash(raw)
        smallest, most = sorted({*smallest, place})[:2], max(most, place)
        held[split.side(place)] += len(raw)
        longest = max(longest, text, key=len)
        if sum(held) > _SEEN_BYTES and all(held[side] for side in (0, *wanted)):
            return split
    if most == -1:
        raise ConfigError(
            f"{label}: there is no text: all documents are blank, unusable, or dropped by a transform."
        )
    total = sum(held)
    if held[0] and all(share / 2 <= held[side] / total <= share * 2 for side, share in wanted.items()):
        return split
    tails = Split(bound, fraction, max(_LEAST_BYTES, total // _PARTS), test_bound, test_fraction)
    if len(tails.parts(longest)) == 1 + len(wanted):
        return tails
    least = [*smallest, most] if test_fraction else [smallest[0], most]
    if sorted({*least}) != least:
        raise ConfigError(_too_few(len({*smallest, most}), test_fraction))
    bound = min(max(bound, least[0] + 1), least[1])
    return Split(bound, test_bound=min(max(test_bound, least[1] + 1), most) if test_fraction else 0)


def chosen_groups(
    documents: Iterable[tuple[str, str | None]], fraction: float, label: str, test_fraction: float = 0.0
) -> Split:
    """Returns the split of documents with keys: by a hash of the key, unless the shares are half or twice of what is wanted.

    Then the smallest groups are held out. A document without a key is split by its text.

    Args:
        documents: Text and key of each, in any order; read until the split is decided.
        fraction: Share of the text to hold out for validation.
        label: Name of the source, for messages.
        test_fraction: Share of the text to hold out for tests.

    Raises:
        ConfigError: If there is no text, or there are fewer groups than splits.
    """
    wanted = [1 - fraction - test_fraction, fraction, test_fraction]
    split = Split(
        int(fraction * 2**64), test_bound=int((fraction + test_fraction) * 2**64) if test_fraction else 0
    )
    seen = Counter[tuple[bool, int]]()  # bytes by (is the name of a split, that split or the key's hash)
    held = Counter[int]()
    sides = [side for side in range(3) if wanted[side]]
    for text, key in documents:
        raw = text.encode()
        if key in SPLITS:
            seen[True, SPLITS.index(key)] += len(raw)
            held[SPLITS.index(key)] += len(raw)
        else:
            place = text_hash(raw if key is None else key.encode())
            seen[False, place] += len(raw)
            held[split.side(place)] += len(raw)
        enough = sum(held.values()) > _SEEN_BYTES and all(held[side] for side in sides)
        if enough and (len(seen) > _MANY_GROUPS or sum(held.values()) > _MOST_SEEN_BYTES):
            break
    sizes = {place: size for (named, place), size in seen.items() if not named}
    if len(sizes) < len(seen):
        _require(held, label)
        return split
    total = sum(sizes.values())
    if not total:
        raise ConfigError(
            f"{label}: there is no text: all documents are blank, unusable, or dropped by a transform."
        )
    if all(share / 2 <= held[side] / total <= share * 2 for side, share in enumerate(wanted) if share):
        return split
    if len(sizes) < len(sides):
        raise ConfigError(
            f"{label}: all documents are in {len(sizes)} group{'s' * (len(sizes) > 1)} that stay together; "
            f"{len(sides)} splits need as many.\nGroup them by another column, or leave SplitBy out."
        )
    return replace(split, groups=_smallest(sizes, wanted, total))


def _require(held: Mapping[int, int], label: str) -> None:
    """Raises a ConfigError if keys that name splits leave one of the two that every run needs without documents."""
    for side in (0, 1):
        if not held[side]:
            raise ConfigError(
                f"{label}: no document belongs to the {SPLITS[side]} split.\nLook at the dates, or other values, that "
                "SplitBy compares."
            )


def _smallest(sizes: Mapping[int, int], wanted: list[float], total: int) -> dict[int, int]:
    """Returns the side of each group: the smallest ones are held out until there is about what is wanted."""
    left = sorted(sizes, key=lambda place: (sizes[place], place))
    groups = dict.fromkeys(left, 0)
    sides = [side for side in (1, 2) if wanted[side]]
    for number, side in enumerate(sides):
        held = 0
        while len(left) > len(sides) - number and (
            not held or held + sizes[left[0]] / 2 < wanted[side] * total
        ):
            held += sizes[left[0]]
            groups[left.pop(0)] = side
    return groups


def _too_few(documents: int, test_fraction: float) -> str:
    found = "a single document" if documents == 1 else f"{documents} different documents"
    splits = "training, validation and test" if test_fraction else "training and validation"
    return (
        f"data.source holds {found}: {splits} need different ones.\n"
        'Cut the text into several files, or into the lines of a .jsonl file: {"text": "..."}.'
    )


def keys_of(batch: pyarrow.RecordBatch) -> list[str | None]:
    """Returns the key of each document's group; None for each where they have none."""
    return batch[SPLIT_KEY].to_pylist() if SPLIT_KEY in batch.schema.names else [None] * len(batch)


def text_hash(text: bytes) -> int:
    """Returns a hash of a text from 0 to 2**64 - 1, uniform over texts; equal texts have equal hashes."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
