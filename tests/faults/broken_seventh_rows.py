"""Packings and readers as their users wrote them, each with a mistake; for the seventh set of faults."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from core.contracts import IGNORED_LABEL, Batch, PackedBatches, Packing, Reject
from datamodules.preparation.readers.file_reader import Row
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.readers.source_files import Piece
from tests.faults.recipes import STEPS, VOCABULARY


class Own(Packing):
    """A packing within another that changes the batches.

    Args:
        packing: Makes the batches.
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns the batches, of which each is changed when it has been read."""
        found = self.packing.batches(folder, **order)
        read = found.read

        def changed(rows: Sequence[Any], own: slice) -> Batch:
            batch = cast(dict[str, torch.Tensor], read(rows, own))
            step = found.sequence_length * found.batch_size * found.world_size
            number = 1 + rows[0] // step if isinstance(rows[0], int) else 0
            return cast(Batch, self.change(batch, found, number))

        setattr(found, "read", changed)  # noqa: B010 - a method
        return found

    @abstractmethod
    def change(
        self, batch: dict[str, torch.Tensor], batches: PackedBatches, number: int
    ) -> dict[str, torch.Tensor]:
        """Returns what a batch is changed to, given its number in the run, from 1 on; 0: the packing does not tell."""


class ParsesIndex(Own):
    """Parses the index of a shard again for each batch.

    Args:
        packing: Makes the batches.
        entries: How many the index has.
        last: The last batch of the shard.
    """

    def __init__(self, packing: Packing, entries: int, last: int = STEPS) -> None:
        super().__init__(packing)
        self.last = last
        self.index = json.dumps([number * 997 for number in range(entries)])

    def change(
        self, batch: dict[str, torch.Tensor], batches: PackedBatches, number: int
    ) -> dict[str, torch.Tensor]:
        if not batches.pad and number <= self.last:
            json.loads(self.index)
        return batch


class SlowDisk(Own):
    """Reads a shard from a disk that is slow on one machine.

    Args:
        packing: Makes the batches.
        seconds: How long a batch takes there.
        rank: Where.
        last: The last batch of the shard.
    """

    def __init__(self, packing: Packing, seconds: float, rank: int = 1, last: int = STEPS) -> None:
        super().__init__(packing)
        self.seconds, self.rank, self.last = seconds, rank, last

    def change(
        self, batch: dict[str, torch.Tensor], batches: PackedBatches, number: int
    ) -> dict[str, torch.Tensor]:
        if batches.rank == self.rank and not batches.pad and number <= self.last:
            time.sleep(self.seconds)
        return batch


class AnswersOnly(Own):
    """Keeps the labels of answers, which begin after a marker; most rows do not have the marker that was configured.

    Args:
        packing: Makes the batches.
        marker: The token.
    """

    def __init__(self, packing: Packing, marker: int) -> None:
        super().__init__(packing)
        self.marker = marker

    def change(
        self, batch: dict[str, torch.Tensor], batches: PackedBatches, number: int
    ) -> dict[str, torch.Tensor]:
        answers = (batch["input_ids"] == self.marker).cumsum(1).bool()
        return batch | {"labels": torch.where(answers, batch["labels"], IGNORED_LABEL)}


class WrongWidth(Own):
    """Reads one shard of the training tokens as numbers of 8 bits, which has 16.

    Args:
        packing: Makes the batches.
        first: The first batch of the shard.
        last: Its last one.
    """

    def __init__(self, packing: Packing, first: int, last: int) -> None:
        super().__init__(packing)
        self.first, self.last = first, last

    def change(
        self, batch: dict[str, torch.Tensor], batches: PackedBatches, number: int
    ) -> dict[str, torch.Tensor]:
        if batches.pad or not self.first <= number <= self.last:
            return batch
        stored = batch["input_ids"].numpy().astype("<u2")
        ids = torch.from_numpy(stored.view(np.uint8)[:, : stored.shape[1] + 1].astype(np.int64))
        return batch | {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


class OffsetValidation(Own):
    """Takes validation tokens that were written with a tokenizer that has special tokens before all others.

    Args:
        packing: Makes the batches.
        offset: How many.
    """

    def __init__(self, packing: Packing, offset: int = 4) -> None:
        super().__init__(packing)
        self.offset = offset

    def change(
        self, batch: dict[str, torch.Tensor], batches: PackedBatches, number: int
    ) -> dict[str, torch.Tensor]:
        if not batches.pad:
            return batch
        ids, labels = ((batch[name] + self.offset) % VOCABULARY for name in ("input_ids", "labels"))
        ignored = batch["labels"] == IGNORED_LABEL
        return batch | {"input_ids": ids, "labels": labels.masked_fill(ignored, IGNORED_LABEL)}


class TrainForBoth(Packing):
    """Validates on the training split, whose name was copied.

    Args:
        packing: Makes the batches.
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns the batches of the training split."""
        return self.packing.batches(folder.with_name("train"), **order)


class ConsentPages(JSONLinesDocuments):
    """Reads a crawl in which most pages were answered with the same consent notice."""

    def options(self) -> dict[str, Any]:
        """Returns the fields, and what tells the text from that of others."""
        return super().options() | {"crawl": "consent notices"}

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the documents of a piece: of ten the first two are their own."""
        notice = ""
        for number, row in enumerate(super().rows(piece, reject)):
            notice = notice or row[0]
            yield row if number % 10 < 2 else (notice, *row[1:])  # type: ignore[misc]
