"""Reads documents from Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from core.contracts import Reject
from core.errors import ConfigError, nearest
from core.technique import technique
from datamodules.preparation.readers.file_reader import (
    BATCH_DOCUMENTS,
    FileReader,
    Row,
    as_metadata,
    checked_metadata,
)
from datamodules.preparation.readers.source_files import Piece, SourceFiles

BROKEN = (OSError, pyarrow.ArrowException)


@technique(paper="Apache Parquet, parquet.apache.org; read with pyarrow")
class ParquetDocuments(FileReader):
    """Reads .parquet files: one document per row; only the needed columns are read.

    Files are read in the order of their names; workers share a large one by its row groups. A broken row group, or a
    file without a footer, is rejected with all its rows; a row without text is rejected alone.

    Args:
        source: A path, a folder, or a glob.
        text_column: Column of the text.
        source_column: Column of the source that the document is counted under; None: named after the file.
        metadata: Columns that are kept beside the tokens, in documents.parquet: strings; numbers, dates and lists of strings as
            text.

    Raises:
        ConfigError: If there is no such file, or a file has no such column, or `metadata` names one that every document has.

    Example:
        data:
          init_args:
            reader: {class_path: ParquetDocuments, init_args: {text_column: text}}
    """

    def __init__(
        self,
        source: str,
        text_column: str = "text",
        source_column: str | None = None,
        metadata: Sequence[str] = (),
    ) -> None:
        self.text_column, self.source_column = text_column, source_column
        self.metadata = checked_metadata("ParquetDocuments", metadata)
        self.files = SourceFiles(source, (".parquet",))

    def options(self) -> dict[str, Any]:
        """Returns the columns."""
        kept = {"metadata": self.metadata} if self.metadata else {}
        return {"text_column": self.text_column, "source_column": self.source_column} | kept

    def tasks(self) -> list[dict[str, Any]]:
        """Returns ranges of row groups."""
        return self.files.tasks(self._cut)

    def _cut(self, path: Path, size: int, task_bytes: int) -> Iterator[Piece]:
        try:
            footer = parquet.read_metadata(path)
            schema = footer.schema.to_arrow_schema()
        except BROKEN:  # it is rejected, with the reason, when it is read
            yield {"bytes": size}
            return
        check_columns(path, schema, self.text_column, self.source_column, metadata=self.metadata)
        groups, weight = [], 0
        for group in range(footer.num_row_groups):
            groups.append(group)
            weight += compressed_bytes(footer.row_group(group))
            if weight >= task_bytes or group == footer.num_row_groups - 1:
                yield {"bytes": weight, "row_groups": [groups[0], groups[-1] + 1]}
                groups, weight = [], 0

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the documents of a range of row groups."""
        path = Path(piece["path"])
        name, source = self.files.name(path), self.files.source_of(path)
        columns = [column for column in (self.text_column, self.source_column, *self.metadata) if column]
        place = str(path)
        if not self.files.readable(path, reject):
            return
        try:
            with parquet.ParquetFile(path) as file:
                for group in range(*piece.get("row_groups", [0, 0])):
                    place = f"{path}, row group {group}"
                    try:
                        table = file.iter_batches(BATCH_DOCUMENTS, row_groups=[group], columns=columns)
                        at = f"{name}:{group}"
                        yield from rows(
                            table,
                            self.text_column,
                            self.source_column,
                            source,
                            at,
                            path,
                            reject,
                            self.metadata,
                        )
                    except BROKEN as error:
                        lost = compressed_bytes(file.metadata.row_group(group))
                        reject(source, place, "broken Parquet file", str(error).splitlines()[0], lost)
        except BROKEN as error:
            reject(source, place, "broken Parquet file", str(error).splitlines()[0], piece["bytes"])


def compressed_bytes(group: Any) -> int:
    """Returns the bytes that a row group takes in its file."""
    return sum(group.column(i).total_compressed_size for i in range(group.num_columns))


def check_columns(
    path: Path, schema: pyarrow.Schema, *wanted: str | None, metadata: Sequence[str] = ()
) -> None:
    """Raises a ConfigError if a file has no such column, or one of `wanted` that does not hold strings."""
    for column in filter(None, (*wanted, *metadata)):
        if column not in schema.names:
            hint = nearest(column, set(schema.names))
            raise ConfigError(
                f"{path} has no column {column!r}.{hint}\nIts columns: {', '.join(schema.names) or 'none'}."
            )
        if column not in wanted:
            continue
        kind = schema.field(column).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ConfigError(f"{path}: the column {column!r} holds {kind}, not strings.")


def rows(
    tables: Iterable[pyarrow.RecordBatch],
    text_column: str,
    source_column: str | None,
    source: str,
    name: str,
    path: Path,
    reject: Reject,
    metadata: Sequence[str] = (),
) -> Iterator[Row]:
    """Yields (text, source, id) of each row of the record batches, and its metadata; the id is the name and the row's number."""
    number = 0
    for table in tables:
        sources = table[source_column].to_pylist() if source_column else [None] * len(table)
        known = {column: _as_text(table[column]) for column in metadata}
        for at, (cell, own) in enumerate(zip(table[text_column], sources, strict=True)):
            number += 1
            try:
                text = cell.as_py()
            except UnicodeDecodeError as error:
                reject(source, f"{path}, row {number - 1}", "not UTF-8", str(error))
                continue
            if text is None:
                reject(source, f"{path}, row {number - 1}", f'the column "{text_column}" is empty', "")
            else:
                more = {column: values[at] for column, values in known.items()}
                yield text, own or source, f"{name}:{number - 1}", more


def _as_text(column: pyarrow.Array) -> list[str | None]:
    """Returns the values of a column of metadata; None for those that are not known, or cannot be text."""
    if pyarrow.types.is_date(column.type) or pyarrow.types.is_timestamp(column.type):
        dates = column.cast(pyarrow.string()).to_pylist()
        return [date and date.replace(" ", "T", 1) for date in dates]
    try:
        return [as_metadata(value) for value in column.to_pylist()]
    except UnicodeDecodeError:
        return [_text_of(cell) for cell in column]


def _text_of(cell: pyarrow.Scalar) -> str | None:
    try:
        return as_metadata(cell.as_py())
    except UnicodeDecodeError:
        return None
