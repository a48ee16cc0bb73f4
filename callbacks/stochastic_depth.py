"""Leaves out residual blocks at random while training."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from core.errors import ConfigError
from core.technique import technique


def drop_block(x: Tensor, out: Tensor, rate: float) -> Tensor:
    """Returns `out` (B, ...) with what the block added to `x` left out in each row with probability `rate`.

    What stays is divided by 1 - rate, so that the expectation is `out`; exactly, as the rate is that of which the
    factor is a number of the data type: in bfloat16 0.1 becomes 0.0986, and rates below 0.0039 become 0.
    """
    factor = out.new_full((), 1 / (1 - rate))
    stays = torch.rand(len(x), *[1] * (x.ndim - 1), dtype=torch.float32, device=x.device) * factor < 1
    return torch.lerp(x.to(out.dtype), out, stays * factor)  # one pass forward, two backward


@technique(
    paper="Deep Networks with Stochastic Depth, arXiv:1603.09382, section 3, equation 4 (linear decay)"
)
class StochasticDepth(Callback):
    """Leaves out each block of the network, for each sequence by itself, more often the deeper it stands.

    Block l of L is left out with probability rate * l / L. What a block adds to the residual stream is
    divided by the probability that it stays: validation and generation need no scaling, unlike in the paper.
    For blocks that return their input plus something (norms first). It saves no time: other sequences of
    the batch need the block.

    Args:
        rate: Probability of leaving out the last block, from 0 to below 1.

    Raises:
        ConfigError: If `rate` is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: StochasticDepth
              init_args: {rate: 0.1}
    """

    def __init__(self, rate: float = 0.1) -> None:
        if not 0 <= rate < 1:
            raise ConfigError(f"StochasticDepth takes a rate from 0 to below 1, not {rate}.")
        self.rate = rate
        self._hooks: list[Any] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hooks the blocks."""
        blocks = pl_module.network.blocks
        for number, block in enumerate(blocks, 1):
            self._hooks.append(block.register_forward_hook(_Hook(self.rate * number / len(blocks))))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets go of the blocks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Hook:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, block: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return drop_block(inputs[0], out, self.rate) if block.training else out
