"""What readers have in common: rows of documents, packed into record batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow

from core.contracts import DocumentSource, Reader, Reject
from datamodules.preparation.readers.source_files import Piece, SourceFiles
from toolkit.arrow_columns import strings

BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 512

Row = tuple[str, str, str]
"""Text, source and id of a document."""


class FileReader(Reader):
    """A reader of files. A subclass sets `files` and cuts them into tasks.

    Attributes:
        files: The files that it reads.
    """

    files: SourceFiles

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the files' names, sizes and digests, and the options."""
        return self.files.fingerprint() | dict(self.options())

    def read(self, task: Mapping[str, Any], reject: Reject) -> Iterator[pyarrow.RecordBatch]:
        """Yields the documents of a task."""
        return batches(row for piece in self.files.pieces(task, reject) for row in self.rows(piece, reject))

    @abstractmethod
    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the documents of a piece of a file; rejects what cannot be used."""


def batches(rows: Iterable[Row]) -> Iterator[pyarrow.RecordBatch]:
    """Packs (text, source, id) rows into record batches of about 1 MiB, 512 rows at most."""
    held: list[Row] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row[0])
        if size >= BATCH_BYTES or len(held) == BATCH_DOCUMENTS:
            yield _batch(held)
            held, size = [], 0
    if held:
        yield _batch(held)


def _batch(rows: list[Row]) -> pyarrow.RecordBatch:
    columns = [strings(column) for column in zip(*rows, strict=True)]
    return pyarrow.record_batch(columns, names=["text", "source", "id"])


class SingleTaskReader(Reader):
    """Reads a document source that is no `Reader` as a single task.

    Args:
        source: The documents.
    """

    def __init__(self, source: DocumentSource) -> None:
        self.source = source

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the source's fingerprint."""
        return self.source.fingerprint()

    def options(self) -> Mapping[str, Any]:
        """Returns the source's fingerprint, which holds its options."""
        return self.source.fingerprint()

    def tasks(self) -> list[dict[str, Any]]:
        """Returns one task."""
        return [{"fingerprint": dict(self.source.fingerprint())}]

    def read(self, task: Mapping[str, Any], reject: Reject) -> Iterator[pyarrow.RecordBatch]:
        """Yields all documents."""
        name = type(self.source).__name__
        return batches((text, name, str(number)) for number, text in enumerate(self.source.documents()))
