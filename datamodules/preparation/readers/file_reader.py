"""What readers have in common: rows of documents, packed into record batches."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow

from core.contracts import DocumentSource, Reader, Reject
from core.errors import ConfigError
from datamodules.preparation.readers.opened_files import unstorable
from datamodules.preparation.readers.source_files import Piece, SourceFiles
from datamodules.preparation.split import SPLIT_KEY
from toolkit.arrow_columns import strings

_COLUMNS = ("text", "source", "id", "split", "tokens", SPLIT_KEY)
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 512

Row = tuple[str, str, str] | tuple[str, str, str, Mapping[str, str | None]]
"""Text, source and id of a document, and what else is known of it, by the names in `metadata`."""


class FileReader(Reader):
    """A reader of files. A subclass sets `files` and cuts them into tasks.

    Attributes:
        files: The files that it reads.
        metadata: Names of the further columns that its documents have, such as url, date, language, license.
    """

    files: SourceFiles
    metadata: Sequence[str] = ()

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the files' names, sizes and digests, and the options."""
        return self.files.fingerprint() | dict(self.options())

    def read(self, task: Mapping[str, Any], reject: Reject) -> Iterator[pyarrow.RecordBatch]:
        """Yields the documents of a task."""
        rows = (row for piece in self.files.pieces(task, reject) for row in self.rows(piece, reject))
        return batches(rows, self.metadata)

    @abstractmethod
    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the documents of a piece of a file; rejects what cannot be used."""


def batches(rows: Iterable[Row], metadata: Sequence[str] = ()) -> Iterator[pyarrow.RecordBatch]:
    """Packs rows into record batches of about 1 MiB, 512 rows at most, with a column for each name of `metadata`."""
    held: list[Row] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row[0])
        if size >= BATCH_BYTES or len(held) == BATCH_DOCUMENTS:
            yield _batch(held, metadata)
            held, size = [], 0
    if held:
        yield _batch(held, metadata)


def _batch(rows: list[Row], metadata: Sequence[str]) -> pyarrow.RecordBatch:
    columns: dict[str, Sequence[str | None]] = {
        "text": [row[0] for row in rows],
        "source": [row[1] for row in rows],
        "id": [row[2] for row in rows],
    }
    if metadata:
        known: list[Mapping[str, str | None]] = [row[3] if len(row) == 4 else {} for row in rows]
        columns |= {name: [values.get(name) for values in known] for name in metadata}
    return pyarrow.record_batch([strings(column) for column in columns.values()], names=list(columns))


def checked_metadata(reader: str, names: Sequence[str]) -> list[str]:
    """Returns the names of the further columns that an argument `metadata` asks for.

    Raises:
        ConfigError: If one is there twice, or is a column that all documents have.
    """
    for number, name in enumerate(names):
        if name in _COLUMNS:
            raise ConfigError(
                f"{reader}: metadata names {name!r}, which every document has. Name further ones."
            )
        if name in names[:number]:
            raise ConfigError(f"{reader}: metadata names {name!r} twice.")
    return list(names)


def as_metadata(value: Any) -> str | None:
    """Returns a value as text: numbers, booleans, and lists of strings as JSON has them; None for anything else."""
    if isinstance(value, str):
        return None if unstorable(value) else value
    if isinstance(value, list) and all(isinstance(one, str) and not unstorable(one) for one in value):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if isinstance(value, bool | int | float) else None


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
