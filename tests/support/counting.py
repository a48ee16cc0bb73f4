"""Counts what a strategy does in a run of its own process."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from plugins.strategies import ddp


class HookCalls(Callback):
    """Prints how often DDP called its communication hook."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        name = getattr(trainer.strategy, "compression", "none")
        inner, self.calls = ddp.HOOKS.get(name), 0
        if inner is None:
            return

        def counted(state, bucket):  # unannotated: DDP refuses annotations that are texts
            self.calls += 1
            return inner(state, bucket)

        ddp.HOOKS[name] = counted

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print(f"HOOK_CALLS {self.calls}", flush=True)


class BackwardHooks(Callback):
    """Prints how often callbacks were called at the beginning and the end of a backward pass."""

    before = after = 0

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self.before += 1

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print(f"BACKWARD_HOOKS {self.before} {self.after}", flush=True)


class BlockInputs(Callback):
    """Prints of what types the tensors are that the first block is given."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.network.blocks[0].register_forward_pre_hook(self._note)

    def _note(self, block: Any, inputs: Any) -> None:
        print(
            "BLOCK_INPUTS", *(value.dtype for value in inputs if isinstance(value, torch.Tensor)), flush=True
        )
