"""What passes through the transforms of a preparation: documents and bytes after each, and a few documents as samples."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow

from datamodules.preparation.readers.opened_files import printable

Example = tuple[str, str, str]
"""A hash that chooses among documents, the document's id, and how its text begins."""

EXAMPLES, SHOWN = 5, 400
"""Documents that are kept as examples, and characters of each."""

_OFFSETS = {pyarrow.string(): np.int32, pyarrow.large_string(): np.int64}
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio, Knuth's multiplicative hashing


def merged(some: Sequence[Example], others: Sequence[Example]) -> list[Example]:
    """Returns the examples with the smallest hashes: the same ones whatever the tasks and their order."""
    return sorted({(one[0], one[1], one[2]) for one in (*some, *others)})[:EXAMPLES]


class Flow:
    """Documents and bytes of text as read (0) and after each transform (1, 2, ...), and samples of them.

    The samples of a place are the documents that pass it whose ids have the smallest hashes. A hash of the text would cost
    more than some transforms do.

    Args:
        transforms: Number of transforms.
    """

    def __init__(self, transforms: int) -> None:
        self.documents, self.bytes = [0] * (transforms + 1), [0] * (transforms + 1)
        self.samples: list[list[Example]] = [[] for _ in range(transforms + 1)]
        self._hashed: tuple[pyarrow.Array, np.ndarray] | None = None

    def count(self, place: int, batch: pyarrow.RecordBatch) -> None:
        """Counts the documents of a batch that has passed a place."""
        self.documents[place] += len(batch)
        if len(batch):
            self.bytes[place] += text_bytes(batch["text"])
            self._sample(place, batch)

    def _sample(self, place: int, batch: pyarrow.RecordBatch) -> None:
        found, held = self._hashes(batch["id"]), self.samples[place]
        if len(held) == EXAMPLES:
            rows = np.flatnonzero(found <= np.uint64(int(held[-1][0], 16)))
        elif len(found) > EXAMPLES:
            rows = np.flatnonzero(found <= np.partition(found, EXAMPLES - 1)[EXAMPLES - 1])
        else:
            rows = np.arange(len(found))
        if len(rows):
            texts, names = batch["text"], batch["id"]
            some = [
                (f"{found[row]:016x}", printable(names[row].as_py()), texts[row].as_py()[:SHOWN])
                for row in rows.tolist()
            ]
            self.samples[place] = merged(held, some)

    def _hashes(self, names: pyarrow.Array) -> np.ndarray:
        """Returns a hash of each id; those of the place before if no document was dropped there."""
        if self._hashed is None or not names.equals(self._hashed[0]):
            sums = np.array([zlib.crc32(name.encode()) for name in names.to_pylist()], np.uint64)
            self._hashed = (
                names,
                (sums + np.uint64(1)) * _ODD,
            )  # wraps around: ids that differ little lie far apart
        return self._hashed[1]

    def record(self) -> list[dict[str, Any]]:
        """Returns the counts of each place as JSON values."""
        places = zip(self.documents, self.bytes, self.samples, strict=True)
        return [{"documents": n, "bytes": size, "samples": samples} for n, size, samples in places]

    def add(self, record: Sequence[Mapping[str, Any]]) -> None:
        """Adds the counts of a task."""
        for place, counts in enumerate(record):
            self.documents[place] += counts["documents"]
            self.bytes[place] += counts["bytes"]
            self.samples[place] = merged(self.samples[place], counts["samples"])


def text_bytes(texts: pyarrow.Array) -> int:
    """Returns the size of a column of strings as UTF-8, without looking at them where Arrow stores where each begins."""
    kind = _OFFSETS.get(texts.type)
    if kind is None or texts.null_count:
        return sum(len(text.encode()) for text in texts.to_pylist() if text)
    offsets = np.frombuffer(texts.buffers()[1], kind)
    return int(offsets[texts.offset + len(texts)] - offsets[texts.offset])
