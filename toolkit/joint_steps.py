"""Forward and backward under strategies whose ranks talk in them: out of memory on one rank, all drop them together."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from core.contracts import HasLossGroup
from core.errors import ConfigError
from core.training.shards import reshard
from toolkit import memory_limits
from toolkit.lone_ranks import DropsSteps, SendsActivations, WithoutOthers
from toolkit.ranks import lazy_group
from toolkit.shapes_only import ShapesOnly

__all__ = ["JointSteps"]


class JointSteps:
    """Runs forward and backward of FSDP2 or DeepSpeed so that all ranks get through them, or drop them together.

    A rank that runs out of memory has made some of their collectives; the others wait for it in the next one. It frees what
    it has, and computes forward and backward again in little memory: the first collectives, which it has made already, by
    itself, those that it owes with the others. Then all ranks tell each other whether one has failed. Under FSDP2 alone, and in
    DeepSpeed's stages 1 and 2, messages have the same shapes whatever the data, and a single row does. Under tensor parallelism
    and Ulysses they depend on the rows: all of them are computed, and no activations are kept
    (:class:`toolkit.shapes_only.ShapesOnly`). Expert parallelism, whose shapes depend on values, and what goes from one rank to
    another, as in a pipeline or a ring, cannot be made up.

    Made on every rank, once the processes are connected.

    Args:
        module: What is sharded.
        strategy: Puts what shards it into the state in which a step begins.

    Attributes:
        failed: The rank that ran out of memory in the last step, the highest of several; None: all got through.
    """

    failed: int | None = None

    def __init__(self, module: nn.Module, strategy: DropsSteps) -> None:
        self._strategy = strategy
        reshard(module)  # validation may have left weights gathered, which have no mesh
        self._weights = {
            part: (owner, name, getattr(owner, name).device_mesh)
            for part, (owner, name) in _weights_of_parts(module)
        }
        meshes = {each.device_mesh for each in module.parameters() if isinstance(each, DTensor)}
        # Not those of other threads, such as that of a checkpoint.
        groups: list[Any] = [dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())]
        if isinstance(strategy, HasLossGroup):
            groups.append(strategy.loss_group)
        sending = strategy.activation_groups() if isinstance(strategy, SendsActivations) else ()
        groups += sending
        self._keeps_rows = bool(sending)
        self._groups = list({group.group_name: group for group in groups}.values())
        self._told = lazy_group(lambda group: highest_failed(False, group))

    def run(self, step: Callable[[], Any], smaller: Callable[[], Any]) -> Any:
        """Returns what `step` returns; None on every rank, without its gradients, if one rank ran out of memory.

        Args:
            step: Forward and backward.
            smaller: The same on as little data as can be; not called where messages depend on the rows.

        Raises:
            ConfigError: If that does not fit either, or memory ran out within a collective.
        """
        gathered, begun = self._gathered(), collectives_made(self._groups)
        result, fits = None, True
        try:
            result = step()
        except Exception as error:
            if not memory_limits.is_out_of_memory(error):
                raise
            if within_collective(error):
                raise ConfigError(
                    f"Out of memory on rank {dist.get_rank()} while it exchanged messages with others: the step cannot be "
                    "repeated.\nLower --data.batch_size and raise --trainer.accumulate_grad_batches."
                ) from None
            fits = False  # the traceback of the error holds the graph: both are freed here
        if not fits:
            self._make_owed(
                step if self._keeps_rows else smaller, gathered, collectives_made(self._groups) - begun
            )
        self.failed = highest_failed(not fits, self._told)
        if self.failed is None:
            return result
        self._drop()
        return None

    def _make_owed(self, step: Callable[[], Any], gathered: list[Any], made: int) -> None:
        """Makes the collectives of the step for which the others wait."""
        try:
            self._drop()
            with WithoutOthers():
                for part in gathered:  # those of the others are, too, and are not gathered in this step
                    part.unshard()
            with WithoutOthers(made), ShapesOnly() if self._keeps_rows else nullcontext():
                step()
        except Exception as error:
            if not memory_limits.is_out_of_memory(error):
                raise
            raise ConfigError(
                f"Out of memory on rank {dist.get_rank()}, also {'without activations' if self._keeps_rows else 'with a single row'}: "
                "the other ranks cannot go on.\n"
                "Shorten --data.sequence_length, add ActivationCheckpointing, or take more ranks."
            ) from None

    def _drop(self) -> None:
        memory_limits.give_back()
        with WithoutOthers():
            self._strategy.drop_step()
        memory_limits.give_back()

    def _gathered(self) -> list[Any]:
        """Returns the parts whose weights are gathered now, such as those of the micro-batch before."""
        found = ((part, getattr(owner, name), mesh) for part, (owner, name, mesh) in self._weights.items())
        # under tensor parallelism a gathered weight is a DTensor, too, on fewer dimensions of the mesh
        return [
            part
            for part, weight, mesh in found
            if not (isinstance(weight, DTensor) and weight.device_mesh == mesh)
        ]


def collectives_made(groups: Sequence[Any]) -> int:
    """Returns how many collectives this rank has begun in these groups; each of their backends counts them."""
    return sum(group._get_sequence_number_for_group() for group in groups)


def highest_failed(failed: bool, group: Any) -> int | None:
    """Returns the highest rank of all that has failed, after log2(ranks) short messages, without waiting for the device.

    Args:
        failed: Whether this rank has.
        group: All ranks, on the CPU.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    known, heard, distance = torch.tensor([rank if failed else -1]), torch.empty(1, dtype=torch.int64), 1
    while distance < ranks:  # what a rank knows is of so many ranks before it
        sent: Any = dist.isend(known.clone(), (rank + distance) % ranks, group)
        dist.recv(heard, (rank - distance) % ranks, group)
        sent.wait()
        known.clamp_(min=heard)
        distance *= 2
    return int(known) if known >= 0 else None


def _weights_of_parts(module: nn.Module) -> Iterator[tuple[Any, tuple[nn.Module, str]]]:
    """Yields each module that is sharded by itself with the place of one of its sharded weights."""
    from torch.distributed.fsdp import FSDPModule

    def own(part: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        yield from (
            (part, name) for name, p in part.named_parameters(recurse=False) if isinstance(p, DTensor)
        )
        for child in part.children():
            if not isinstance(child, FSDPModule):
                yield from own(child)

    for part in module.modules():
        if isinstance(part, FSDPModule) and (place := next(own(part), None)):
            yield part, place


def within_collective(error: BaseException) -> bool:
    """Returns whether an error was raised within a collective, of which nobody knows what the others have got."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == dist.distributed_c10d.__name__ for frame, _ in frames)
