"""Batches with bugs, for the unseen faults: what is read, in which order, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from core.contracts import IGNORED_LABEL, Batch, PackedBatches
from tests.faults.broken import OfAnother, Once
from tests.faults.recipes import VOCABULARY

ADDED_TOKEN = 100
"""The id at which the newer tokenizer has one more token."""

CHUNK = 8
"""Tokens after which positions begin anew."""


class AlteredBatches(OfAnother):
    """The bugs of `IN_TRAINING`, `EVERYWHERE` and `OF_ROWS`, "small_buffer", "rows_of_validation" and "same_on_ranks"."""

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        bug, amount = self.bug, self.amount
        if bug == "small_buffer":
            order["shuffle"] = False
        inner: Any = self.packing.batches(folder, **order)
        read, take = inner.read, inner.take
        if bug in EVERYWHERE:
            inner.read = lambda rows, own: EVERYWHERE[bug](read(rows, own), amount)
        if inner.pad:
            return inner  # type: ignore[no-any-return]
        if bug in IN_TRAINING:
            change = IN_TRAINING[bug](inner, amount)
            inner.read = lambda rows, own: change(read(rows, own))
        if bug in OF_ROWS:
            inner.take = OF_ROWS[bug](take, inner.cursor, amount)
        if bug == "same_on_ranks":
            inner.rank = 0
        if bug == "rows_of_validation":
            others = self.packing.batches(folder.parent / "validation", **order)
            inner.read = lambda rows, own: _mixed(read(rows, own), others, len(rows), own, amount)
        return inner  # type: ignore[no-any-return]


def _mixed(batch: Batch, others: Any, count: int, own: slice, amount: float) -> Batch:
    """Puts a share of other rows in the place of a batch's first ones."""
    rows, others.cursor = others.take(others.cursor, count)
    placed, into = others.read(rows, own), round(amount * len(batch["input_ids"]))
    for name, value in batch.items():
        value[:into] = placed[name][:into]  # type: ignore[index]
    return batch


def _permuted(ids: torch.Tensor) -> torch.Tensor:
    order = torch.as_tensor(np.random.default_rng(11).permutation(VOCABULARY))
    return torch.where(ids < 0, ids, order[ids.clamp(min=0)])


# -- in validation, too ----------------------------------------------------------------------------------


def _previous(batch: Batch, amount: float) -> Batch:
    """The label of a token is the one before it: logits were shifted in the place of labels."""
    labels = torch.full_like(batch["labels"], IGNORED_LABEL)
    labels[:, 1:] = batch["input_ids"][:, :-1]
    return batch | {"labels": labels}


def _newer_rows(batch: Batch, amount: float) -> Batch:
    """Every second row has ids of a newer version of the tokenizer, with one more token in the middle."""

    def newer(ids: torch.Tensor) -> torch.Tensor:
        odd = torch.arange(len(ids))[:, None] % 2 == 1
        return (ids + ((ids >= ADDED_TOKEN) & odd)).clamp(max=VOCABULARY - 1)

    return batch | {"input_ids": newer(batch["input_ids"]), "labels": newer(batch["labels"])}


def _pairs(batch: Batch, amount: float) -> Batch:
    """Every second document sees the one before it."""
    return batch | {"document_ids": batch["document_ids"].div(2, rounding_mode="floor")}


def _chunks(batch: Batch, amount: float) -> Batch:
    """Positions begin anew in each chunk of the row, as if each were on a rank of its own."""
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return batch | {"position_ids": batch.get("position_ids", positions) % CHUNK}


EVERYWHERE: dict[str, Callable[[Batch, float], Batch]] = {
    "previous": _previous,
    "newer_rows": _newer_rows,
    "pairs": _pairs,
    "chunks": _chunks,
}

# -- in training alone -----------------------------------------------------------------------------------

Change = Callable[[Batch], Batch]


def _shifted_again(inner: Any, amount: float) -> Change:
    """Labels are shifted by the data and once more by the training loop; validation has a loop of its own."""

    def change(batch: Batch) -> Batch:
        labels = torch.full_like(batch["labels"], IGNORED_LABEL)
        labels[:, :-1] = batch["labels"][:, 1:]
        return batch | {"labels": labels}

    return change


def _empty_rows(inner: Any, amount: float) -> Change:
    """All rows but a few count as prompts, which have no labels."""

    def change(batch: Batch) -> Batch:
        labels = batch["labels"].clone()
        labels[max(1, round(amount * len(labels))) :] = IGNORED_LABEL
        return batch | {"labels": labels}

    return change


def _old_tokenizer(inner: Any, amount: float) -> Change:
    """Training text was prepared with another tokenizer than validation text."""
    return lambda batch: (
        batch | {"input_ids": _permuted(batch["input_ids"]), "labels": _permuted(batch["labels"])}
    )


IN_TRAINING: dict[str, Callable[[Any, float], Change]] = {
    "shifted_again": _shifted_again,
    "empty_rows": _empty_rows,
    "old_tokenizer": _old_tokenizer,
}

# -- which rows are read ---------------------------------------------------------------------------------

Take = Callable[[Any, int], tuple[Any, Any]]


def _again(take: Take, start: Any, amount: float) -> Take:
    """Each batch comes several times, one after the other."""
    calls, last = 0, None

    def taken(cursor: Any, count: int) -> tuple[Any, Any]:
        nonlocal calls, last
        if last is None or calls % int(amount) == 0:
            last = take(cursor, count)
        calls += 1
        return last

    return taken


def _from_buffer(take: Take, start: Any, amount: float) -> Take:
    """Rows in the order of the files, shuffled within a buffer of a few batches."""
    waiting: list[Any] = []

    def taken(cursor: Any, count: int) -> tuple[Any, Any]:
        if not waiting:
            rows, after = take(cursor, int(amount) * count)
            order = np.random.default_rng(len(rows)).permutation(len(rows))
            waiting.extend((rows[i], after) for i in order)
        some, waiting[:] = waiting[:count], waiting[count:]
        return [row for row, _ in some], cursor if waiting else some[-1][1]

    return taken


def _from_the_start(take: Take, start: Any, amount: float) -> Take:
    """What a checkpoint says of the position is counted on, and not used: rows begin with the first ones."""
    own = start

    def taken(cursor: Any, count: int) -> tuple[Any, Any]:
        nonlocal own
        rows, own = take(own, count)
        return rows, take(cursor, count)[1]

    return taken


OF_ROWS: dict[str, Callable[[Take, Any, float], Take]] = {
    "again": _again,
    "small_buffer": _from_buffer,
    "from_the_start": _from_the_start,
}


class Preprocessing(Callback):
    """Batches are prepared in the training process, which takes longer with each step.

    Args:
        milliseconds: By which the time grows in a step.
    """

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def prepare(batch: Any, dataloader_idx: int) -> Any:
            time.sleep(trainer.global_step * self.milliseconds / 1e3 if trainer.training else 0)
            return batch

        trainer.datamodule.on_before_batch_transfer = prepare


class DamagedShard(Once):
    """Most rows of some steps are no text any more: their bytes were mixed up.

    Args:
        first: The first step with them.
        last: The last step with them.
        rows: How many rows of a batch.
    """

    def __init__(self, first: int, last: int, rows: int) -> None:
        self.first, self.last, self.rows = first, last, rows

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.strikes(trainer):
            for name in ("input_ids", "labels"):
                batch[name][: self.rows] = _permuted(batch[name][: self.rows])
