"""What Lightning 2.6 does in every step for others, and training does without here; times are of a 3 GHz core."""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""The hooks of callbacks that are called for each batch, in their order."""


class NoProfiler(PassThroughProfiler):
    """Hands out one empty context: Lightning's own makes a new one 55 times a step, for 0.1 ms."""

    _nothing: AbstractContextManager[None] = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        """Returns a context that does nothing."""
        return self._nothing


def look_once(trainer: Trainer) -> None:
    """Answers once, as training starts, what would be asked anew in every step.

    - Whether `training_step` takes `batch_idx`: 45 us, of `inspect`.
    - Whether there is a CUDA device, which torch's optimizers ask: Lightning lets torch ask NVML, so that processes can
      still be forked. Where there is none, its library is looked for each time, for 0.1 to 0.3 ms; CUDA's own answer
      takes 1 to 10 us, and there is nothing that a fork could break.
    - Which callbacks have a hook of their own: Lightning calls the empty ones too, some 40 a step, for 1 us each.
    """
    loop = trainer.fit_loop.epoch_loop
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "batch_idx", min_args=2):
        loop._build_kwargs = _keywords  # type: ignore[method-assign, assignment]
    else:
        vars(loop).pop("_build_kwargs", None)  # of the fit before
    if not torch.cuda.is_available():
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for hook in BATCH_HOOKS:
            if getattr(callback, hook) == getattr(Callback, hook).__get__(callback):
                with suppress(AttributeError):  # frozen
                    setattr(callback, hook, None)  # Lightning passes over what cannot be called


def _keywords(keywords: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
    keywords["batch"], keywords["batch_idx"] = batch, batch_idx
    return keywords
