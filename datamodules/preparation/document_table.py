"""The table of a prepared folder's documents: what readers and transforms know of each, beside its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from core import durable
from datamodules.preparation.split import SPLIT_KEY, SPLITS
from toolkit.arrow_columns import numbers, strings

DOCUMENTS = "documents.parquet"

_NO_METADATA = ("text", "source", "id", SPLIT_KEY)


class DocumentTable:
    """Writes documents.parquet: a row for each stored document, in the order in which its split stores them.

    Its columns: `split`; `tokens`, with the end-of-text id; `source`; `id`; and the further columns of the batches. There is
    no file if there are none.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: Any = None

    def add(
        self, batch: pyarrow.RecordBatch, rows: Sequence[int], splits: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """Adds documents.

        Args:
            batch: What they were read as.
            rows: The row in the batch of each; one that was cut is there more than once.
            splits: Index of the split of each.
            tokens: Tokens of each.
        """
        names = [name for name in batch.schema.names if name not in _NO_METADATA]
        if not (names and rows):
            return
        taken = batch.take(numbers(np.asarray(rows, np.int64)))
        columns = {
            "split": strings([SPLITS[split] for split in splits]),
            "tokens": numbers(np.asarray(tokens, np.int64)),
        } | {name: taken[name] for name in ["source", "id", *names]}
        self.write(pyarrow.record_batch(list(columns.values()), names=list(columns)))

    def write(self, rows: pyarrow.RecordBatch) -> None:
        """Writes rows of such a table."""
        if self._writer is None:
            from pyarrow import parquet

            self._writer = parquet.ParquetWriter(self.path, rows.schema, compression="zstd")
        self._writer.write_batch(rows)

    def __enter__(self) -> DocumentTable:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def join_tables(parts: Sequence[Path], folder: Path) -> None:
    """Joins the tables of the tasks, in their order; writes nothing if they have none."""
    from pyarrow import parquet

    found = [part / DOCUMENTS for part in parts if (part / DOCUMENTS).exists()]
    if found and not (folder / DOCUMENTS).exists():
        with durable.replacing(folder / DOCUMENTS) as temporary, DocumentTable(temporary) as table:
            for path in found:
                with parquet.ParquetFile(path) as file:
                    for rows in file.iter_batches():
                        table.write(rows)
