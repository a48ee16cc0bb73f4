"""Data with mistakes: rows that a packing of one's own makes, and documents of one's own reader."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from core.contracts import IGNORED_LABEL, DocumentSource, PackedBatches, Packing
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from tests.faults.recipes import VOCABULARY


class Rows(Packing):
    """The rows of another packing, changed where they are read.

    Args:
        packing: The other one.
        first: The first training batch that is changed.
        last: The last one.
        amount: What the change depends on.
    """

    training, validation = True, False
    """Which of them are changed."""

    def __init__(self, packing: Packing, first: int = 1, last: int = 10**9, amount: float = 1.0) -> None:
        self.packing, self.first, self.last, self.amount = packing, first, last, amount

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        found = self.packing.batches(folder, **order)
        if self.validation if order.get("pad") else self.training:
            self.change(found)
        return found

    def change(self, batches: PackedBatches) -> None:
        """Makes `batches` read changed rows."""
        read, number = batches.read, 0

        def changed(rows: Sequence[Any], own: slice) -> Any:
            nonlocal number
            number += 1
            batch = read(rows, own)
            inside = self.first <= number <= self.last
            return self.changed(batch, batches) if inside else batch

        batches.read = changed  # type: ignore[method-assign]

    def changed(self, batch: Any, batches: PackedBatches) -> Any:
        """Returns a batch in its place."""
        return batch


class AfterMarker(Rows):
    """Keeps the labels behind a marker alone, the token `amount`, of which most rows have none."""

    def changed(self, batch: Any, batches: PackedBatches) -> Any:
        behind = (batch["input_ids"] == self.amount).cumsum(1) > 0
        return {**batch, "labels": batch["labels"].where(behind, IGNORED_LABEL)}


class OtherVocabulary(Rows):
    """Rows of data that were prepared again before a resume, with further special tokens, which move all other ids.

    Args:
        packing: The other packing.
        checkpoint: That the run is resumed from; where it is not there yet, data are as they were.
        amount: Of special tokens.
    """

    def __init__(self, packing: Packing, checkpoint: str, amount: float) -> None:
        super().__init__(packing, amount=amount)
        self.training = self.validation = Path(checkpoint).exists()

    def changed(self, batch: Any, batches: PackedBatches) -> Any:
        moved = {}
        for name in ("input_ids", "labels"):
            ids = batch[name]
            moved[name] = torch.where(ids > 0, 1 + (ids + int(self.amount) - 1) % (VOCABULARY - 1), ids)
        return {**batch, **moved}


class Binary(Rows):
    """A damaged shard: bytes that are no text."""

    def changed(self, batch: Any, batches: PackedBatches) -> Any:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(1, 257, (*batch["input_ids"].shape, 2), generator=generator)
        labels = ids[..., 1].where(batch["labels"] >= 0, IGNORED_LABEL)
        return {**batch, "input_ids": ids[..., 0], "labels": labels}


class EmptyAnswers(Rows):
    """A row of whose tokens none has a label."""

    def changed(self, batch: Any, batches: PackedBatches) -> Any:
        labels = batch["labels"].clone()
        labels[-1] = IGNORED_LABEL
        return {**batch, "labels": labels}


class SlowDisk(Rows):
    """Rows that take a while to read.

    Args:
        packing: The other packing.
        amount: Seconds for each batch.
        rank: The rank whose disk is slow; None: all.
    """

    def __init__(self, packing: Packing, amount: float, rank: int | None = None) -> None:
        super().__init__(packing, amount=amount)
        self.rank = rank

    def changed(self, batch: Any, batches: PackedBatches) -> Any:
        if self.rank in (None, batches.rank):
            time.sleep(self.amount)
        return batch


class BothSplits(Packing):
    """Takes all token files below the folder for training, and so those for validation, too."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        found = self.packing.batches(folder, **order)
        if order.get("pad"):
            return found
        other = self.packing.batches(folder.parent / "validation", **order)
        read, number = found.read, 0

        def alternating(rows: Sequence[Any], own: slice) -> Any:
            nonlocal number
            number += 1
            if number % 2:
                return read(rows, own)
            taken, other.cursor = other.take(other.cursor, other.batch_size * other.world_size)
            return other.read(taken, own)

        found.read = alternating  # type: ignore[method-assign]
        return found


class SameRows(Packing):
    """Deals the same rows to each rank: a loader of one's own that knows nothing of ranks."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        return self.packing.batches(folder, **{**order, "rank": 0, "world_size": 1})


class Documents(DocumentSource):
    """Documents of a JSON Lines file, in another order or number.

    Args:
        source: The file.
    """

    def __init__(self, source: str) -> None:
        self.inner = JSONLinesDocuments(source=source)

    def fingerprint(self) -> Mapping[str, Any]:
        return {"inner": self.inner.fingerprint(), "class": type(self).__name__}

    def documents(self) -> Iterator[str]:
        return iter(self.changed(list(self.inner.documents())))

    def changed(self, texts: list[str]) -> Iterable[str]:
        """Returns the documents in their place."""
        raise NotImplementedError


class Mirrored(Documents):
    """A crawl that came to the same few pages again and again."""

    def changed(self, texts: list[str]) -> Iterable[str]:
        for number, text in enumerate(texts):
            yield text
            for copy in range(4):
                yield texts[(number * 4 + copy) % 6 * 50]


class BySource(Documents):
    """One kind of text after the other: as it is, in capitals, and figures alone."""

    def changed(self, texts: list[str]) -> Iterable[str]:
        for begin in range(0, len(texts), 10):
            kind, part = begin // 10 % 3, texts[begin : begin + 10]
            for text in part:
                if kind == 1:
                    yield text.upper()
                elif kind == 2:
                    yield " ".join(str(ord(letter)) for letter in text[: len(text) // 3])
                else:
                    yield text
