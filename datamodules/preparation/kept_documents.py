"""Keeps a task's documents as they are before a transform that sees all: what comes after reads them from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow

from core import durable
from core.contracts import Transform

_TALLY = b"tally"


class KeptDocuments:
    """Files `documents-INDEX/NUMBER` with the documents of task NUMBER before transform INDEX, and the counts up to there.

    A file is published by one rename, so that it is whole or not there; where it is not, documents are read again. It is a
    sequence of Arrow IPC streams, compressed with zstd: one for batches of one schema, at last an empty one with the counts.

    Args:
        parent: Parent of the folders.
        indices: The transforms before which documents are kept.
    """

    def __init__(self, parent: Path, indices: tuple[int, ...]) -> None:
        self.parent, self.indices = parent, indices

    def path(self, number: int, index: int) -> Path:
        """Returns the file of a task."""
        return self.parent / f"documents-{index}" / f"{number:06}"

    def writing(
        self,
        batches: Iterator[pyarrow.RecordBatch],
        counts: Callable[[], Mapping[str, Any]],
        number: int,
        index: int,
    ) -> Iterator[pyarrow.RecordBatch]:
        """Yields the batches, and writes them; there is a file if all were taken. Removes what was kept of the task before."""
        path = self.path(number, index)
        with durable.replacing(path) as temporary, pyarrow.OSFile(str(temporary), "wb") as file:
            yield from _written(batches, file)
            _stream(file, pyarrow.schema([], {_TALLY: json.dumps(counts()).encode()})).close()
        self.remove(number, before=index)

    def open(self, number: int, until: int) -> tuple[int, pyarrow.OSFile] | None:
        """Opens what is kept of a task before the last possible transform, `until` at most: its index, and the file."""
        for index in sorted(self.indices, reverse=True):
            if index <= until:
                with suppress(FileNotFoundError):
                    return index, pyarrow.OSFile(str(self.path(number, index)), "rb")
        return None

    def remove(self, number: int, before: int | None = None) -> None:
        """Removes what is kept of a task, before the transform `before` alone if it is given."""
        for index in self.indices:
            if before is None or index < before:
                with suppress(FileNotFoundError):
                    self.path(number, index).unlink()

    def size(self) -> int:
        """Returns the size of what is kept, in bytes."""
        return sum(path.stat().st_size for path in self.parent.glob("documents-*/[0-9]*"))


def _written(batches: Iterator[pyarrow.RecordBatch], file: pyarrow.OSFile) -> Iterator[pyarrow.RecordBatch]:
    stream, schema = None, None
    for batch in batches:
        if stream is None or not batch.schema.equals(schema, check_metadata=True):
            if stream is not None:
                stream.close()
            schema = batch.schema
            stream = _stream(file, schema)
        stream.write_batch(batch)
        yield batch
    if stream is not None:
        stream.close()


def _stream(file: pyarrow.OSFile, schema: pyarrow.Schema) -> Any:
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    return pyarrow.ipc.new_stream(file, schema, options=options)


def kept_in(
    file: pyarrow.OSFile, restore: Callable[[Mapping[str, Any]], None]
) -> Iterator[pyarrow.RecordBatch]:
    """Yields the batches of a file, closes it, and calls `restore` with the counts."""
    with file:
        while True:
            with pyarrow.ipc.open_stream(file) as stream:
                counts = (stream.schema.metadata or {}).get(_TALLY)
                if counts is not None:
                    restore(json.loads(counts))
                    return
                yield from stream


def places(transforms: Sequence[Transform]) -> tuple[int, ...]:
    """Returns the transforms before which documents are kept: those that see all, unless nothing but such are in between."""
    found: list[int] = []
    others = True
    for index, transform in enumerate(transforms):
        if not transform.needs_all_documents:
            others = True
        elif others:
            found.append(index)
            others = False
    return tuple(found)
