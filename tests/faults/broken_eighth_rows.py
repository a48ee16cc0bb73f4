"""Data with the mistakes of the eighth set: packings around those of the recipes, and a reader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Batch, DocumentSource, PackedBatches, Packing
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from tests.faults.catalogue import ONSET
from tests.faults.recipes import STEPS, VOCABULARY


class Rows(Packing):
    """A packing with a mistake.

    Args:
        packing: The packing that has it.
        bug: Its name.
        amount: How much of it.
    """

    def __init__(self, packing: Packing, bug: str, amount: float = 1.0) -> None:
        self.packing, self.bug, self.amount = packing, bug, amount

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns one rank's batches."""
        kind = KINDS.get(self.bug, Changed)
        if kind is Buffered:
            order["shuffle"] = False
        return kind(self.packing.batches(folder, **order), self.bug, self.amount)


class Changed(PackedBatches):
    """Batches that are changed when they are read. A cursor is that of the batches within, with the batch's number."""

    def __init__(self, inner: PackedBatches, bug: str, amount: float) -> None:
        self.inner, self.bug, self.amount = inner, bug, amount
        self.sequence_length, self.batch_size = inner.sequence_length, inner.batch_size
        self.rank, self.world_size, self.pad = inner.rank, inner.world_size, inner.pad
        self.cursor: Any = {"inner": inner.cursor, "number": 0}

    def __len__(self) -> int:
        return len(self.inner)

    def take(self, cursor: Any, count: int) -> tuple[Sequence[Any], Any]:
        """Returns rows, each with the number of its batch."""
        number = cursor["number"]
        rows, after = self.inner.take(cursor["inner"], count)
        return [(number, row) for row in rows], {"inner": after, "number": number + 1}

    def read(self, rows: Sequence[Any], own: slice) -> Batch:
        """Returns a changed batch."""
        batch = self.inner.read([row for _, row in rows], own)
        if self.bug in CHANGES:
            CHANGES[self.bug](batch, rows[0][0], self)
        return batch

    def order(self) -> dict[str, Any]:
        """Returns what a cursor depends on."""
        return self.inner.order()

    def epochs(self, cursor: Any) -> dict[str, float]:
        """Returns the number of epochs up to a cursor."""
        return self.inner.epochs(cursor["inner"])

    @property
    def trains(self) -> bool:
        """Whether these are training batches."""
        return not self.pad


class Unsharded(Changed):
    """Each of `amount` workers reads all batches, as if it were alone."""

    def take(self, cursor: Any, count: int) -> tuple[Sequence[Any], Any]:
        """Returns the rows of the worker whose turn it is."""
        rows, after = super().take(cursor, count)
        last = self.pad or cursor["number"] % int(self.amount) == self.amount - 1
        return rows, after if last else {"inner": cursor["inner"], "number": after["number"]}


class Buffered(Changed):
    """Rows that are shuffled within a buffer of `amount` batches, over data in the order of its files."""

    def take(self, cursor: Any, count: int) -> tuple[Sequence[Any], Any]:
        """Returns the next rows of the buffer."""
        if self.pad:
            return super().take(cursor, count)
        number, size = cursor["number"], int(self.amount)
        rows, after = self.inner.take(cursor["inner"], count * size)
        turn = number % size
        random = np.random.default_rng((int(self.order()["seed"]), number // size))
        chosen = random.permutation(len(rows))[turn * count : (turn + 1) * count]
        begin = after if turn == size - 1 else cursor["inner"]
        return [(number, rows[place]) for place in chosen], {"inner": begin, "number": number + 1}


class SlowPython(Changed):
    """Each batch of the run is worked on in Python, for `amount` milliseconds."""

    def __iter__(self) -> Iterator[tuple[Any, Batch]]:
        """Works, and yields."""
        for cursor, batch in super().__iter__():
            until = time.perf_counter() + self.amount / 1000
            while cursor["number"] <= STEPS and time.perf_counter() < until:
                sum(range(64))
            yield cursor, batch


class SlowDisk(Changed):
    """Rank 1 waits for its disk, for `amount` milliseconds a batch."""

    def __iter__(self) -> Iterator[tuple[Any, Batch]]:
        """Waits, and yields."""
        for cursor, batch in super().__iter__():
            if self.rank == 1 and cursor["number"] <= STEPS:
                time.sleep(self.amount / 1000)
            yield cursor, batch


def _backwards(batch: Any, number: int, batches: Changed) -> None:
    """Shifts labels the wrong way: each is the token before."""
    ids, labels = batch["input_ids"], batch["labels"]
    kept = labels != IGNORED_LABEL
    kept[:, 0] = False
    batch["labels"] = torch.where(kept, ids.roll(1, dims=1), IGNORED_LABEL)


def _long_prompts(batch: Any, number: int, batches: Changed) -> None:
    """Takes all but the last tokens of a row for the prompt."""
    batch["labels"][:, : -int(batches.amount)] = IGNORED_LABEL


def _older_tokenizer(batch: Any, number: int, batches: Changed) -> None:
    """Later shards have the ids of an older tokenizer, which had the same tokens in another order."""
    if not batches.trains or number + 1 < ONSET:
        return
    ids = torch.from_numpy(np.random.default_rng(0).permutation(VOCABULARY))
    labels = batch["labels"]
    batch["labels"] = torch.where(labels == IGNORED_LABEL, labels, ids[labels.clamp(min=0)])
    batch["input_ids"] = ids[batch["input_ids"]]


def _binary_file(batch: Any, number: int, batches: Changed) -> None:
    """Three batches are of a file that is no text."""
    if not batches.trains or not ONSET <= number + 1 < ONSET + 3:
        return
    rows, length = batch["input_ids"].shape
    random = np.random.default_rng((int(batches.order()["seed"]), number, batches.rank))
    found = torch.from_numpy(random.integers(256, size=(rows, length + 1)))
    labels: Tensor = batch["labels"]
    batch["labels"] = torch.where(labels == IGNORED_LABEL, labels, found[:, 1:])
    batch["input_ids"] = found[:, :-1]


def _empty_answer(batch: Any, number: int, batches: Changed) -> None:
    """One row, of an answer without text, has no label."""
    if batches.trains and number + 1 == ONSET:
        batch["labels"][0] = IGNORED_LABEL


CHANGES: dict[str, Callable[[Any, int, Changed], None]] = {
    "backwards": _backwards,
    "long_prompts": _long_prompts,
    "older_tokenizer": _older_tokenizer,
    "binary_file": _binary_file,
    "empty_answer": _empty_answer,
}
"""What changes a batch in place, given its number in the run, from 0."""

KINDS: dict[str, type[Changed]] = {
    "unsharded": Unsharded,
    "buffered": Buffered,
    "slow_python": SlowPython,
    "slow_disk": SlowDisk,
}


class Crawled(DocumentSource):
    """JSON Lines of a crawl that came to each page several times.

    Args:
        source: The file.
        copies: How often each document is in it.
    """

    def __init__(self, source: str, copies: int) -> None:
        self.pages, self.copies = JSONLinesDocuments(source), copies

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns what identifies the text."""
        return {**self.pages.fingerprint(), "copies": self.copies}

    def documents(self) -> Iterator[str]:
        """Yields the pages, each with the number of the visit: no two are equal, and the split knows no copies."""
        for visit in range(self.copies):
            yield from (f"Visit {visit}. {text}" for text in self.pages.documents())
