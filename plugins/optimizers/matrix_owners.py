"""Whole matrices of an optimizer that are sharded over ranks: each rank computes its share of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from core.training.shards import local_tensors

Tensors = Mapping[int, Tensor]
"""Number in the round -> this rank's part of the tensor."""

Forms = Mapping[int, Sequence[Sequence[int]]]
"""Number in the round -> the shapes of the parts that the ranks of an axis have of the tensor."""


class _Axis(NamedTuple):
    """A dimension of the mesh.

    Attributes:
        group: Its ranks.
        ranks: How many.
        own: This rank among them.
        stride: How far the numbers of two owners are apart that are neighbours in it.
        dim: The dimension of a tensor that they shard; None: each has a copy.
    """

    group: Any
    ranks: int
    own: int
    stride: int
    dim: int | None

    def exchanged(self, given: Tensor, sent: list[int], got: list[int]) -> Tensor:
        """Returns what each rank has for this one, given what this one has for each; `sent`, `got`: numbers to and from each."""
        received = given.new_empty(sum(got))
        dist.all_to_all_single(received, given, got, sent, self.group)
        return received


class Owners:
    """How tensors that are sharded alike over a mesh reach ranks that have one whole, and come back as shards.

    The n-th tensor of a round is owned by the n-th rank, whatever the placements. Shards go to owners and back along one dimension of the mesh after the
    other. Among copies nothing is sent to an owner: it has the shards of its own.

    Args:
        mesh: Of the tensors.
        placements: Of each of them.

    Attributes:
        ranks: Of the mesh: so many tensors are in a round.
        own: The number of the tensor that this rank owns.
    """

    def __init__(self, mesh: Any, placements: Sequence[Any]) -> None:
        copies, inner, outer = list[_Axis](), list[_Axis](), list[_Axis]()
        self.ranks = 1
        for number, place in enumerate(placements):
            size, own = mesh.size(number), mesh.get_local_rank(number)
            if size == 1:
                continue
            dim = None if place.is_replicate() else place.dim  # of a partial sum there is none
            axis = _Axis(mesh.get_group(number), size, own, self.ranks, dim)
            self.ranks *= size
            # FSDP shards what tensor parallelism has sharded before: torch calls that strided.
            (copies if dim is None else inner if hasattr(place, "split_factor") else outer).append(axis)
        self._axes = [*copies, *inner, *reversed(outer)]
        self.own = sum(axis.own * axis.stride for axis in self._axes)

    def to_owners(self, shards: Tensors, shapes: Mapping[int, Sequence[int]]) -> Tensor | None:
        """Returns the tensor that this rank owns, whole; None: it owns none. Called on every rank.

        Args:
            shards: Number in the round -> this rank's shard of it, of one data type.
            shapes: Number -> shape of the whole.
        """
        now = dict(shards)
        for level, axis in enumerate(self._axes):
            if axis.dim is None:
                now = {n: shard for n, shard in now.items() if self._owner(n, level) == axis.own}
            elif now:
                now = self._gathered(level, now, {n: self._forms(shapes[n], level) for n in now})
        return now.get(self.own)

    def from_owners(
        self,
        result: Tensor | None,
        shapes: Mapping[int, Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[int, Tensor]:
        """Returns number -> this rank's shard of what its owner has; called on every rank.

        Args:
            result: Of this rank, whole; None: it owns none.
            shapes: Number -> shape of the whole, of all in the round.
            dtype: Of the results.
            device: Of the results.
        """
        now = {} if result is None else {self.own: result}
        for level in reversed(range(len(self._axes))):
            there = [n for n in shapes if all(self._owner(n, k) == self._axes[k].own for k in range(level))]
            if there:
                forms = {n: self._forms(shapes[n], level) for n in there}
                spread = self._copied if self._axes[level].dim is None else self._spread
                now = spread(level, now, forms, torch.empty(0, dtype=dtype, device=device))
        return now

    def _owner(self, number: int, level: int) -> int:
        """Returns which rank of an axis is on the way to the owner."""
        axis = self._axes[level]
        return number // axis.stride % axis.ranks

    def _forms(self, shape: Sequence[int], level: int) -> list[list[int]]:
        """Returns the shapes of what each rank of an axis has of a tensor before it is gathered along it."""
        found = list(shape)
        for axis in reversed(self._axes[level + 1 :]):
            if axis.dim is not None:
                found[axis.dim] = _lengths(found[axis.dim], axis.ranks)[axis.own]
        ranks, dim = self._axes[level].ranks, self._axes[level].dim
        if dim is None:
            return [found] * ranks
        return [[*found[:dim], length, *found[dim + 1 :]] for length in _lengths(found[dim], ranks)]

    def _parts(self, level: int, numbers: Sequence[int]) -> list[list[int]]:
        """Returns for each rank of an axis the tensors whose owner it leads to."""
        return [[n for n in numbers if self._owner(n, level) == r] for r in range(self._axes[level].ranks)]

    def _gathered(self, level: int, now: Tensors, forms: Forms) -> dict[int, Tensor]:
        axis = self._axes[level]
        parts = self._parts(level, list(now))
        mine, ranks = parts[axis.own], range(axis.ranks)
        given = torch.cat([now[n].flatten() for part in parts for n in part])
        sent = [sum(now[n].numel() for n in part) for part in parts]
        got = [sum(math.prod(forms[n][rank]) for n in mine) for rank in ranks]
        received = axis.exchanged(given, sent, got)
        pieces = [
            _cut(flat, [forms[n][rank] for n in mine])
            for rank, flat in zip(ranks, received.split(got), strict=True)
        ]
        assert axis.dim is not None
        return {n: torch.cat([piece[k] for piece in pieces], axis.dim) for k, n in enumerate(mine)}

    def _spread(self, level: int, now: Tensors, forms: Forms, like: Tensor) -> dict[int, Tensor]:
        axis = self._axes[level]
        parts, dim = self._parts(level, list(forms)), axis.dim
        assert dim is not None
        cut = [now[n].split([form[dim] for form in forms[n]], dim) for n in parts[axis.own]]
        given = torch.cat([like, *(piece[rank].flatten() for rank in range(axis.ranks) for piece in cut)])
        sent = [sum(piece[rank].numel() for piece in cut) for rank in range(axis.ranks)]
        got = [sum(math.prod(forms[n][axis.own]) for n in part) for part in parts]
        received = axis.exchanged(given, sent, got)
        order = [n for part in parts for n in part]
        return dict(zip(order, _cut(received, [forms[n][axis.own] for n in order]), strict=True))

    def _copied(self, level: int, now: Tensors, forms: Forms, like: Tensor) -> dict[int, Tensor]:
        axis, found = self._axes[level], dict[int, Tensor]()
        for rank, part in enumerate(self._parts(level, list(forms))):
            if not part:
                continue
            if rank == axis.own:
                flat = torch.cat([now[n].flatten() for n in part])
            else:
                flat = like.new_empty(sum(math.prod(forms[n][rank]) for n in part))
            dist.broadcast(flat, dist.get_global_rank(axis.group, rank), axis.group)
            found |= zip(part, _cut(flat, [forms[n][rank] for n in part]), strict=True)
        return found


def rounds(matrices: Sequence[Any]) -> Iterator[tuple[Owners, list[int]]]:
    """Yields indexes of matrices of one kind, as many as there are ranks, those of about one size together.

    Args:
        matrices: DTensors, in the same order on every rank.
    """
    alike: dict[Any, list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault((matrix.device_mesh, matrix.placements, matrix.dtype), []).append(index)
    for (mesh, placements, _), indexes in alike.items():
        owners = Owners(mesh, placements)
        indexes.sort(key=lambda index: -matrices[index].numel())
        for first in range(0, len(indexes), owners.ranks):
            yield owners, indexes[first : first + owners.ranks]


def compute_whole(
    matrices: Sequence[Any], compute: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Returns this rank's shards of what a function makes of each whole matrix; called on every rank.

    Of as many matrices as the mesh has ranks, each rank gets one whole, computes it, and sends its shards back: together they
    compute every matrix once, also where it is sharded in two ways, or where there are copies.

    Args:
        matrices: DTensors, in the same order on every rank.
        compute: Returns a matrix of the same shape.
        dtype: Of what `compute` returns.
    """
    found: list[Any] = [None] * len(matrices)
    for owners, some in rounds(matrices):
        shards = dict(enumerate(local_tensors([matrices[index] for index in some])))
        shapes = {number: matrices[index].shape for number, index in enumerate(some)}
        whole = owners.to_owners(shards, shapes)
        result = None if whole is None else compute(whole).to(dtype)
        for number, shard in owners.from_owners(result, shapes, dtype, shards[0].device).items():
            found[some[number]] = shard
    return found


def _cut(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def _lengths(size: int, ranks: int) -> list[int]:
    """Returns how many rows, or columns, each rank has: those of `torch.chunk`."""
    most = -(-size // ranks)
    return [min(most, max(size - rank * most, 0)) for rank in range(ranks)]
