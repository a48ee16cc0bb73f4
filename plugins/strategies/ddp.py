"""Data parallelism with a full copy of the model on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from core.errors import ConfigError
from core.technique import technique
from plugins.strategies.shared_scaler import scales_losses

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

HOOKS: dict[str, Callable[..., Any]] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
}


@technique(
    paper="PyTorch Distributed, arXiv:2006.15704; PowerSGD, arXiv:1905.13727, algorithms 1 and 2",
    maturity="stable",
    strategy_words=("ddp",),
)
class DDP(DDPStrategy):
    """Distributed data parallelism: each rank holds the full model; gradients are averaged during backward.

    Gradients are averaged in buckets, and can be compressed for communication, on CPU and GPU. Two-byte formats round them (bf16 by up to 2^-9,
    fp16 by 2^-11 within its range). PowerSGD sends low-rank matrices and adds the error to the gradients of the next
    step. Its state is not saved: a resumed run is then not bitwise the same.

    Args:
        compression: Compression of gradients for communication: "none", "bf16", "fp16" or "powersgd".
        powersgd_rank: Rank of the matrices that PowerSGD sends.
        powersgd_start: Optimizer steps before PowerSGD starts, at least 2; usually a tenth of the run.
        bucket_mb: Size of a bucket of gradients in megabytes.
        static_graph: Whether every step uses the same parameters in the same way, which saves a search.
        find_unused_parameters: Whether a step may leave some parameters unused.
        timeout_minutes: Minutes that a rank waits for the others before it raises an error.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        trainer:
          strategy:
            class_path: DDP
            init_args: {bucket_mb: 50}
    """

    def __init__(
        self,
        compression: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 4,
        powersgd_start: int = 1000,
        bucket_mb: float = 25.0,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        timeout_minutes: float = 30.0,
    ) -> None:
        least = {"powersgd_rank": (powersgd_rank, 1), "powersgd_start": (powersgd_start, 2)}
        for name, (value, limit) in least.items():
            if value < limit:
                raise ConfigError(f"DDP: {name} is {value}; it must be at least {limit}.")
        for name, size in {"bucket_mb": bucket_mb, "timeout_minutes": timeout_minutes}.items():
            if not size > 0:
                raise ConfigError(f"DDP: {name} is {size}; it must be above 0.")
        self._recording = static_graph
        self.compression, self.powersgd_rank, self.powersgd_start = compression, powersgd_rank, powersgd_start
        super().__init__(
            timeout=timedelta(minutes=timeout_minutes),
            bucket_cap_mb=bucket_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=True,  # gradients are views of the buckets: one copy less
        )

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields techniques that continue after non-finite gradients, which would stay in PowerSGD's error."""
        if own.arguments.get("compression") != "powersgd":
            return
        others = [item.name for item in run.selected if item.name in ("SkipStep", "SpikeRollback")]
        if scales_losses(run):
            others.append("fp16")
        for name in others:
            yield (
                f"compression=powersgd adds the error of gradients to the next ones, so that values that are not finite "
                f"stay in it, and {name} continues after those: set --trainer.strategy.compression=bf16 or none."
            )

    def configure_ddp(self) -> None:
        """Wraps the model and registers the compression, which Lightning does on CUDA only."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        state, hook = None, HOOKS.get(self.compression)
        if self.compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=self.powersgd_rank, start_powerSGD_iter=self.powersgd_start
            )
        if hook is not None:
            self.model.register_comm_hook(state, hook)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skips the synchronisation of gradients, except in the first backward, which records a static graph."""
        recording, self._recording = self._recording, False
        with nullcontext() if recording else super().block_backward_sync():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Sums or averages a tensor over ranks, in place; a sum without the barrier of Lightning's own."""
        if not isinstance(tensor, Tensor) or reduce_op not in ("sum", dist.ReduceOp.SUM):
            return super().reduce(tensor, group, reduce_op)
        dist.all_reduce(tensor, group=group)
        return tensor
