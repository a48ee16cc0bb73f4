"""Rows of a run compared with those that leyden's own packing reads from the same stored tokens at the same position."""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, PackedBatches
from toolkit.diagnosis.data_probes import spans_of
from toolkit.diagnosis.plain import PlainParts

MOST_TOKENS = 2**21
"""Stored tokens in which rows are looked for that are not the expected ones."""

NEAR = 4
"""Rows of one stretch of text are at most so many of their lengths apart."""


class RowComparison:
    """Follows the position of a run, and reads again what it should have read.

    Args:
        plain: Builds leyden's packing.
    """

    def __init__(self, plain: PlainParts) -> None:
        self.plain = plain
        self.batches: Any = None
        self.order: dict[str, Any] = {}
        self._ahead = 0
        self._known: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._seen: set[int] = set()

    def start(self, cursor: Any = None) -> None:
        """Begins at a position, or where the run's loader does."""
        data = self.plain.trainer.datamodule
        loader = data.training_loader
        if loader.begin is not None:  # the same few batches again and again
            return
        self._order = {"sequence_length": loader.batches.sequence_length, "seed": data.seed}
        place = self.plain.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        self.order = {"batch_size": data.batch_size, "shuffle": data.shuffle, **self._order}
        self.order |= {"rank": place["rank"], "world_size": place["num_replicas"]}
        self.batches = self.plain.batches("train", **self.order)
        if self.batches is not None and cursor is not None:
            self.batches.cursor = cursor
        self._ahead = 0

    def count(self) -> None:
        """Counts a batch that the run has read; a run whose batches get another shape is no longer followed."""
        self._ahead += 1
        if self.batches is not None:
            loaded = self.plain.trainer.datamodule.training_loader.batches
            if any(getattr(loaded, name) != self.order[name] for name in ("batch_size", "sequence_length")):
                self.batches = None

    def position(self) -> Any:
        """Returns where the next batch begins."""
        if self.batches is None:
            return None
        while self._ahead:
            self._take()
        return self.batches.cursor

    def _take(self) -> Sequence[Any]:
        rows, self.batches.cursor = self.batches.take(
            self.batches.cursor, self.batches.batch_size * self.batches.world_size
        )
        self._ahead -= 1
        found: Sequence[Any] = rows
        return found

    def figures(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """Returns how the batch that was counted last differs from the one that should have come."""
        if self.batches is None or not self._ahead:
            return {}
        while self._ahead > 1:
            self._take()
        rows = self._take()
        first = self.batches.rank * self.batches.batch_size
        expected = self.batches.read(rows, slice(first, first + self.batches.batch_size))
        batch = {name: value.cpu() for name, value in batch.items() if isinstance(value, Tensor)}
        found = compare(batch, expected)
        if found.get("doctor/rows_other", 0.0) > 0:
            found |= self._origin(batch["input_ids"], expected["input_ids"])
        return found

    def read_ms(self) -> float:
        """Returns how many milliseconds leyden's packing takes to read a batch, the median of a few; NaN: it is not known."""
        batches = self.plain.batches("train", **self.order)
        return read_ms(batches) if batches is not None else float("nan")

    def in_validation(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """Returns how the first batch of a validation differs from what should come, under other names."""
        if self.batches is None:
            return {}
        ids = batch.get("input_ids")
        size, rank, ranks = self.batches.batch_size, self.batches.rank, self.batches.world_size
        expected = self._read("validation", 1, size, rank, ranks)
        if ids is None or not expected:
            return {}
        own = {name: value.cpu() for name, value in batch.items() if isinstance(value, Tensor)}
        return self._named("validation", own, expected[0])

    def _named(self, prefix: str, batch: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
        found = compare(batch, expected)
        if found.get("doctor/rows_other", 0.0) > 0:
            found |= self._origin(batch["input_ids"], expected["input_ids"])
        return {name.replace("doctor/", f"doctor/{prefix}_"): value for name, value in found.items()}

    def of_validation(self, batches: Sequence[Mapping[str, Any]], size: int) -> dict[str, float]:
        """Returns the same of the first validation batches, under other names."""
        expected = self._read("validation", len(batches), size)
        each = [compare(a, b) for a, b in zip(batches, expected, strict=False)]
        if not each:
            return {}
        found = {name: max(one.get(name, 0.0) for one in each) for name in each[0]}
        if found.get("doctor/rows_other", 0.0) > 0:
            worst = max(range(len(each)), key=lambda index: each[index].get("doctor/rows_other", 0.0))
            found |= self._origin(batches[worst]["input_ids"], expected[worst]["input_ids"])
        return {name.replace("doctor/", "doctor/validation_"): value for name, value in found.items()}

    def _read(self, split: str, count: int, size: int, rank: int = 0, ranks: int = 1) -> list[Any]:
        order = {"pad": True} if split == "validation" else {"shuffle": False}
        found = self.plain.batches(
            split, batch_size=size, rank=rank, world_size=ranks, **self._order, **order
        )
        return [] if found is None else [batch for _, batch in islice(found, min(count, len(found)))]

    def _origin(self, ids: Tensor, expected: Tensor) -> dict[str, float]:
        """Says where rows come from that are not the expected ones.

        The share of their spans that are in training and in validation text; of rows, the share that are near another of the batch,
        and that came before in it or in earlier ones that were compared. Of tokens, the share that are the expected ones; of those
        that are not, the share with the id that most have, and over all with the ids that they should have.
        """
        other = ids[(ids != expected).any(1)] if ids.shape == expected.shape else ids
        spans, of = spans_of([{"input_ids": other}])
        found = dict[str, float]()
        for split in ("train", "validation"):
            if split not in self._known:
                length = self._order["sequence_length"]
                batches = self._read(split, max(1, MOST_TOKENS // (8 * length)), 8)
                numbers, rows = spans_of(batches)
                order = np.argsort(numbers, kind="stable")
                self._known[split] = numbers[order], rows[order]
            numbers, rows = self._known[split]
            at = np.minimum(np.searchsorted(numbers, spans), max(len(numbers) - 1, 0))
            hits = numbers[at] == spans if len(numbers) else np.zeros(len(spans), bool)
            name = "training" if split == "train" else split
            found[f"doctor/rows_in_{name}"] = float(hits.mean()) if len(hits) else 0.0
            if split == "train" and len(hits):
                places = [
                    int(rows[at[(of == row) & hits][0]])
                    for row in np.unique(of)
                    if ((of == row) & hits).any()
                ]
                near = [any(0 < abs(one - two) <= NEAR for two in places) for one in places]
                found["doctor/rows_near"] = sum(near) / max(len(near), 1)
        numbers_of_rows = [zlib.crc32(row.numpy().tobytes()) for row in other]
        again = len(numbers_of_rows) - len(set(numbers_of_rows) - self._seen)
        self._seen |= set(numbers_of_rows)
        if ids.shape == expected.shape:
            differ = ids != expected
            found["doctor/rows_kept"] = 1 - float(differ[differ.any(1)].float().mean())
            found["doctor/rows_one_id"] = float(ids[differ].bincount().max() / differ.sum())
            always = torch.isin(expected, expected[differ]).sum()
            found["doctor/rows_always"] = float(differ.sum() / always)
        found["doctor/rows_came_before"] = again / max(len(numbers_of_rows), 1)
        return found


def read_ms(batches: PackedBatches) -> float:
    """Returns how many milliseconds reading a batch takes, the median of `TIMED`."""
    found, began = list[float](), time.perf_counter()
    for _ in islice(batches, TIMED):
        found.append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
    return statistics.median(found)


TIMED = 9
"""Batches that are read for their time."""


def compare(batch: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the share of rows with other tokens; of the other rows, how labels, documents and positions differ."""
    ids, own = batch.get("input_ids"), expected["input_ids"]
    if ids is None or ids.shape != own.shape or "labels" not in batch:
        return {}
    same = (ids == own).all(1)
    found = {"doctor/rows_other": 1 - float(same.float().mean())}
    if not same.any():
        return found
    labels, wanted = batch["labels"][same], expected["labels"][same]
    has, wants = labels != IGNORED_LABEL, wanted != IGNORED_LABEL
    total = max(int(wants.sum()), 1)
    found["doctor/rows_labels_missing"] = int((wants & ~has).sum()) / total
    found["doctor/rows_labels_other"] = int((wants & has & (labels != wanted)).sum()) / total
    found["doctor/rows_labels_more"] = int((has & ~wants).sum()) / total
    joined, theirs = (_joined(one, same, ids) for one in (batch, expected))
    found["doctor/rows_joined"] = int((joined & ~theirs).sum()) / max(int((~theirs).sum()), 1)
    found["doctor/rows_parted"] = int((~joined & theirs).sum()) / max(int(theirs.sum()), 1)
    places, right = (_positions(one, same, ids) for one in (batch, expected))
    real = (own[same] >= 0) if "document_ids" not in expected else expected["document_ids"][same] >= 0
    found["doctor/rows_positions"] = int(((places != right) & real).sum()) / max(int(real.sum()), 1)
    more = [name for name in batch if name not in expected and name not in ("document_ids", "position_ids")]
    found["doctor/rows_more"] = float(sum(bool(batch[name].any()) for name in more))
    return found


def _joined(batch: Mapping[str, Tensor], rows: Tensor, ids: Tensor) -> Tensor:
    """Returns which tokens are of the same document as the one before, (rows, T - 1)."""
    documents = batch.get("document_ids")
    if documents is None:
        return torch.ones(int(rows.sum()), ids.shape[1] - 1, dtype=torch.bool)
    documents = documents[rows]
    return documents[:, 1:] == documents[:, :-1]


def _positions(batch: Mapping[str, Tensor], rows: Tensor, ids: Tensor) -> Tensor:
    given = batch.get("position_ids")
    return torch.arange(ids.shape[1]).expand(int(rows.sum()), -1) if given is None else given[rows]
