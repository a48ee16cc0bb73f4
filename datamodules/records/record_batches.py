"""Rows of encoded records: several in a row, or one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from core.contracts import IGNORED_LABEL, Batch
from core.errors import ConfigError
from datamodules.packing.best_fit import BestFitBatches
from datamodules.packing.concatenate import Segment
from datamodules.packing.grouped import GROUP, GroupedBatches, Row
from datamodules.packing.padded_documents import PaddedBatches
from datamodules.packing.permutation import Permutation
from datamodules.packing.prefetching import Chunk
from datamodules.records.record_store import RecordStore

PADDING = -1
"""`document_ids` of padding."""

Arrays = dict[str, np.ndarray]


@dataclass(eq=False)
class RecordBatches(GroupedBatches):
    """One rank's batches of records; a piece is (number of the record, tokens of it that are used).

    The records of a row have their own `document_ids` and `position_ids`; padding has the id -1. A record of several
    sequences is a row of the packing, and as many successive rows of the batch: `batch_size` counts records there.

    Args:
        store: The records.
        cut_long: Whether of a record that is longer than a row its first tokens are taken; else it is left out.
        keep_end: Whether the last token of such a record is kept, too.
        members: The records of each class, of which each then gives as many to an epoch; empty: all records once.
        further: Returns the arrays of these rows with more of them; picklable. None: there are none.
    """

    store: Any
    cut_long: bool = False
    keep_end: bool = False
    members: Sequence[np.ndarray] = ()
    further: Callable[[RecordStore, Sequence[Row], Arrays], Arrays] | None = None

    def documents_of(self, group: int) -> np.ndarray:
        """Returns the records of a group; with `members` of each class in turn, in an order of its own."""
        if not self.members:
            return super().documents_of(group)
        epoch, number = divmod(group, self.groups)
        first = epoch * self.documents
        places = np.arange(first + number * GROUP, min(first + (number + 1) * GROUP, first + self.documents))
        found = np.empty(len(places), np.int64)
        for kind, records in enumerate(self.members):
            mine = places % len(self.members) == kind
            rounds, within = np.divmod(places[mine] // len(self.members), len(records))
            orders = {at: Permutation(len(records), (self.seed, int(at), kind)) for at in np.unique(rounds)}
            found[mine] = [records[orders[at](int(index))] for at, index in zip(rounds, within, strict=True)]
        return self.store.documents(found)

    def cut(self, pieces: list[Segment], length: int) -> list[Segment]:
        """Returns the records that fit, and the beginnings of others that still have labels where these are taken."""
        fitting = []
        whole = self.store.documents(np.array([record for record, _ in pieces], np.int64))
        for record, size in whole.tolist():
            if size <= length or (self.cut_long and self._has_labels(record, length)):
                fitting.append((record, min(size, length)))
        return fitting

    def sizes(self, documents: np.ndarray, length: int) -> np.ndarray:
        """Returns how many tokens of each of these records are used."""
        return np.array([size for _, size in self.cut(documents.tolist(), length)], np.int64)

    def _has_labels(self, record: int, length: int) -> bool:
        labels = [
            self.store.sequence(record, which, length, self.keep_end)[1]
            for which in range(self.store.sequences)
        ]
        return all((found != IGNORED_LABEL).any() for found in labels)

    def fits(self, length: int) -> int:
        """Returns how many of the records can be used in rows of so many tokens."""
        long = np.flatnonzero(self.store.lengths.max(axis=1) > length)
        kept = sum(self._has_labels(int(record), length) for record in long) if self.cut_long else 0
        return int(self.store.number_of_documents - len(long) + kept)

    def order(self) -> dict[str, Any]:
        """Returns what a cursor depends on."""
        return super().order() | {
            "rows": type(self).__name__,
            "cut_long": self.cut_long,
            "balanced": len(self.members),
        }

    def take(self, cursor: dict[str, Any], count: int) -> tuple[list[Row], dict[str, Any]]:
        """Returns the records of each row."""
        if not self.pad and cursor["taken"] == [] and not self._any_fits(self.sequence_length):
            raise ConfigError(
                f"No record fits into a row of {self.sequence_length} tokens: raise data.sequence_length."
            )
        return super().take(cursor, count)

    def _any_fits(self, length: int) -> bool:
        known: dict[int, bool] = self.__dict__.setdefault("_fitting", {})
        if length not in known:
            known[length] = self.fits(length) > 0
        return known[length]

    def read(self, rows: Sequence[Row], own: slice) -> Batch:
        """Returns a slice of the rows as a batch, as wide as the longest row of all."""
        chosen = [*rows[own]]
        chosen += [[]] * (self.batch_size - len(chosen))
        each = self.store.sequences
        shape = len(chosen) * each, self.width(rows)
        ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        documents, places = np.full(shape, PADDING, np.int64), np.zeros(shape, np.int64)
        for index, row in enumerate(chosen):
            for which in range(each):
                at, line = 0, index * each + which
                for number, (record, most) in enumerate(row):
                    found = self.store.sequence(record, which, most, self.keep_end)
                    here = slice(at, at + len(found[0]))
                    ids[line, here], labels[line, here] = found
                    documents[line, here], places[line, here] = number, np.arange(len(found[0]))
                    at = here.stop
        arrays = {"input_ids": ids, "labels": labels, "document_ids": documents, "position_ids": places}
        if self.further:
            arrays = self.further(self.store, chosen, arrays)
        return cast(Batch, {name: torch.from_numpy(values) for name, values in arrays.items()})

    def chunks(self, rows: Sequence[Row], own: slice) -> Iterator[Chunk]:
        """Yields nothing: the records are on this machine."""
        return iter(())

    def cache_bytes(self) -> int:
        """Returns 0: the records are on this machine."""
        return 0


class PackedRecords(RecordBatches, BestFitBatches):
    """Several complete records in a row, by best-fit decreasing; rows are `sequence_length` wide."""


class PaddedRecords(RecordBatches, PaddedBatches):
    """One record a row, with others of similar length."""


def batches_of(store: RecordStore, pack: bool, **options: Any) -> RecordBatches:
    """Returns batches with several records in a row, or one."""
    return (PackedRecords if pack else PaddedRecords)(store, **options)
