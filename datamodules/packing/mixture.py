"""Rows of several token stores, mixed in given shares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from core.contracts import IGNORED_LABEL, Batch, PackedBatches
from core.errors import ConfigError
from datamodules.packing.prefetching import Chunk, Prefetching
from toolkit.sources import SOURCES

Weight = float | list[tuple[int, float]]
"""A share, or points (tokens, share) with linear interpolation; constant before the first and after the last point."""

FILL = {"input_ids": 0, "labels": IGNORED_LABEL, "document_ids": -1, "position_ids": 0, SOURCES: -1}


class MixedBatches(Prefetching):
    """One rank's batches whose rows come from several sources, each in its own order.

    The source of a row is not drawn at random: the source with the largest deficit to its share gives the next row, so that
    after n rows each source has given its share of them to within one row. Each source has its own epochs.

    Args:
        parts: Name -> the batches of a source; all with the same shape, rank and world size.
        weights: Name -> its share, relative to the others'.
        mark: Whether batches have the source of each row, see `toolkit.sources`.

    Raises:
        ConfigError: If the names differ, or a share is negative or none is positive.
    """

    def __init__(
        self, parts: Mapping[str, PackedBatches], weights: Mapping[str, Weight], mark: bool = False
    ) -> None:
        self.mark = mark
        self.parts, self.weights = (
            dict(parts),
            {name: _points(name, weight) for name, weight in weights.items()},
        )
        if self.parts.keys() != self.weights.keys():
            raise ConfigError(
                f"A mixture needs a weight for each source: it has {', '.join(self.weights) or 'none'} for "
                f"{', '.join(self.parts)}."
            )
        first = next(iter(self.parts.values()))
        self.rank, self.world_size, self.pad = first.rank, first.world_size, first.pad
        self.sequence_length, self.batch_size = first.sequence_length, first.batch_size
        self.cursor = {
            "tokens": 0,
            "credit": dict.fromkeys(self.parts, 0.0),
            "parts": {name: part.cursor for name, part in self.parts.items()},
        }
        self._begin = self.cursor
        self.shares(0)

    def shares(self, tokens: int) -> dict[str, float]:
        """Returns each source's share of the rows after a number of tokens; the shares add up to 1.

        Raises:
            ConfigError: If none is positive.
        """
        now = {name: float(np.interp(tokens, *points)) for name, points in self.weights.items()}
        if not sum(now.values()) > 0:
            raise ConfigError(f"No source of the mixture has a positive weight after {tokens:,} tokens.")
        return {name: weight / sum(now.values()) for name, weight in now.items()}

    def __len__(self) -> int:
        if not self.pad:
            return sum(len(self._shaped(part)) for part in self.parts.values())
        cursor, batches = self._begin, 0
        while True:
            rows, cursor = self.take(cursor, self.batch_size * self.world_size)
            if not rows:
                return batches
            batches += 1

    def _shaped(self, part: PackedBatches) -> PackedBatches:
        part.sequence_length, part.batch_size = self.sequence_length, self.batch_size
        return part

    def order(self) -> dict[str, Any]:
        """Returns the order of each source."""
        return {name: part.order() for name, part in self.parts.items()}

    def epochs(self, cursor: Any) -> dict[str, float]:
        """Returns the number of epochs of each source up to a cursor."""
        return {
            name: next(iter(part.epochs(cursor["parts"][name]).values())) for name, part in self.parts.items()
        }

    def padding(self) -> dict[str, float]:
        """Returns an estimate of the share of padding in each source's rows."""
        return {name: share for name, part in self.parts.items() for share in part.padding().values()}

    def take(self, cursor: dict[str, Any], count: int) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
        """Returns (source, row) of the next rows; padded batches take one source after the other."""
        if self.pad:
            return self._take_in_turn(cursor, count)
        credit, tokens = dict(cursor["credit"]), cursor["tokens"]
        names = []
        for _ in range(count):
            for name, share in self.shares(tokens).items():
                credit[name] += share
            name = max(credit, key=credit.__getitem__)
            credit[name] -= 1.0
            names.append(name)
            tokens += self.sequence_length
        taken, cursors = {}, {}
        for name, part in self.parts.items():
            rows, cursors[name] = self._shaped(part).take(cursor["parts"][name], names.count(name))
            taken[name] = iter(rows)
        rows = [(name, next(taken[name])) for name in names]
        return rows, {"tokens": tokens, "credit": credit, "parts": cursors}

    def _take_in_turn(
        self, cursor: dict[str, Any], count: int
    ) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
        rows: list[tuple[str, Any]] = []
        cursors = dict(cursor["parts"])
        for name, part in self.parts.items():
            if len(rows) < count:
                found, cursors[name] = self._shaped(part).take(cursors[name], count - len(rows))
                rows += [(name, row) for row in found]
        return rows, {**cursor, "parts": cursors}

    def read(self, rows: Sequence[tuple[str, Any]], own: slice) -> Batch:
        """Returns a slice of the rows as a batch, with the width of the widest source."""
        width, pieces = 0, []
        for name, part in self.parts.items():
            mine = [row for source, row in rows if source == name]
            if not mine:
                continue
            width = max(width, part.width(mine))
            before, chosen = (
                [source for source, _ in part_of].count(name) for part_of in (rows[: own.start], rows[own])
            )
            if chosen:
                part.batch_size = chosen
                pieces.append((name, part.read(mine, slice(before, before + chosen))))
        return self._merged([name for name, _ in rows[own]], pieces, width)

    def chunks(self, rows: Sequence[tuple[str, Any]], own: slice) -> Iterator[Chunk]:
        """Yields the chunks of remote folders that a slice of rows needs."""
        for name, part in self.parts.items():
            mine = [row for source, row in rows[own] if source == name]
            if mine and isinstance(part, Prefetching):
                yield from part.chunks(mine, slice(None))

    def cache_bytes(self) -> int:
        """Returns the size of the cache in bytes; 0 if no source is remote."""
        return max(part.cache_bytes() if isinstance(part, Prefetching) else 0 for part in self.parts.values())

    def _merged(self, names: list[str], pieces: list[tuple[str, Batch]], width: int) -> Batch:
        keys = {"input_ids", "labels", *([SOURCES] if self.mark else [])}.union(
            *(set(piece) for _, piece in pieces)
        )
        shape = (self.batch_size, width)
        found = {key: torch.full(shape, FILL[key], dtype=torch.int64) for key in FILL if key in keys}
        for name, piece in pieces:
            at = torch.tensor([index for index, source in enumerate(names) if source == name])
            for key, values in cast(dict[str, torch.Tensor], piece).items():
                if key in found:
                    found[key][at, : values.shape[1]] = values
            if self.mark:
                found[SOURCES][at] = list(self.parts).index(name)
        return cast(Batch, found)


def _points(name: str, weight: Weight) -> tuple[list[float], list[float]]:
    points = weight if isinstance(weight, list) else [(0, weight)]
    tokens, shares = [float(at) for at, _ in points], [float(share) for _, share in points]
    if not points or not all(0 <= share < math.inf for share in shares) or tokens != sorted(set(tokens)):
        raise ConfigError(
            f"The weight of {name} is {weight}: give a number of at least 0, or points [tokens, weight] in the "
            "order of their tokens."
        )
    return tokens, shares
