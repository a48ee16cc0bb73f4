"""Runs a batch through the stages of a pipeline and returns a loss that can be differentiated as usual."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from core.contracts import Network, Objective, TokenSum
from core.errors import ConfigError
from core.training.shards import full_tensor
from plugins.strategies.pipeline_stages import Head, Layout, Stage
from plugins.strategies.tensors import local_shard

Sums = tuple[TokenSum, dict[str, TokenSum]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Pipeline:
    """This rank's part of a pipeline.

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
        reduce: Called with parameters and their new gradients on this rank; returns the gradients to add.

    Attributes:
        parameters: The parameters of this rank, as the optimizer has them; set before the first loss.
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
    ) -> None:
        self.network, self.objective, self.stages, self.layout = network, objective, stages, layout
        self.microbatches, self.group, self.device, self.reduce = microbatches, group, device, reduce
        self._ranks = dist.get_process_group_ranks(group)
        self._last = layout.stages - 1
        self._schedule: Any = None
        self._shape: Any = None
        self._batch: Mapping[str, Tensor] = {}
        self._found: list[Sums] = []
        self._names: dict[bool, list[str]] = {}

    def loss(self, batch: Mapping[str, Tensor]) -> Sums:
        """Returns the objective's sums for a batch, on every rank of the pipeline."""
        self._found = []
        if not torch.is_grad_enabled():
            self._evaluate(batch)
            return self._shared()
        self._batch = batch
        before = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        last = self._last in self.stages
        rows = torch.arange(len(batch["input_ids"]), device=self.device) if last else None
        self._scheduled(batch).step(target=rows, return_outputs=False, **batch)
        used = [(p, p.grad) for p in self.parameters if p.grad is not None]
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient
        reduced = self.reduce([p for p, _ in used], [gradient for _, gradient in used])
        loss, metrics = self._shared()
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        total = _Done.apply(anchor, loss.total, [p for p, _ in used], reduced)
        return TokenSum(total, loss.tokens, loss.weight), metrics

    def _loss_of_rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        sums = self._sums(hidden, {name: value[rows] for name, value in self._batch.items()})
        return sums[0].total.clone()  # schedules detach it in place, which a view does not allow

    def _sums(self, hidden: Tensor, batch: Mapping[str, Tensor]) -> Sums:
        head: Any = Head(self.network, hidden)
        loss, metrics = self.objective.loss(head, batch)
        sums = full_sum(loss), {name: full_sum(value) for name, value in metrics.items()}
        self._found.append(sums)
        return sums

    def _scheduled(self, batch: Mapping[str, Tensor]) -> Any:
        """Returns the schedule for batches of this shape: its buffers are made for one shape."""
        shape = {name: value.shape for name, value in batch.items()}
        if shape == self._shape:
            return self._schedule
        if len(batch["input_ids"]) % self.microbatches:
            raise ConfigError(
                f"HybridParallel: microbatches is {self.microbatches}, which does not divide the "
                f"{len(batch['input_ids'])} rows of a batch."
            )
        kind = get_schedule_class(self.layout.schedule)
        stages = [
            PipelineStage(stage, index, self.layout.stages, self.device, group=self.group)
            for index, stage in sorted(self.stages.items())
        ]
        options = {"loss_fn": self._loss_of_rows, "scale_grads": False}
        given = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self._schedule, self._shape = kind(given, n_microbatches=self.microbatches, **options), shape
        return self._schedule

    def whole(self) -> dict[str, Callable[..., Any]]:
        """Returns methods of a network with which each rank of the pipeline has what the full network returns, without a cache.

        All its ranks call them together, without gradients.
        """
        logits, source = self.network.logits, self._ranks[self.layout.rank_of(self._last)]

        def shared(found: Tensor | None) -> Tensor:
            own = None if found is None else full_tensor(found).contiguous()
            return _broadcast(own, source, self.group, self.device)

        return {
            "forward": lambda batch, cache=None: shared(self._run(batch)),
            "logits": lambda hidden: shared(logits(hidden) if self._last in self.stages else None),
            "new_cache": lambda *arguments: None,
            "new_padded_cache": lambda *arguments: None,
        }

    def _evaluate(self, batch: Mapping[str, Tensor]) -> None:
        hidden = self._run(batch)
        if hidden is not None:
            self._sums(hidden, batch)

    def _run(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Runs the stages one after another: torch's evaluation does not support V-shaped layouts.

        Returns:
            What the last stage returns, on its rank; None on the others.
        """
        hidden: Tensor | None = None
        here = dist.get_rank(self.group)
        for index in range(self.layout.stages):
            if index not in self.stages:
                continue
            if index and self.layout.rank_of(index - 1) != here:
                hidden = _receive(self._ranks[self.layout.rank_of(index - 1)], self.group, self.device)
            hidden = self.stages[index](*([] if hidden is None else [hidden]), **batch)
            if index == self._last:
                return hidden
            if self.layout.rank_of(index + 1) != here:
                _send(hidden, self._ranks[self.layout.rank_of(index + 1)], self.group)
        return None

    def _shared(self) -> Sums:
        """Returns the sums over all micro-batches, broadcast by the last stage."""
        source = self._ranks[self.layout.rank_of(self._last)]
        # The first step of a schedule may evaluate the loss once more before: the last entries count.
        found = self._found[-self.microbatches :] if torch.is_grad_enabled() else self._found
        training = self.objective.training  # objectives have other figures in validation
        if training not in self._names:
            told = [list(found[0][1]) if found else None]
            dist.broadcast_object_list(told, source, group=self.group)
            self._names[training] = told[0] or []
        names = self._names[training]
        flat = torch.zeros(3 + 3 * len(names), dtype=torch.float64, device=self.device)
        for loss, metrics in found:
            figures = [loss, *(metrics[name] for name in names)]
            values = [value for figure in figures for value in (*figure, figure.weight)]
            flat += torch.stack([value.detach().double() for value in values])
        dist.broadcast(flat, source, group=self.group)
        sums = [TokenSum(*flat[index : index + 3]) for index in range(0, len(flat), 3)]
        return sums[0], dict(zip(names, sums[1:], strict=True))


class _Done(torch.autograd.Function):
    """A loss with precomputed gradients; backward adds them to the parameters."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, total: Tensor, parameters: Sequence[nn.Parameter], gradients: list[Tensor]
    ) -> Tensor:
        """Returns the loss."""
        ctx.parameters, ctx.gradients = parameters, gradients
        return total.float()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """Adds the gradients times the gradient of the loss."""
        if ctx.gradients:
            parts = [local_shard(gradient) for gradient in ctx.gradients]
            torch._foreach_mul_(parts, scale.to(parts[0].device))
        for parameter, gradient in zip(ctx.parameters, ctx.gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                local_shard(parameter.grad).add_(local_shard(gradient))
        return scale, None, None, None


def full_sum(figure: TokenSum) -> TokenSum:
    """Returns a sum with DTensors replaced by full tensors."""
    values = (*figure, figure.weight)
    return TokenSum(*(value.full_tensor() if isinstance(value, DTensor) else value for value in values))


def _send(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    shape = [DTYPES.index(tensor.dtype), *tensor.shape]
    dist.send(torch.tensor(shape, device=tensor.device), rank, group=group)
    dist.send(tensor.contiguous(), rank, group=group)


def _receive(rank: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    head = torch.empty(4, dtype=torch.int64, device=device)
    dist.recv(head, rank, group=group)
    dtype, *shape = head.tolist()
    tensor = torch.empty(shape, dtype=DTYPES[dtype], device=device)
    dist.recv(tensor, rank, group=group)
    return tensor


def _broadcast(tensor: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Returns the tensor of a rank, which has up to four dimensions, on each rank of the group."""
    head = torch.zeros(6, dtype=torch.int64, device=device)
    if tensor is not None:
        head[: 2 + tensor.dim()] = torch.tensor([DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape])
    dist.broadcast(head, source, group=group)
    dtype, count, *shape = head.tolist()
    if tensor is None:
        tensor = torch.empty(shape[:count], dtype=DTYPES[dtype], device=device)
    dist.broadcast(tensor, source, group=group)
    return tensor
