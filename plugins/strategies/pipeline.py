"""Runs batches through the stages of a pipeline and returns a loss that can be differentiated as usual."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from core.contracts import Network, Objective, TokenSum
from core.errors import ConfigError
from core.language_module import GRADIENT_TOKENS
from core.training.shards import full_tensor
from plugins.strategies.lean_stage import LeanStage
from plugins.strategies.pipeline_stages import Head, Layout, Stage
from plugins.strategies.stage_shards import StageShards, sum_in_float32
from plugins.strategies.staged_forward import StagedForward, broadcast
from plugins.strategies.tensors import local_shard

Batch = Mapping[str, Tensor]
Sums = tuple[TokenSum, dict[str, TokenSum]]


class Pipeline:
    """This rank's part of a pipeline.

    The batches of a step go through one schedule: all but the last are kept, and run with the last one. Otherwise the stages
    would be idle at the beginning and end of each.

    A schedule runs forward and backward in one call, but Lightning runs forward, clears gradients, and then runs
    backward. The gradients of the schedule are therefore stored. When the loss is differentiated, they are added to
    the parameters, times the gradient of the loss.

    Args:
        network: The network with only the modules of this rank's stages.
        objective: Called on the rank of the last stage.
        stages: This rank's stages by index.
        layout: The layout of all stages.
        microbatches: Number of micro-batches of a batch.
        group: The ranks of the pipeline.
        device: Device of this rank.
        reduce: Called once a step with parameters and their new gradients on this rank; returns the gradients to add.
        squares: Returns the squared norm of what `reduce` returned, of all stages, 0-d.
        shards: Gathers the weights of the stages and reduces their gradients; None: they are not sharded.

    Attributes:
        parameters: The parameters of this rank, as the optimizer has them; set before the first loss.
        scale: Multiplies a loss before backward, so that gradients in fp16 do not underflow.
    """

    parameters: Sequence[nn.Parameter]

    def __init__(
        self,
        network: Network,
        objective: Objective,
        stages: Mapping[int, Stage],
        layout: Layout,
        microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        reduce: Callable[[Sequence[nn.Parameter], list[Tensor]], list[Tensor]],
        squares: Callable[[Sequence[nn.Parameter], Sequence[Tensor]], Tensor],
        shards: StageShards | None = None,
    ) -> None:
        self.network, self.objective, self.stages, self.layout = network, objective, stages, layout
        self.microbatches, self.group, self.device, self.reduce = microbatches, group, device, reduce
        self.squares, self.shards, self.scale = squares, shards, _unscaled
        self._forward = StagedForward(stages, layout, group, device)
        self._last = layout.stages - 1
        self._source = dist.get_process_group_ranks(group)[layout.rank_of(self._last)]
        self._schedules: dict[Any, Any] = {}
        self._batch: Batch = {}
        self._factor = torch.ones((), device=device)
        self._found: list[Sums] = []
        self._names: dict[bool, list[str]] = {}
        self._kept: list[Batch] = []
        self._keeps = False
        self._measured: list[tuple[Tensor, Tensor]] | None = None

    # -- training ---------------------------------------------------------------------------------

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Context for the batches of a step before the last one: they are kept, and their loss is 0 of no tokens."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    def loss(self, batch: Batch) -> Sums:
        """Returns the objective's sums for a batch, and for those that were kept, on every rank of the pipeline."""
        if not torch.is_grad_enabled():
            return self._evaluated(batch)
        if self._keeps:
            self._kept.append(batch)
            nothing = torch.zeros((), device=self.device)
            return TokenSum(nothing.clone().requires_grad_(), nothing), {}
        batches, self._kept = [*self._kept, batch], []
        # What Lightning will multiply by, for the range of fp16; but a power of two, which rounds nothing.
        divisor = GRADIENT_TOKENS * (1 << (len(batches) - 1).bit_length())
        self._factor = self.scale(torch.tensor(1 / divisor, device=self.device))
        before = [p.grad for p in self.parameters]
        total, found = dict[nn.Parameter, Tensor](), list[Sums]()
        for part, each in self._parts(batches):
            for parameter in self.parameters:
                parameter.grad = None
            of_part = self._trained(part, each)
            used = [(p, p.grad) for p in self.parameters if p.grad is not None]
            reduced = self.reduce([p for p, _ in used], [gradient for _, gradient in used])
            if self._measured is not None:
                norm = self.squares([p for p, _ in used], reduced) / self._factor.double().square()
                self._measured.append((norm, self._shared(of_part)[0].weight))
            for (parameter, _), gradient in zip(used, reduced, strict=True):
                _add(total, parameter, gradient)
            found += of_part
        self._measured = None
        for parameter, earlier in zip(self.parameters, before, strict=True):
            parameter.grad = earlier
        loss, metrics = self._shared(found)
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        done = _Done.apply(anchor, loss.total, [*total], [*total.values()], self._factor)
        return TokenSum(done, loss.tokens, loss.weight), metrics

    def measure(self) -> list[tuple[Tensor, Tensor]]:
        """Runs each part of the coming step through a schedule of its own; returns a list for its squared norms and weights."""
        self._measured = []
        return self._measured

    def _parts(self, batches: Sequence[Batch]) -> Iterator[tuple[Sequence[Batch], int]]:
        """Yields what is run together, and into how many micro-batches each batch is split: all, if nothing is measured."""
        if self._measured is None:
            yield batches, self.microbatches
        elif len(batches) == 1 and (half := self.layout.half_of(self.microbatches)):  # the same micro-batches
            parts = {name: value.tensor_split(2) for name, value in batches[0].items()}
            yield from (([{name: part[index] for name, part in parts.items()}], half) for index in (0, 1))
        else:
            yield from (([batch], self.microbatches) for batch in batches)

    def _trained(self, batches: Sequence[Batch], each: int) -> list[Sums]:
        """Adds the gradients of batches to the parameters; returns the sums of their micro-batches, on the last stage's rank.

        Args:
            batches: They go through one schedule, if it takes them.
            each: Number of micro-batches of each.
        """
        found = list[Sums]()
        signal = None
        if self.shards is not None:
            signal = self.shards(torch.zeros((), device=self.device, requires_grad=True))
            for stage in self.stages.values():
                sum_in_float32(stage)
        for together in self._together(batches):
            joined = {name: torch.cat([batch[name] for batch in together]) for name in together[0]}
            self._batch, self._found = joined, []
            count = len(together) * each
            rows = (
                torch.arange(len(joined["input_ids"]), device=self.device)
                if self._last in self.stages
                else None
            )
            self._scheduled(joined, count).step(target=rows, return_outputs=False, **joined)
            found += self._found[-count:]  # the first step of a schedule evaluates the loss once more before
        if signal is not None:
            signal.backward()
        return found

    def _together(self, batches: Sequence[Batch]) -> Iterator[Sequence[Batch]]:
        """Yields batches that one schedule takes: of the same shape."""
        for _, group in groupby(batches, key=_shape):
            same = list(group)
            if len(same) == 1 or self.layout.takes(len(same) * self.microbatches):
                yield same
            else:
                yield from ([batch] for batch in same)

    def _loss_of_rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        total = self._sums(hidden, {name: value[rows] for name, value in self._batch.items()})
        return total * self._factor

    def _sums(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Notes the objective's sums for a micro-batch; returns the loss."""
        head: Any = Head(self.network, hidden)
        loss, metrics = self.objective.loss(head, batch)
        loss = full_sum(loss)
        self._found.append(
            (_detached(loss), {name: _detached(full_sum(value)) for name, value in metrics.items()})
        )
        return loss.total

    def _scheduled(self, batch: Batch, count: int) -> Any:
        """Returns the schedule for a batch of this shape in so many micro-batches; for a new shape stages talk about theirs."""
        shape = _shape(batch), count
        if shape not in self._schedules:
            if len(batch["input_ids"]) % count:
                raise ConfigError(
                    f"HybridParallel: microbatches is {self.microbatches}, which does not divide the "
                    f"{len(batch['input_ids']) * self.microbatches // count} rows of a batch."
                )
            kind = get_schedule_class(self.layout.schedule)
            stages = [
                LeanStage(stage, index, self.layout.stages, self.device, group=self.group)
                for index, stage in sorted(self.stages.items())
            ]
            options = {"loss_fn": self._loss_of_rows, "scale_grads": False}
            given = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
            self._schedules[shape] = kind(given, n_microbatches=count, **options)
        return self._schedules[shape]

    # -- evaluation -------------------------------------------------------------------------------

    def whole(self) -> dict[str, Callable[..., Any]]:
        """Returns methods of a network with which each rank of the pipeline has what the full network returns, without a cache.

        All its ranks call them together, without gradients.
        """
        logits = self.network.logits

        def shared(found: Tensor | None) -> Tensor:
            own = None if found is None else full_tensor(found).contiguous()
            return broadcast(own, self._source, self.group, self.device)

        def forward(batch: Batch, cache: Any = None) -> Tensor:
            outputs = self._forward(self._split(batch))
            return shared(torch.cat(outputs) if outputs else None)

        return {
            "forward": forward,
            "logits": lambda hidden: shared(logits(hidden) if self._last in self.stages else None),
            "new_cache": lambda *arguments: None,
            "new_padded_cache": lambda *arguments: None,
        }

    def _evaluated(self, batch: Batch) -> Sums:
        self._found, parts = [], self._split(batch)
        for hidden, part in zip(
            self._forward(parts), parts, strict=False
        ):  # nothing but on the last stage's rank
            self._sums(hidden, part)
        return self._shared(self._found)

    def _split(self, batch: Batch) -> list[Batch]:
        """Returns a batch in micro-batches, fewer if it has fewer rows."""
        count = min(self.microbatches, len(batch["input_ids"]))
        parts = {name: value.tensor_split(count) for name, value in batch.items()}
        return [{name: part[index] for name, part in parts.items()} for index in range(count)]

    def _shared(self, found: Sequence[Sums]) -> Sums:
        """Returns the sums over all micro-batches, broadcast by the last stage."""
        training = self.objective.training  # objectives have other figures in validation
        if training not in self._names:
            told = [list(found[0][1]) if found else None]
            dist.broadcast_object_list(told, self._source, group=self.group)
            self._names[training] = told[0] or []
        names = self._names[training]
        flat = torch.zeros(3 + 3 * len(names), dtype=torch.float64, device=self.device)
        for loss, metrics in found:
            figures = [loss, *(metrics[name] for name in names)]
            values = [value for figure in figures for value in (*figure, figure.weight)]
            flat += torch.stack([value.double() for value in values])
        dist.broadcast(flat, self._source, group=self.group)
        sums = [TokenSum(*flat[index : index + 3]) for index in range(0, len(flat), 3)]
        return sums[0], dict(zip(names, sums[1:], strict=True))


class _Done(torch.autograd.Function):
    """A loss with precomputed gradients; backward adds them to the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        total: Tensor,
        parameters: Sequence[nn.Parameter],
        gradients: list[Tensor],
        factor: Tensor,
    ) -> Tensor:
        """Returns the loss; the gradients are those of the loss times a factor."""
        ctx.parameters, ctx.gradients, ctx.factor = parameters, gradients, factor
        return total.float()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        """Adds the gradients times the gradient of the loss."""
        if ctx.gradients:
            parts = [local_shard(gradient) for gradient in ctx.gradients]
            torch._foreach_mul_(parts, (scale / ctx.factor).to(parts[0].device))
        for parameter, gradient in zip(ctx.parameters, ctx.gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                local_shard(parameter.grad).add_(local_shard(gradient))
        return scale, None, None, None, None


def _add(total: dict[nn.Parameter, Tensor], parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter in total:
        local_shard(total[parameter]).add_(local_shard(gradient))
    else:
        total[parameter] = gradient


def full_sum(figure: TokenSum) -> TokenSum:
    """Returns a sum with DTensors replaced by full tensors."""
    values = (*figure, figure.weight)
    return TokenSum(*(value.full_tensor() if isinstance(value, DTensor) else value for value in values))


def _detached(figure: TokenSum) -> TokenSum:
    return TokenSum(*(value.detach() for value in (*figure, figure.weight)))


def _shape(batch: Batch) -> Any:
    return tuple((name, value.shape) for name, value in batch.items())


def _unscaled(loss: Tensor) -> Tensor:
    return loss
