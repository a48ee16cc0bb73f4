"""What a run sends between its ranks in one optimizer step: each kind of collective, in which data type, how many bytes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.lightning_compat import is_accumulating
from toolkit.collectives import COLLECTIVES

NAMES = {operator: name for name, operators in COLLECTIVES.items() for operator in operators}
SMALL = 64
"""Elements up to which a message is no weight, gradient or hidden state: losses, norms, decisions."""


class Sent(TorchDispatchMode):
    """Notes what this process sends while the mode is on: `calls` and `bytes` of each kind and data type."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again as operators on local tensors
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional") and name in NAMES:
            found = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
            largest = max(found, key=torch.Tensor.numel)
            if largest.numel() > SMALL:
                key = f"{NAMES[name]} {str(largest.dtype).removeprefix('torch.')}"
                self.calls[key] += 1
                self.bytes[key] += largest.numel() * largest.element_size()
        return result


class SentInAStep(Callback):
    """Prints the calls and bytes of this rank's second optimizer step."""

    sent: Sent | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1 and self.sent is None:
            self.sent = Sent()
            self.sent.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.sent is not None and trainer.global_step == 2 and not is_accumulating(trainer):
            self.sent.__exit__(None, None, None)
            found = {key: [calls, self.sent.bytes[key]] for key, calls in sorted(self.sent.calls.items())}
            print("SENT", json.dumps(found), flush=True)
            self.sent = None
            type(self).on_train_batch_start = Callback.on_train_batch_start  # once


def sent(output: str) -> dict[str, list[int]]:
    """Returns what the first rank printed: kind and data type -> calls, bytes."""
    found: dict[str, list[int]] = json.loads(output.partition("SENT ")[2].partition("\n")[0])
    return found
