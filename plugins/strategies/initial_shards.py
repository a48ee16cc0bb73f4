"""Initial weights under a mesh of ranks: each rank draws its shards, or rank 0 builds the network and sends every weight."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from core.contracts import ChangesNetwork, Network
from core.errors import ConfigError
from core.technique import declaration_of
from plugins.checkpoints.initial_weights import InitialWeights
from plugins.strategies import tensors
from toolkit.initial_values import (
    STRIP,
    Added,
    CopyOf,
    Fill,
    NormsOf,
    SpreadOf,
    Start,
    ZeroRows,
    added_start,
    clear_rows,
    cleared_rows,
    draw_part,
    initial_values,
    named,
    normal,
    spread,
)
from toolkit.initial_weights import SeesWeights

PREFIX = "network."
"""What names of the network's tensors begin with in the module that is trained."""

NOISE = 2**20 - 3
"""Numbers that repeat in the matrices of a network that is only tried; odd, so that no two rows are the same."""

KEEPS_WEIGHTS = "keeps_weights"
"""Feature of what changes a network without a look at its weights, and says how what it adds begins."""


class Stored(NamedTuple):
    """A tensor that begins as it is in the files of `model.weights`.

    Attributes:
        read: Returns it, whole, on the CPU.
        otherwise: How it would begin without them.
    """

    read: Callable[[], Tensor]
    otherwise: Any  # a Start, or what is derived of one


class Derived(NamedTuple):
    """Values that follow from a matrix of the network.

    Attributes:
        start: How the matrix begins.
        name: That its numbers depend on.
        matrix: On the meta device: its shape and data type.
    """

    start: Any  # a Start, or Stored
    name: str
    matrix: Tensor

    def rows(self, seed: int, first: int, count: int) -> Tensor:
        """Draws rows of the matrix, and no others."""
        found = self.matrix.new_empty((count, self.matrix.shape[1]), device="cpu")
        draw_part(found, self.start, seed, self.name, self.matrix.shape, (first, 0))
        return found


class RowNorms(Derived):
    """Norms of the rows of a matrix that is drawn."""

    def fill(self, target: Tensor, seed: int, first: int) -> None:
        """Fills with the norms of the rows from `first` on."""
        target.copy_(_norms(self.rows(seed, first, len(target))))


class Spread(Derived):
    """Normal numbers that spread as those in a matrix."""

    def normal(self, seed: int) -> Fill:
        """Returns their distribution, of a matrix that is drawn."""
        count = len(self.matrix)
        return normal(
            spread(self.rows(seed, first, min(STRIP, count - first)) for first in range(0, count, STRIP))
        )

    def normal_of_stored(self, device: torch.device) -> Fill:
        """Returns their distribution, of a matrix that rank 0 reads; called on every rank."""
        found = torch.zeros((), dtype=torch.float32, device=device)
        if dist.get_rank() == 0:
            found.fill_(spread(self.start.read().split(STRIP)))
        dist.broadcast(found, 0)
        return normal(float(found))


def _norms(matrix: Tensor) -> Tensor:
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32)).norm(dim=1)


Begins = Start | Stored | Added
"""How a tensor of the module begins that is trained."""


def starts_of(trainer: Trainer, strategy: str) -> dict[str, Begins]:
    """Returns name in the module -> how it begins, of all tensors of the network, which is built for that on the meta device.

    Where it is empty, rank 0 has to build the network with its weights; a message says why.

    Args:
        trainer: Of the run; called on every rank.
        strategy: Its name, for the message.
    """
    module: Any = trainer.lightning_module
    if getattr(module, "network", None) is not None:
        return {}
    reason = _explain_whole(trainer, module)
    if reason is None:
        with torch.device("meta"):
            draft = module.build_network()
        found: Mapping[str, Any] | None = initial_values(draft)
        if found is not None:
            if module.weights:  # of a resumed run those that its checkpoint lacks are read
                readers = InitialWeights(module.weights).readers(draft, trainer)
                found = {
                    n: Stored(readers[n], start) if n in readers else start for n, start in found.items()
                }
            return {PREFIX + name: start for name, start in found.items()}
        reason = f"{type(draft).__name__} does not say how each parameter begins"
    if trainer.is_global_zero:
        text = f"{strategy}: rank 0 initialises the whole network in its memory: {reason}."
        print(text, file=sys.stderr, flush=True)
    return {}


