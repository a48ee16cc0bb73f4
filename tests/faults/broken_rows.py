"""Batches with bugs, for the second unseen faults: which rows are read, what is in them, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.contracts import IGNORED_LABEL, Batch, PackedBatches
from tests.faults.broken import OfAnother, Once
from tests.faults.recipes import INTERRUPTED, VOCABULARY
from toolkit.prefixes import PREFIX

DISTINCT = 3
"""Batches of the small cache."""


class AlteredRows(OfAnother):
    """The bugs of `EVERYWHERE` and `OF_ROWS`, "other_in_validation", "one_rank_slow" and "whole_batches"."""

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        bug, amount = self.bug, self.amount
        if bug == "whole_batches":
            order["shuffle"] = False
        inner: Any = self.packing.batches(folder, **order)
        read = inner.read
        if bug in EVERYWHERE:
            inner.read = lambda rows, own: EVERYWHERE[bug](read(rows, own), amount)
        if bug == "other_in_validation" and inner.pad:
            inner.read = lambda rows, own: _permuted(read(rows, own))
        if bug == "one_rank_slow" and inner.rank and not inner.pad:
            inner.read = lambda rows, own: time.sleep(amount / 1e3) or read(rows, own)
        if bug in OF_ROWS and not inner.pad:
            inner.take = OF_ROWS[bug](inner, inner.take, amount)
        return inner  # type: ignore[no-any-return]


# -- what is in a row ------------------------------------------------------------------------------------


def _permuted(batch: Batch) -> Batch:
    """Ids of another tokenizer."""
    order = torch.as_tensor(np.random.default_rng(23).permutation(VOCABULARY))

    def other(ids: torch.Tensor) -> torch.Tensor:
        return torch.where(ids < 0, ids, order[ids.clamp(min=0)])

    return batch | {"input_ids": other(batch["input_ids"]), "labels": other(batch["labels"])}


def _half_shifted(batch: Batch, amount: float) -> Batch:
    """Every second row is of a source whose labels had been shifted before, and are once more."""
    labels = batch["labels"].clone()
    labels[1::2, :-1] = batch["labels"][1::2, 1:]
    labels[1::2, -1] = IGNORED_LABEL
    return batch | {"labels": labels}


def _prompts_alone(batch: Batch, amount: float) -> Batch:
    """The mask of prompts is the wrong way round: only the first tokens of each document have labels."""
    return batch | {
        "labels": batch["labels"].masked_fill(batch["position_ids"] >= int(amount), IGNORED_LABEL)
    }


def _late_boundaries(batch: Batch, amount: float) -> Batch:
    """Documents begin some tokens too late for the mask: their first tokens are of the document before."""
    ids, late = batch["document_ids"], int(amount)
    return batch | {"document_ids": torch.cat((ids[:, :1].expand(-1, late), ids[:, :-late]), dim=1)}


def _coarse_positions(batch: Batch, amount: float) -> Batch:
    """Positions are divided for longer rows, as whole numbers: neighbours have the same."""
    ids = batch["input_ids"]
    positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
    return batch | {"position_ids": positions.div(int(amount), rounding_mode="floor")}


def _labelled_prefix(batch: Batch, amount: float) -> Batch:
    """A prefix is seen in both directions, and its tokens have labels, too."""
    ids = batch["input_ids"]
    prefix = torch.arange(ids.shape[1]).expand_as(ids) < round(amount * ids.shape[1])
    return batch | {PREFIX: prefix}  # type: ignore[return-value, misc]


EVERYWHERE: dict[str, Callable[[Batch, float], Batch]] = {
    "half_shifted": _half_shifted,
    "prompts_alone": _prompts_alone,
    "late_boundaries": _late_boundaries,
    "coarse_positions": _coarse_positions,
    "labelled_prefix": _labelled_prefix,
}
"""Of training and validation batches."""

# -- which rows are read ---------------------------------------------------------------------------------

Take = Callable[[Any, int], tuple[Any, Any]]


def _windows(inner: Any, take: Take, amount: float) -> Take:
    """Rows are windows that move by a few tokens: those of a batch are nearly the same."""

    def taken(cursor: Any, count: int) -> tuple[Any, Any]:
        rows, after = take(cursor, count)
        return range(rows[0], rows[0] + count * int(amount), int(amount)), after

    return taken


def _whole_batches(inner: Any, take: Take, amount: float) -> Take:
    """Batches are shuffled, and their rows are not: each is one stretch of one file."""
    order = np.random.default_rng(5).permutation(len(inner))

    def taken(cursor: Any, count: int) -> tuple[Any, Any]:
        tokens = count * inner.sequence_length
        number = int(order[cursor["tokens"] // tokens % len(order)])
        return take(cursor | {"tokens": number * tokens}, count)[0], take(cursor, count)[1]

    return taken


def _small_cache(inner: Any, take: Take, amount: float) -> Take:
    """A cache holds the first batches, and the run goes through these again and again."""
    kept: list[Any] = []
    calls = 0

    def taken(cursor: Any, count: int) -> tuple[Any, Any]:
        nonlocal calls
        rows, after = take(cursor, count)
        if len(kept) < DISTINCT:
            kept.append(rows)
        calls += 1
        return kept[(calls - 1) % DISTINCT], after

    return taken


def _half_the_position(inner: Any, take: Take, amount: float) -> Take:
    """A resumed run begins at half of its position, which was counted in samples of one of two ranks."""
    start, own = inner.cursor, None

    def taken(cursor: Any, count: int) -> tuple[Any, Any]:
        nonlocal own
        if own is None:
            own = start
            for _batch in range(INTERRUPTED // 2 if cursor != start else 0):
                _, own = take(own, count)
        rows, own = take(own, count)
        return rows, take(cursor, count)[1]

    return taken


def _found_slowly(inner: Any, take: Take, amount: float) -> Take:
    """To find the rows of a batch, an index is read anew from a slow file system."""

    places: set[str] = set()

    def taken(cursor: Any, count: int) -> tuple[Any, Any]:
        if str(cursor) not in places:
            places.add(str(cursor))
            time.sleep(amount / 1e3)
        return take(cursor, count)

    return taken


OF_ROWS: dict[str, Callable[[Any, Take, float], Take]] = {
    "windows": _windows,
    "whole_batches": _whole_batches,
    "small_cache": _small_cache,
    "half_the_position": _half_the_position,
    "found_slowly": _found_slowly,
}


class LabelsOfOthers(Once):
    """Rows of some steps have the labels of other rows: inputs were sorted by length, and labels were not."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.strikes(trainer):
            batch["labels"].copy_(batch["labels"].roll(1, 0))
