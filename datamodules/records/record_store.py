"""Encoded records on disk: the ids and labels of their sequences, and numbers of each record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from core import durable
from core.errors import ConfigError
from datamodules.packing.mapped_file import MappedFile
from toolkit.bounded import parse_json, read_error, read_inside

INDEX = "records.json"

KINDS = {"ids": np.int32, "labels": np.int32, "ends": np.int64, "values": np.float64}
"""Name of a file without its suffix -> type of its numbers, little-endian."""

NOTES = {"notes": np.uint8, "note_ends": np.int64}
"""Further files of records with notes."""


class Encoded(NamedTuple):
    """A record as it is stored.

    Attributes:
        sequences: Ids and labels of each sequence, of the same length; labels of -100 are ignored.
        values: Numbers of the record, as many for each.
        note: A text that is kept with the record.
    """

    sequences: Sequence[tuple[ArrayLike, ArrayLike]]
    values: Sequence[float] = ()
    note: str = ""


class RecordWriter:
    """Writes records one after the other.

    Args:
        folder: A new folder.
        sequences: Sequences of a record.
        values: Numbers of a record.
        notes: Whether records have a note.
    """

    def __init__(self, folder: Path, sequences: int, values: int, notes: bool = False) -> None:
        folder.mkdir(parents=True)
        self.folder, self.sequences, self.values, self.notes = folder, sequences, values, notes
        self._stack = ExitStack()
        self._kinds = KINDS | (NOTES if notes else {})
        paths = {name: folder / f"{name}.bin" for name in self._kinds}
        self._files = {name: self._stack.enter_context(path.open("wb")) for name, path in paths.items()}
        self.records = self.tokens = self._note_bytes = 0

    def add(self, record: Encoded) -> None:
        """Appends a record."""
        for ids, labels in record.sequences:
            self.tokens += len(np.asarray(ids))
            self._append("ids", ids)
            self._append("labels", labels)
            self._append("ends", [self.tokens])
        self._append("values", record.values)
        if self.notes:
            note = np.frombuffer(record.note.encode(), np.uint8)
            self._note_bytes += len(note)
            self._append("notes", note)
            self._append("note_ends", [self._note_bytes])
        self.records += 1

    def _append(self, name: str, numbers: ArrayLike) -> None:
        self._files[name].write(np.asarray(numbers, np.dtype(self._kinds[name]).newbyteorder("<")).tobytes())

    def close(self) -> None:
        """Finishes the files."""
        self._stack.close()
        sizes = {"records": self.records, "sequences": self.sequences, "values": self.values}
        sizes |= {"note_bytes": self._note_bytes} if self.notes else {}
        durable.write(self.folder / INDEX, json.dumps(sizes | {"tokens": self.tokens}))


class RecordStore:
    """The records of a folder, mapped into memory.

    Args:
        folder: What a :class:`RecordWriter` wrote.

    Attributes:
        number_of_documents: Number of records.
        sequences: Sequences of a record.
        width: Numbers of a record.

    Raises:
        ConfigError: If a file is missing or has another size than it should; its methods raise one if a file is cut
            while it is in use, or its disk fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = parse_json(read_inside(folder, INDEX))
            records, self.sequences, self.width, tokens = (
                int(index[name]) for name in ("records", "sequences", "values", "tokens")
            )
            self.number_of_documents = records
            sizes = {
                "ids": tokens,
                "labels": tokens,
                "ends": records * self.sequences,
                "values": records * self.width,
            }
            self._ids, self._labels, ends, self._values = (
                _Numbers(folder / f"{name}.bin", KINDS[name], size) for name, size in sizes.items()
            )
            sizes = {"notes": int(index.get("note_bytes", 0)), "note_ends": records}
            self._notes, self._note_ends = (
                _Numbers(folder / f"{name}.bin", NOTES[name], size) if "note_bytes" in index else None
                for name, size in sizes.items()
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = read_error(error) if isinstance(error, OSError | ValueError) else f"it lacks {error}"
            raise ConfigError(
                f"{folder} is missing or damaged: {what}.\nDelete {folder.parent} and run again: it is written again."
            ) from error
        starts = np.concatenate([np.zeros(1, np.int64), ends.read(0, len(ends))])
        self.lengths = np.diff(starts).reshape(records, self.sequences)
        self._starts = starts[:-1].reshape(records, self.sequences)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordStore, (self.folder,)  # a spawned worker maps the files itself

    def __len__(self) -> int:
        return len(self._ids)

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Returns (number, tokens of the longest sequence) of records, (N, 2) int64."""
        return np.stack([indices, self.lengths[indices].max(axis=1)], axis=1)

    def sequence(
        self, record: int, which: int, most: int, keep_end: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and labels of a sequence of a record: at most so many, the first ones.

        Args:
            record: Number of the record.
            which: Number of the sequence in it.
            most: Number of tokens.
            keep_end: Whether the last token is one of them also where the sequence is longer.
        """
        begin, size = int(self._starts[record, which]), int(self.lengths[record, which])
        if size <= most or not keep_end:
            end = begin + min(size, most)
            return self._ids.read(begin, end), self._labels.read(begin, end)
        first, last = begin + most - 1, begin + size - 1
        ids, labels = (
            np.concatenate([numbers.read(begin, first), numbers.read(last, last + 1)])
            for numbers in (self._ids, self._labels)
        )
        return ids, labels

    def values(self, record: int) -> np.ndarray:
        """Returns the numbers of a record, (`width`,)."""
        return self._values.read(record * self.width, (record + 1) * self.width)

    def all_values(self) -> np.ndarray:
        """Returns the numbers of all records, (records, `width`)."""
        return self._values.read(0, len(self._values)).reshape(self.number_of_documents, self.width)

    def note(self, record: int) -> str:
        """Returns the note of a record, where records have one."""
        assert self._notes is not None
        assert self._note_ends is not None
        begin, end = (
            self._note_ends.read(record - 1, record + 1) if record else (0, *self._note_ends.read(0, 1))
        )
        return self._notes.read(int(begin), int(end)).tobytes().decode()

    def label_of_each(self) -> np.ndarray:
        """Returns the first label of each record, of records of one sequence that all have one."""
        labels = self._labels.read(0, len(self))
        labelled = np.flatnonzero(labels >= 0)
        return labels[labelled[np.searchsorted(labelled, self._starts[:, 0])]]


class _Numbers:
    """The numbers in a file, mapped into memory.

    Args:
        path: The file.
        kind: Their type.
        size: How many there have to be.

    Raises:
        OSError: If it cannot be read.
        ValueError: If there are not as many.
    """

    def __init__(self, path: Path, kind: Any, size: int) -> None:
        dtype = np.dtype(kind).newbyteorder("<")
        if (found := path.stat().st_size) != size * dtype.itemsize:
            raise ValueError(f"{path.name} has {found:,} bytes, not {size * dtype.itemsize:,}")
        self._path, self._file, self._numbers = path, None, np.empty(0, dtype)
        if size:
            with path.open("rb") as stream:
                self._file = MappedFile(stream)
            self._numbers = self._file.raw.view(dtype)

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Returns some of them: a view, whose bytes the system has read."""
        found = self._numbers[begin:end]
        if self._file is not None and len(found):
            size = found.itemsize
            try:
                self._file.require(begin * size, end * size)
            except OSError as error:
                raise ConfigError(
                    f"{self._path} is damaged: {read_error(error)}.\nDelete {self._path.parent.parent} and run again: it is "
                    "written again."
                ) from error
        return found
