"""Log-probabilities of answers under the network that a run starts from: who keeps them, and where a batch has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["RECORDS", "REFERENCE", "KeepsReferences"]

RECORDS = "records"
"""Key of a batch: the number of each row's record in its split, (B, T) int64, the same at all positions; -1: none."""

REFERENCE = "reference"
"""Key of a batch: the log-probability of each row's labels under the reference, (B, T) float32, the same at all positions."""


@runtime_checkable
class KeepsReferences(Protocol):
    """A data module that keeps a number for each row of each record, saves it with its position, and deals it out in batches.

    Attributes:
        references: Split -> log-probabilities in nats, (records, rows of a record) float32; empty: not known. NaN: of a record
            that no batch has. Once the mapping is filled, batches have `REFERENCE`.
    """

    references: dict[str, Tensor]

    def every_record(self) -> Iterable[tuple[str, tuple[int, int], Iterable[Mapping[str, Tensor]]]]:
        """Yields each split with its records and rows of a record, and this rank's batches of it, each record once.

        Every rank has as many batches. The rows of a record are successive; rows that only fill a batch have no label.
        """
