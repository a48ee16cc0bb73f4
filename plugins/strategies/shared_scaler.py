"""A loss scaler for gradients that are sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from core.training.shards import gradients
from plugins.strategies.tensors import local_shard

if TYPE_CHECKING:
    from toolkit.selection import Run


class SharedScaler(GradScaler):
    """Has the settings of another scaler, and skips a step on every rank if gradients overflow on one.

    Args:
        scaler: Its scale, growth and backoff are used.
        weights: Where the optimizer steps; scale and decision are kept there. A fused optimizer copies a decision that is
            elsewhere without waiting for the copy, and a CPU then reads it too early.
        messages: This rank's device, on which ranks exchange messages.
    """

    def __init__(self, scaler: GradScaler, weights: torch.device, messages: torch.device) -> None:
        scale = scaler.get_scale()
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        super().__init__(weights.type, scale, *factors, enabled=scaler.is_enabled())
        self._lazy_init_scale_growth_tracker(weights)  # else `scale` takes the device of the loss
        self._messages = messages

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scale; records whether a value on any rank is not finite."""
        state = self._per_optimizer_states[id(optimizer)]
        if not self.is_enabled() or state["stage"] is not OptState.READY:
            super().unscale_(optimizer)  # nothing to do, or an error that torch raises
            return
        assert self._scale is not None
        # 0-d: a fused optimizer subtracts it from its 0-d step counts.
        found = torch.zeros((), device=self._messages)
        inverse = self._scale.double().reciprocal().float()
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for part in map(local_shard, gradients(optimizer)):
            by_kind.setdefault((part.device, part.dtype), []).append(part)
        for (device, _), parts in by_kind.items():
            here = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(parts, here, inverse.to(device))
            found += here.to(found.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        found = found.to(self._scale.device)  # waits for the copy, if that is the CPU
        state["found_inf_per_device"] = {found.device: found}
        state["stage"] = OptState.UNSCALED


def scales_losses(run: Run) -> bool:
    """Returns whether the run's precision scales the loss, for gradients in fp16."""
    chosen = any(
        item.name == "FP16Mixed" or item.arguments.get("precision") == "16-mixed" for item in run.selected
    )
    return chosen or str(run.argument("trainer.precision")) in ("16", "16-mixed")
