"""Which ranks round weights on the host before DeepSpeed's engine has them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils._python_dispatch import TorchDispatchMode


class _Rounded(TorchDispatchMode):
    """Counts the elements of tensors that are converted from float32 to bfloat16."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, result.dtype) == (
            torch.float32,
            torch.bfloat16,
        ):
            self.elements += result.numel()
        return result


class RoundsOnRankZero(Callback):
    """Asserts that rank 0 rounds each weight once until training begins, and that the others round none."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begins to count."""
        self.mode = _Rounded()
        self.mode.__enter__()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compares."""
        self.mode.__exit__(None, None, None)
        weights = sum(getattr(each, "ds_numel", each.numel()) for each in pl_module.parameters())
        assert self.mode.elements == (weights if trainer.is_global_zero else 0)
