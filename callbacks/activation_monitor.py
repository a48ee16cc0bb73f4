"""Statistics of activations: what the blocks and their MLPs compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from core.errors import ConfigError
from core.technique import technique
from core.training.figures import log_figures
from core.training.shards import local_tensors
from toolkit.network_parts import MLP_READERS, block_modules
from toolkit.sampled_steps import Handle, SampledSteps, in_training_forward

SUMS = 7
"""Of each place: the number of values; sums of x, x^2, x^3, x^4; how many are zero; how many saturated."""

CHUNK = 2**22
"""Values that are converted to float64 at a time."""


@technique(
    paper="massive activations, of a magnitude above 100: arXiv:2402.17762, section 2; kurtosis: arXiv:2306.12929",
    observer=True,
)
class ActivationMonitor(SampledSteps):
    """Logs mean, variance, kurtosis and shares of zeros and saturated values of what each block returns.

    In every `every_n_steps`th optimizer step, over all its tokens, micro-batches and ranks (padding included):
    `activation/block.<i>/mean`, `.../variance`, `.../kurtosis` (3 of a normal distribution; no figure where all values are
    equal), `.../zeros` (share of exact zeros) and `.../saturated` (share of magnitudes of at least `saturation`, and of values
    that are not finite). Of the hidden layer of an MLP, behind activation and gate, the same as `activation/block.<i>.mlp/...`,
    where the network says which it is (`toolkit.network_parts`) and blocks are not compiled; of experts it is not logged.

    Sums are in float64. There are hooks in the monitored step alone: all others cost nothing.

    Args:
        every_n_steps: Optimizer steps between two that are monitored.
        saturation: Magnitude from which on a value counts as saturated, above 0.

    Raises:
        ConfigError: If `every_n_steps` is below 1, or `saturation` not above 0.

    Example:
        trainer:
          callbacks+:
            - class_path: ActivationMonitor
              init_args: {every_n_steps: 50}
    """

    def __init__(self, every_n_steps: int = 50, saturation: float = 100.0) -> None:
        super().__init__(every_n_steps)
        if not saturation > 0:
            raise ConfigError(f"ActivationMonitor takes saturation > 0, not {saturation}.")
        self.saturation = saturation
        self._sums = torch.zeros(0)

    def listen(self, trainer: Trainer, pl_module: LightningModule) -> Sequence[Handle]:
        """Adds hooks to the blocks, and to what reads the hidden layers of their MLPs."""
        network: Any = pl_module.network
        wide = torch.float32 if pl_module.device.type == "mps" else torch.float64
        self._sums = torch.zeros(2, len(network.blocks), SUMS, dtype=wide, device=pl_module.device)
        handles = [
            block.register_forward_hook(partial(self._returned, self._sums[0, index]))
            for index, block in enumerate(network.blocks)
        ]
        return handles + [
            reader.register_forward_pre_hook(partial(self._given, self._sums[1, index]))
            for index, reader in block_modules(network, MLP_READERS)
        ]

    def report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the figures over all ranks."""
        sums = self._sums
        if trainer.world_size > 1:  # what several ranks have counts several times, in sums and numbers alike
            sums = trainer.strategy.reduce(sums, reduce_op="sum")  # type: ignore[assignment]
        log_figures(trainer, figures(sums.cpu()))

    def _returned(self, sums: Tensor, block: nn.Module, inputs: Any, output: Any) -> None:
        self._add(sums, block, output[0] if isinstance(output, tuple) else output)

    def _given(self, sums: Tensor, reader: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._add(sums, reader, inputs[0])

    def _add(self, sums: Tensor, module: nn.Module, values: Tensor) -> None:
        if (
            in_training_forward(module) and not values.is_meta
        ):  # a pipeline asks for shapes on the meta device
            with torch.no_grad():
                add_moments(sums, local_tensors([values])[0], self.saturation)


def add_moments(sums: Tensor, values: Tensor, saturation: float) -> None:
    """Adds what `SUMS` lists of some values (any shape) to sums (SUMS,)."""
    for chunk in values.reshape(-1).split(CHUNK):
        x = chunk.to(sums.dtype)
        square = x.square()
        saturated = ~(x.abs() < saturation)  # NaN too
        parts: list[Tensor] = [x.sum(), square.sum(), (square * x).sum(), square.square().sum()]
        counts = [(x == 0).sum(), saturated.sum()]
        sums[0] += len(x)
        sums[1:] += torch.stack([*parts, *(count.to(sums.dtype) for count in counts)])


def figures(sums: Tensor) -> dict[str, float]:
    """Returns what is logged, given the sums (2, L, SUMS) of outputs and hidden layers, on the host."""
    found: dict[str, float] = {}
    for place, rows in zip(("", ".mlp"), sums, strict=True):
        for index, (number, *moments, zeros, saturated) in enumerate(rows.tolist()):
            if not number:  # no hidden layer that is known, or in a block that is compiled
                continue
            mean, second, third, fourth = (moment / number for moment in moments)
            variance = max(second - mean**2, 0.0) if math.isfinite(second) else math.nan
            central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
            name = f"activation/block.{index}{place}"
            found |= {f"{name}/mean": mean, f"{name}/variance": variance}
            if variance:
                found[f"{name}/kurtosis"] = central / variance**2
            found |= {f"{name}/zeros": zeros / number, f"{name}/saturated": saturated / number}
    return found
