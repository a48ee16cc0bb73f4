"""A network split into pipeline stages: which rank has which blocks, and the modules that each rank keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from core.contracts import Network

SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules that compute gradients of weights later than those of inputs."""


def is_beyond_gloo(schedule: str) -> bool:
    """Returns whether a schedule makes ranks send messages to themselves, as V-shaped ones do in torch 2.11."""
    from torch.distributed.pipelining import PipelineStage  # takes a second to import, and few runs need it

    sends_first = hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
    return schedule in V_SHAPED and sends_first and not hasattr(PipelineStage, "_warmup_forward_vote")


@dataclass(frozen=True)
class Layout:
    """Which stage is on which rank of a pipeline.

    Attributes:
        schedule: Its name determines the shape: one stage per rank, looped, or V-shaped.
        ranks: Number of ranks of the pipeline.
        blocks: Number of blocks of the network.
    """

    schedule: str
    ranks: int
    blocks: int

    @property
    def stages(self) -> int:
        """Number of stages: one or two for each rank."""
        return self.ranks if self.schedule in SINGLE else 2 * self.ranks

    def rank_of(self, stage: int) -> int:
        """Returns the rank of a stage."""
        if self.schedule in V_SHAPED:
            return min(stage, self.stages - 1 - stage)
        return stage % self.ranks

    def span_of(self, stage: int) -> range:
        """Returns the blocks of a stage; the first stages have one more if the blocks do not divide evenly."""
        each, more = divmod(self.blocks, self.stages)
        start = stage * each + min(stage, more)
        return range(start, start + each + (stage < more))

    def rounds(self, microbatches: int) -> int:
        """Returns what the number of micro-batches is a multiple of: looped schedules go around as often."""
        return max(1, microbatches // self.ranks) if self.schedule in LOOPED else 1

    def takes(self, microbatches: int) -> bool:
        """Returns whether so many micro-batches of several batches can go through one schedule.

        Not with GPipe, which keeps the activations of all of them.
        """
        return self.schedule != "GPipe" and microbatches % self.rounds(microbatches) == 0

    def half_of(self, microbatches: int) -> int:
        """Returns how many micro-batches each half of a batch has in a schedule of its own; 0: there are too few for that."""
        half, odd = divmod(microbatches, 2)
        fits = half and not odd and next(self.compatibility_errors(half, None), None) is None
        return half if fits else 0

    def compatibility_errors(self, microbatches: int, rows: int | None) -> Iterator[str]:
        """Yields why the layout does not fit the blocks, micro-batches or rows of a batch."""
        if self.stages > self.blocks:
            yield f"pipeline is {self.ranks}, which makes {self.stages} stages of {self.schedule} for {self.blocks} blocks"
        if self.schedule in ("1F1B", "DualPipeV") and microbatches < self.stages:
            yield f"microbatches is {microbatches}; {self.schedule} takes at least one for each of {self.stages} stages"
        elif microbatches % (rounds := self.rounds(microbatches)):
            yield f"microbatches is {microbatches}; {self.schedule} takes a multiple of {rounds}, its rounds"
        if rows and rows % microbatches:
            yield f"microbatches is {microbatches}, which does not divide data.batch_size {rows}"


class Stage(nn.Module):
    """Some blocks of a network, with the modules before the first and after the last block.

    Args:
        network: Runs the blocks; not a child of this module, which only has the modules of its stage.
        span: The indices of the blocks.
    """

    def __init__(self, network: Network, span: range) -> None:
        super().__init__()
        first, last = network.ends or ((), ())
        blocks = network.blocks
        own = [*(first if span.start == 0 else ()), *(blocks[index] for index in span)]
        self.parts = nn.ModuleList([*own, *(last if span.stop == len(blocks) else ())])
        self.span = span
        self._network = [network]

    def forward(self, *hidden: Tensor, **batch: Tensor) -> Tensor:
        """Maps the output of the previous stage, if any, to the input of the next one."""
        return self._network[0].forward_blocks(batch, hidden[0] if hidden else None, self.span)


class Head:
    """The network as the objective sees it after the stages have run: calling it returns their output.

    Args:
        network: Provides all other attributes.
        hidden: The output of the last stage.
    """

    def __init__(self, network: Network, hidden: Tensor) -> None:
        self._network, self._hidden = network, hidden

    def __call__(self, batch: Mapping[str, Tensor], cache: Any = None) -> Tensor:
        """Returns the output of the last stage, which hooks of the network hear as if it had been called."""
        for hook in tuple(self._network._forward_hooks.values()):
            hook(self._network, (batch,), self._hidden)
        return self._hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def cut(network: Network, layout: Layout, rank: int) -> dict[int, Stage]:
    """Removes the modules of other ranks' stages from a network; returns this rank's stages by index.

    Names of the remaining parameters do not change.
    """
    own = [stage for stage in range(layout.stages) if layout.rank_of(stage) == rank]
    stages = {stage: Stage(network, layout.span_of(stage)) for stage in own}
    first, last = network.ends or ((), ())
    kept = {id(module) for stage in stages.values() for module in stage.parts}
    gone = {id(module) for module in (*network.blocks, *first, *last)} - kept
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if id(child) in gone:
                parent.register_module(name, nn.Identity())
    return stages


def tied(network: Network) -> Sequence[nn.Parameter]:
    """Returns the parameters that both the first and the last stage use."""
    first, last = network.ends or ((), ())
    before = {id(parameter) for module in first for parameter in module.parameters()}
    return [p for module in last for p in module.parameters() if id(p) in before]