def _explain_whole(trainer: Trainer, module: Any) -> str | None:
    precision: Any = trainer.precision_plugin
    for part in (*module.objective.modules(), precision, *trainer.callbacks):  # type: ignore[attr-defined]
        declared = declaration_of(type(part))
        if isinstance(part, ChangesNetwork) and KEEPS_WEIGHTS not in (declared.offers if declared else ()):
            return f"{type(part).__name__} looks at its weights, or does not say how what it adds begins"
    constructs = not isinstance(precision.module_init_context(), nullcontext)
    if constructs and not isinstance(precision, HalfPrecision | DoublePrecision):
        return f"{type(precision).__name__} takes part in its construction"
    return None


def added_starts(module: nn.Module, starts: Mapping[str, Any]) -> dict[str, Begins]:
    """Returns name in the module -> how it begins, of what was added to the network, or to the objective for it, or changed.

    Args:
        module: On the meta device, its parameters not sharded yet.
        starts: The same of the network itself.
    """
    names, found = {id(tensor): name for name, tensor in named(module)}, dict[str, Any]()
    for name, tensor in named(module):
        noted = added_start(tensor)
        if isinstance(noted, Added):
            found[name] = noted
        elif noted is not None and (source := names.get(id(noted.source), "")) in starts:
            found[name] = _derived(
                noted, _cleared(starts[source], noted.cleared), source.removeprefix(PREFIX)
            )
        if (rows := cleared_rows(tensor)) and name in starts:
            found[name] = ZeroRows(starts[name], rows)
    return found


def _derived(noted: CopyOf | NormsOf | SpreadOf, start: Any, key: str) -> Added:
    """Returns how a tensor begins that follows from another one, which begins so and whose numbers depend on the key."""
    if isinstance(noted, CopyOf):
        return Added(start, key)
    matrix = noted.source.detach()
    found: Any
    if isinstance(noted, SpreadOf):
        found, key = Spread(start, key, matrix), noted.name
    elif isinstance(start, Stored):
        found = Stored(lambda: _norms(start.read()), RowNorms(start.otherwise, key, matrix))
    else:
        found = RowNorms(start, key, matrix)
    return Added(found, key)


def _cleared(start: Any, rows: Sequence[int]) -> Any:
    """Returns how a tensor begins that has zeros in some rows from then on."""
    if not rows or not isinstance(start, Stored):
        return ZeroRows(start, rows) if rows else start

    def read() -> Tensor:
        clear_rows(value := start.read(), rows, 0)
        return value

    return Stored(read, ZeroRows(start.otherwise, rows))


def as_drawn(start: Any) -> Any:
    """Returns how a tensor begins where nothing is stored."""
    if isinstance(start, Stored):
        return start.otherwise
    return start._replace(start=as_drawn(start.start)) if isinstance(start, ZeroRows | Spread) else start


def opened(name: str, start: Any) -> tuple[Any, str]:
    """Returns how a tensor begins, and the name that its numbers depend on."""
    return start if isinstance(start, Added) else (start, name.removeprefix(PREFIX))


def draw_shard(target: Tensor, start: Start | RowNorms | Spread, seed: int, name: str) -> None:
    """Draws this rank's shard of a tensor.

    Args:
        target: Full or sharded.
        start: How the full tensor begins.
        seed: Of the network, the same on every rank.
        name: In the network.
    """
    own, offset = tensors.local_shard(target), _offset(target)
    if isinstance(start, RowNorms):
        start.fill(own, seed, offset[0])
    else:
        if isinstance(start, Spread):  # where nothing is kept, the matrix is not drawn
            start = start.normal(seed) if own.numel() else 0.0
        draw_part(own, start, seed, name, target.shape, offset)


