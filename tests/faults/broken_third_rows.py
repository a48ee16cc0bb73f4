"""Batches with bugs, for the third unseen faults: which rows are read, what is in them, and how fast."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from core.contracts import IGNORED_LABEL, Batch, PackedBatches
from tests.faults.broken import OfAnother, Once
from tests.faults.recipes import VOCABULARY

POOL = 256
"""Batches whose rows are sorted together."""

SCRIPT = range(128, 192)
"""Bytes of other scripts in UTF-8."""

COMPRESSED = zlib.compress(np.arange(2**20, dtype=np.uint32).tobytes(), 1)
"""A shard of 4 MB."""


class AlteredThird(OfAnother):
    """The bugs of `EVERYWHERE` and `IN_TRAINING`, and "sorted"."""

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        bug, amount = self.bug, self.amount
        inner: Any = self.packing.batches(folder, **order)
        read, changes = inner.read, EVERYWHERE if inner.pad else EVERYWHERE | IN_TRAINING
        if bug in changes:
            inner.read = lambda rows, own: changes[bug](read(rows, own), amount)
        if bug == "sorted" and not inner.pad:
            inner.take = _sorted(inner, inner.take)
        return inner  # type: ignore[no-any-return]


Change = Callable[[Batch, float], Batch]

# -- in validation, too ----------------------------------------------------------------------------------


def _both_paddings(batch: Batch, amount: float) -> Batch:
    """Inputs are padded on the left and labels on the right: each row's labels are off by its own padding."""
    labels = torch.full_like(batch["labels"], IGNORED_LABEL)
    for row, own in enumerate(batch["labels"]):
        by = 1 + row % int(amount)
        labels[row, :-by] = own[by:]
    return batch | {"labels": labels}


def _special(batch: Batch, amount: float) -> Batch:
    """All ids below a limit count as special tokens, which have no labels."""
    labels = batch["labels"]
    return batch | {"labels": labels.masked_fill(labels < int(amount), IGNORED_LABEL)}


def _wrapped(batch: Batch, amount: float) -> Batch:
    """Ids were stored in too few bits, and wrap around."""
    labels = batch["labels"]
    wrapped = torch.where(labels < 0, labels, labels % int(amount))
    return batch | {"input_ids": batch["input_ids"] % int(amount), "labels": wrapped}


def _random_positions(batch: Batch, amount: float) -> Batch:
    """Positions are drawn at random for each row, for rows of any length, and are not sorted."""
    ids = batch["input_ids"]
    random = torch.Generator().manual_seed(int(ids.sum()))
    return batch | {"position_ids": torch.rand(ids.shape, generator=random).argsort(1)}


EVERYWHERE: dict[str, Change] = {
    "both_paddings": _both_paddings,
    "special": _special,
    "wrapped": _wrapped,
    "random_positions": _random_positions,
}

# -- in training alone -----------------------------------------------------------------------------------


def _near_copies(batch: Batch, amount: float) -> Batch:
    """Rows are copies of one page, in each of which a few tokens are others."""
    random = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    copies = torch.arange(len(batch["input_ids"])).div(int(amount), rounding_mode="floor") * int(amount)
    found: dict[str, Any] = {name: value[copies] for name, value in batch.items()}  # type: ignore[index]
    ids, labels = found["input_ids"], found["labels"]
    changed = torch.rand(ids.shape, generator=random) < 0.03
    ids[changed] = torch.randint(0, VOCABULARY, (int(changed.sum()),), generator=random)
    known = labels[:, :-1] != IGNORED_LABEL
    labels[:, :-1][known] = ids[:, 1:][known]
    return found  # type: ignore[return-value]


def _decompressed(batch: Batch, amount: float) -> Batch:
    """A whole shard is decompressed for each batch, so many times."""
    for _time in range(int(amount)):
        zlib.decompress(COMPRESSED)
    return batch


IN_TRAINING: dict[str, Change] = {"near_copies": _near_copies, "decompressed": _decompressed}


def _sorted(inner: Any, take: Any) -> Any:
    """Rows come in the order of how many different tokens they have, as a curriculum that was left on."""
    order: list[Any] = []

    def fill(cursor: Any, count: int) -> None:
        found: list[tuple[int, Any]] = []
        for _batch in range(POOL):
            rows, cursor = take(cursor, count)
            ids = inner.read(rows, slice(0, count))["input_ids"]
            found.extend((len(set(own)), row) for own, row in zip(ids.tolist(), rows, strict=True))
        order.extend(row for _, row in sorted(found, key=lambda one: one[0]))

    def taken(cursor: Any, count: int) -> tuple[Any, Any]:
        if not order:
            fill(cursor, count)
        rows, order[:] = order[:count], order[count:]
        return rows, take(cursor, count)[1]

    return taken


# -- batches as the loops see them -----------------------------------------------------------------------


class OtherScript(Once):
    """Rows of some steps are in another script, whose bytes the run has not met before.

    Args:
        first: The first step with them.
        last: The last step with them.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.strikes(trainer):
            known = batch["labels"] != IGNORED_LABEL
            for ids, chosen in ((batch["input_ids"], slice(None)), (batch["labels"], known)):
                ids[chosen] = SCRIPT.start + ids[chosen] % len(SCRIPT)


class ValidatesLastBatch(Callback):
    """The validation loop computes the loss of a variable that still holds the last training batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._last = dict(batch)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        batch.update(self._last)
