"""Data parallelism with whole copies of the model."""

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
    from core.selection import Run, Selected

HOOKS: dict[str, Callable[..., Any]] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
}


@technique(
    paper="PyTorch Distributed, arXiv:2006.15704; PowerSGD, arXiv:1905.13727, algorithms 1 and 2",
    maturity="stable",
)
class DDP(DDPStrategy):
    """Each rank holds the whole model; gradients are averaged in buckets while backward goes on.

    Gradients may be compressed on their way between ranks, on CPU and GPU alike. Two-byte formats round them
    (bf16 by up to 2^-9, fp16 by 2^-11 within its range); PowerSGD sends matrices of low rank, adds what it left
    out to the next step's gradients, and begins anew after a resume, which is then not bitwise.

    Args:
        compression: Of gradients on their way: "none", "bf16", "fp16" or "powersgd".
        powersgd_rank: Rank of the matrices that PowerSGD sends.
        powersgd_start: Optimizer steps before PowerSGD begins, at least 2; a tenth of the run is usual.
        bucket_mb: Megabytes of gradients that travel together.
        static_graph: Whether each step uses the same parameters in the same way, which saves a search.
        find_unused_parameters: Whether some parameters may take no part in a step.
        timeout_minutes: How long a rank waits for the others before it gives up.

    Raises:
        ConfigError: If a number is out of its range.

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
            ddp_comm_hook=HOOKS.get(compression),
            timeout=timedelta(minutes=timeout_minutes),
            bucket_cap_mb=bucket_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=True,  # gradients lie in the buckets: one copy less of each
        )

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what lets a run go on behind gradients that are not finite, which PowerSGD does not forget."""
        if own.arguments.get("compression") != "powersgd":
            return
        others = [item.name for item in run.selected if item.name in ("SkipStep", "SpikeRollback")]
        if scales_losses(run):
            others.append("fp16")
        for name in others:
            yield (
                f"compression=powersgd adds what it left out of gradients to the next ones, for ever if they were not "
                f"finite, and {name} goes on behind those: set --trainer.strategy.compression=bf16 or none."
            )

    def _register_ddp_hooks(self) -> None:
        # Lightning's own does so on CUDA only, and says nothing elsewhere.
        assert isinstance(self.model, DistributedDataParallel)
        if self._ddp_comm_hook is None:
            return
        if self.compression == "powersgd":
            self._ddp_comm_state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=self.powersgd_rank, start_powerSGD_iter=self.powersgd_start
            )
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keeps gradients of a micro-batch on this rank, but for the first: there a static graph is recorded."""
        recording, self._recording = self._recording, False
        with nullcontext() if recording else super().block_backward_sync():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Sums or averages a tensor over ranks, in place; Lightning's own waits at a barrier first."""
        if not isinstance(tensor, Tensor) or reduce_op not in ("sum", dist.ReduceOp.SUM):
            return super().reduce(tensor, group, reduce_op)
        dist.all_reduce(tensor, group=group)
        return tensor
