"""Records that do not fit into memory: kept in files by the range of their keys, one of which is read at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

PARTITION_BYTES = 32 << 20
"""Bytes of a file, about, if the keys are evenly distributed."""

_BUFFER_BYTES = 32 << 20
_MOST_PARTITIONS = 1 << 14


class SpilledRecords:
    """Records in files that split the range of their keys evenly. Records of one file stay in the order of `add`.

    Args:
        folder: Where the files go; created here.
        dtype: Type of a record.
        expected: Number of records, about; decides the number of files.
        end: Keys are below it.
    """

    def __init__(self, folder: Path, dtype: np.dtype, expected: int, end: int = 1 << 64) -> None:
        folder.mkdir(parents=True)
        self.folder, self.dtype = folder, dtype
        number = min(-(-expected * dtype.itemsize // PARTITION_BYTES) or 1, _MOST_PARTITIONS)
        self._width = -(-end // number)  # of the range of keys of a file
        self._held: list[tuple[np.ndarray, np.ndarray]] = []
        self._held_bytes = 0

    def add(self, records: np.ndarray, keys: np.ndarray) -> None:
        """Adds records with their keys, which are uint64."""
        if not len(records):
            return
        if self._width < 1 << 64:
            places = (keys // np.uint64(self._width)).astype(np.uint16)
        else:
            places = np.zeros(len(keys), np.uint16)
        self._held.append((records, places))
        self._held_bytes += records.nbytes
        if self._held_bytes >= _BUFFER_BYTES:
            self._write()

    def partitions(self) -> Iterator[np.ndarray]:
        """Yields the records of each file, in ascending order of the files' ranges."""
        self._write()
        for path in sorted(self.folder.iterdir()):
            yield np.fromfile(path, self.dtype)

    def pieces(self, most: int) -> Iterator[Iterator[np.ndarray]]:
        """Yields each file as :meth:`partitions` does, as at most `most` records at a time, and removes it: one key may have very many."""
        self._write()
        for path in sorted(self.folder.iterdir()):
            yield self._read(path, most)

    def _read(self, path: Path, most: int) -> Iterator[np.ndarray]:
        with path.open("rb") as file:
            while len(records := np.fromfile(file, self.dtype, most)):
                yield records
        path.unlink()

    def _write(self) -> None:
        if not self._held:
            return
        records = np.concatenate([records for records, _ in self._held])
        places = np.concatenate([places for _, places in self._held])
        self._held, self._held_bytes = [], 0
        order = np.argsort(places, kind="stable")
        places = places[order]
        begins = np.flatnonzero(np.diff(places, prepend=np.uint16(places[0] + 1)))
        for begin, end in zip(begins, [*begins[1:], len(places)], strict=True):
            with (self.folder / f"{places[begin]:05}").open("ab") as file:
                records[order[begin:end]].tofile(file)
