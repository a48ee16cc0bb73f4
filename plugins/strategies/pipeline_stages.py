"""A network cut into stages: which rank has which blocks, and what is left of the network there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from core.contracts import Network

SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""They compute gradients of inputs and of weights apart, which FSDP's hooks do not know."""


def is_beyond_gloo(schedule: str) -> bool:
    """Returns whether stages of one rank say hello to each other as a pipeline begins: torch 2.11 sends that out."""
    from torch.distributed.pipelining import PipelineStage  # not at the top: a second, and few runs need it

    greets = hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
    return schedule in V_SHAPED and greets and not hasattr(PipelineStage, "_warmup_forward_vote")


@dataclass(frozen=True)
class Layout:
    """Which stage lies on which rank of a pipeline.

    Attributes:
        schedule: Its name decides on the shape: once, round and round, or there and back.
        ranks: Of the pipeline.
        blocks: Of the network.
    """

    schedule: str
    ranks: int
    blocks: int

    @property
    def stages(self) -> int:
        """Their number: one for each rank, or two."""
        return self.ranks if self.schedule in SINGLE else 2 * self.ranks

    def rank_of(self, stage: int) -> int:
        """Returns the rank that a stage lies on."""
        if self.schedule in V_SHAPED:
            return min(stage, self.stages - 1 - stage)
        return stage % self.ranks

    def span_of(self, stage: int) -> range:
        """Returns the blocks of a stage; the first stages have one more where they do not divide."""
        each, more = divmod(self.blocks, self.stages)
        start = stage * each + min(stage, more)
        return range(start, start + each + (stage < more))

    def misfits(self, microbatches: int, rows: int | None) -> Iterator[str]:
        """Yields why these blocks, micro-batches or rows of a batch cannot be run so."""
        if self.stages > self.blocks:
            yield f"pipeline is {self.ranks}, which makes {self.stages} stages of {self.schedule} for {self.blocks} blocks"
        rounds = max(1, microbatches // self.ranks)
        if self.schedule in ("1F1B", "DualPipeV") and microbatches < self.stages:
            yield f"microbatches is {microbatches}; {self.schedule} takes at least one for each of {self.stages} stages"
        elif self.schedule in LOOPED and microbatches % rounds:
            yield f"microbatches is {microbatches}; {self.schedule} takes a multiple of {rounds}, its rounds"
        if rows and rows % microbatches:
            yield f"microbatches is {microbatches}, which does not divide data.batch_size {rows}"


class Stage(nn.Module):
    """Some blocks of a network, with what stands before the first and behind the last one.

    Args:
        network: Runs the blocks; not a child of this module, which has those modules only that it needs.
        span: The blocks.
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
        """Maps what the stage before returned, if there is one, to what the next one takes."""
        return self._network[0].forward_blocks(batch, hidden[0] if hidden else None, self.span)


class Head:
    """The network as an objective sees it once the stages have run: its `forward` is done.

    Args:
        network: Gives everything else.
        hidden: What the last stage returned.
    """

    def __init__(self, network: Network, hidden: Tensor) -> None:
        self._network, self._hidden = network, hidden

    def __call__(self, batch: Mapping[str, Tensor], cache: Any = None) -> Tensor:
        """Returns what the last stage returned."""
        return self._hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def cut(network: Network, layout: Layout, rank: int) -> dict[int, Stage]:
    """Takes the modules of other ranks' stages out of a network; returns this rank's stages by index.

    Names of what is left do not change.
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
    """Returns the parameters that the first and the last stage both use."""
    first, last = network.ends or ((), ())
    before = {id(parameter) for module in first for parameter in module.parameters()}
    return [p for module in last for p in module.parameters() if id(p) in before]