def _offset(target: Tensor) -> Sequence[int]:
    """Returns where this rank's shard begins in each dimension of the full tensor."""
    if not isinstance(target, DTensor):
        return (0,) * target.ndim
    return compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)[1]


@torch.no_grad()
def stand_in(network: Network, starts: Mapping[str, Begins]) -> Network:
    """Returns a copy of a network on the meta device to try it with, on the CPU: its matrices share the memory of the largest.

    Vectors and buffers have the values that they begin with.
    """
    copied = copy.deepcopy(network)
    some = 0.02 * torch.randn(NOISE, generator=torch.Generator().manual_seed(0), device="cpu")
    largest = max(parameter.numel() for parameter in copied.parameters())
    noise = some.repeat(-(-largest // NOISE))
    names = {id(tensor): PREFIX + name for name, tensor in named(copied)}

    def value(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) and tensor.ndim > 1:
            return noise[: tensor.numel()].view(tensor.shape).to(tensor.dtype)
        start, _ = opened("", starts[names[id(tensor)]])
        if isinstance(start, Stored):
            return start.read()
        found = torch.empty_like(tensor, device="cpu")
        draw_shard(found, start, 0, "")
        return found

    tensors.replace(copied, value)
    return copied


class InitialShards:
    """Fills the tensors of a module after it was sharded.

    Args:
        full: All tensors of the full module, in the same order on each rank: on the meta device where they are drawn; others
            on rank 0 with their values.
        starts: Name -> how it begins.
        seed: Of the network, the same on every rank.
        stored: Names whose values are read from a checkpoint afterwards: nothing is done for them.
        device: Of messages.
        seeing: Who is shown the network's tensors, whole, on rank 0.

    Raises:
        ConfigError: If it is not known how a tensor begins.
    """

    def __init__(
        self,
        full: Mapping[str, Tensor],
        starts: Mapping[str, Begins],
        seed: int,
        stored: Collection[str],
        device: torch.device,
        seeing: Sequence[SeesWeights] = (),
    ) -> None:
        self.full, self.seed, self.stored, self.device, self.seeing = full, seed, stored, device, seeing
        empty = {name for name, tensor in full.items() if tensor.is_meta}
        if starts and (lost := sorted(empty - starts.keys())):
            raise ConfigError(
                f"It is not known how {lost[0]} begins: what adds it to the network must not declare "
                f'offers=("{KEEPS_WEIGHTS}",).'
            )
        self.starts = {name: start for name, start in starts.items() if name in empty}

    @torch.no_grad()
    def fill(self, name: str, target: Tensor | None) -> None:
        """Fills this rank's part of a tensor, or none; called on every rank with each name of `full`, in its order."""
        noted = self.starts.get(name)
        start, key = opened(name, noted)
        start, rows = start if isinstance(start, ZeroRows) else (start, ())
        if dist.get_rank() == 0 and self.seeing and noted is not None and not isinstance(noted, Added):
            self._show(key, start, self.full[name])
        if start is None or name not in self.stored:
            self._give(name, target, start, key)
            if target is not None and rows:
                clear_rows(tensors.local_shard(target), rows, _offset(target)[0])

    def _give(self, name: str, target: Tensor | None, start: Any, key: str) -> None:
        """Fills with what each rank draws, or rank 0 has or reads."""
        if isinstance(start, Spread) and isinstance(start.start, Stored):
            start = start.normal_of_stored(self.device)
        if start is not None and not isinstance(start, Stored):
            if target is not None:
                draw_shard(target, start, self.seed, key)
            return
        full = self.full[name]
        if dist.get_rank() == 0:
            message = (full if start is None else start.read()).to(self.device)
        else:
            message = torch.empty_like(full, device=self.device)
        dist.broadcast(message, 0)
        if target is not None:
            tensors.copy_part(target, message)

    def _show(self, key: str, start: Start | Stored, full: Tensor) -> None:
        """Shows a tensor of the network to those who see its weights."""
        if isinstance(start, Stored):
            whole = start.read()
        else:
            whole = torch.empty_like(full, device="cpu")
            draw_part(whole, start, self.seed, key)
        for part in self.seeing:
            part.see_weight(key, whole)
