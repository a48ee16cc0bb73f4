"""Which documents are in a batch: packings that know it, and what a prepared folder says of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from core.errors import ConfigError

__all__ = ["TABLE", "LocatesDocuments", "Place", "sources_of"]

TABLE = "documents.parquet"
"""File of a prepared folder with a row for each document, where the reader gave more than texts."""


class Place(NamedTuple):
    """A part of a document in a row.

    Attributes:
        row: The row of this rank's batch.
        column: Where it begins in the row.
        tokens: How many it has there.
        document: The document's number in its split, from 0.
        offset: Tokens of the document before this part.
    """

    row: int
    column: int
    tokens: int
    document: int
    offset: int


@runtime_checkable
class LocatesDocuments(Protocol):
    """Packed batches that know which documents their rows are made of."""

    def places(self, rows: Sequence[Any], own: slice) -> list[Place]:
        """Returns the documents in a slice of rows, which `take` returned, in order."""
        ...


def sources_of(folder: Path, split: str, documents: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Returns source and id of documents of a split, where the prepared folder has them.

    Raises:
        ConfigError: If the table cannot be read.
    """
    wanted, path = sorted(set(documents)), folder / TABLE
    if not path.is_file():
        return {}
    import pyarrow
    from pyarrow import parquet

    found, seen = {}, 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["split", "source", "id"]):
                rows = [index for index, name in enumerate(batch["split"].to_pylist()) if name == split]
                for number in [n for n in wanted if seen <= n < seen + len(rows)]:
                    row = rows[number - seen]
                    found[number] = (str(batch["source"][row]), str(batch["id"][row]))
                seen += len(rows)
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    return found
