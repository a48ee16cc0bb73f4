"""Stochastic depth: residual blocks are left out at random in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from core.errors import ConfigError, nearest
from core.technique import technique
from core.training.loss_ranks import dp_group

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

SelectRows = Callable[[tuple[Any, ...], Tensor], tuple[Any, ...] | None]
"""`Network.select_rows`."""


def factor_of(rate: float, dtype: torch.dtype) -> float:
    """Returns 1 / (1 - rate) as the nearest number of a data type.

    The rate that is drawn is the one that belongs to it: in bfloat16 0.1 becomes 0.0986, and rates below 0.0039
    become 0.
    """
    factor = 1 / (1 - rate)
    unit = math.ldexp(torch.finfo(dtype).eps, math.frexp(factor)[1] - 1)  # between neighbouring numbers
    return round(factor / unit) * unit


def draw(rows: int, rate: float, dtype: torch.dtype, scaled: bool = True) -> tuple[Tensor, float]:
    """Returns which of some rows have the block (rows,), booleans on the host, and the factor on what it adds."""
    factor = factor_of(rate, dtype) if scaled else 1 / (1 - rate)
    stays = torch.rand(rows, dtype=torch.float32, device="cpu") * factor < 1
    return stays, factor if scaled else 1.0


def drop_block(x: Tensor, out: Tensor, rate: float, scaled: bool = True) -> Tensor:
    """Returns `out` (B, ...) with what the block added to `x` left out in each row with probability `rate`.

    What stays is divided by 1 - rate, so that the expectation is `out`, or, not `scaled`, is `out` itself.
    """
    return _mixed(x, out, *draw(len(x), rate, out.dtype, scaled))


def drop_rows(
    block: Callable[..., Tensor],
    select: SelectRows,
    x: Tensor,
    rest: tuple[Any, ...],
    rate: float,
    scaled: bool = True,
) -> Tensor:
    """Returns what :func:`drop_block` makes of `block(x, *rest)`, computed for the rows that stay, but one at least.

    At least one: a block that is not run would have no gradients, instead of zeros, and ranks would wait for each
    other.
    """
    # `draw`, with NumPy: the host knows how many rows there are, and waits for nothing
    draws, factor = np.empty(len(x), np.float32), factor_of(rate, x.dtype) if scaled else 1 / (1 - rate)
    torch.from_numpy(draws).uniform_()
    stays, factor = draws * np.float32(factor) < 1, factor if scaled else 1.0
    rows = np.flatnonzero(stays)
    some = len(rows) > 0
    index = torch.from_numpy(rows if some else np.zeros(1, np.int64)).to(x.device, non_blocking=True)
    own = None if len(index) == len(x) else select(rest, index)
    if own is None:
        return _mixed(x, block(x, *rest), torch.from_numpy(stays), factor)
    before = x.index_select(0, index)
    out = block(before, *own)
    mixed = torch.lerp(before.to(out.dtype), out, factor if some else 0.0)
    return x.to(out.dtype).index_copy(0, index, mixed)


def _mixed(x: Tensor, out: Tensor, stays: Tensor, factor: float) -> Tensor:
    weight = (stays.to(out.dtype) * factor).view(-1, *[1] * (x.ndim - 1)).to(out.device, non_blocking=True)
    return torch.lerp(x.to(out.dtype), out, weight)  # one pass forward, two backward


@technique(
    paper="Deep Networks with Stochastic Depth, arXiv:1603.09382, section 3, equation 4 (linear decay); norms last: "
    "LayerDrop, arXiv:1909.11556, section 3"
)
class StochasticDepth(Callback):
    """Leaves out residual blocks at random, for each sequence separately, deeper ones more often.

    Block l of L is left out with probability rate * l / L. It is computed for the other sequences of the micro-batch
    only, which saves about r/2 of the time of all blocks at a rate r (nothing with one sequence in a
    micro-batch). Networks without `select_rows`, such as those with experts, compiled ones, and strategies under which ranks share
    tokens, compute all sequences, with the same result.

    Norms first (a block returns its input plus something): what a block adds is divided by the
    probability that it stays, so that validation and generation need no scaling, unlike in the paper. Norms
    last: a sequence that leaves a block out continues with the block's input, which is normalised already, and the
    others with its output as it is, as in LayerDrop; scaled it would not be normalised any more.

    Args:
        rate: Probability of leaving out the last block, from 0 to below 1.
        norm_position: Where the blocks have their norms: "pre" or "post", as `norm_position` of GPT.

    Raises:
        ConfigError: If `rate` is out of range, or the network has its norms elsewhere.

    Example:
        trainer:
          callbacks+:
            - class_path: StochasticDepth
              init_args: {rate: 0.1}
    """

    def __init__(self, rate: float = 0.1, norm_position: Literal["pre", "post"] = "pre") -> None:
        if not 0 <= rate < 1:
            raise ConfigError(f"StochasticDepth takes a rate from 0 to below 1, not {rate}.")
        if norm_position not in ("pre", "post"):
            raise ConfigError(
                f"StochasticDepth: norm_position is {norm_position!r}, not pre or post."
                f"{nearest(str(norm_position), ('pre', 'post'))}"
            )
        self.rate, self.norm_position = rate, norm_position
        self._forwards: list[tuple[nn.Module, Any]] = []

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields that the network has its norms elsewhere."""
        theirs, ours = run.argument("model.network.norm_position"), own.arguments.get("norm_position", "pre")
        if theirs in ("pre", "post") and theirs != ours:
            yield f"norm_position is {ours}, that of the network {theirs}: set it to {theirs}"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wraps the blocks' `forward`: modules and their names stay."""
        network: Any = pl_module.network
        # ranks that share tokens would have to agree on the rows wherever they meet inside a block
        select = network.select_rows if dp_group(trainer) is None else _none
        for number, block in enumerate(network.blocks, 1):
            self._forwards.append((block, vars(block).get("forward")))
            rate = self.rate * number / len(network.blocks)
            block.forward = partial(_forward, block, block.forward, select, rate, self.norm_position == "pre")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the blocks' `forward`."""
        for block, forward in self._forwards:
            del block.forward
            if forward is not None:  # another technique's
                block.forward = forward
        self._forwards.clear()


def _none(rest: tuple[Any, ...], rows: Tensor) -> None:
    return None


def _forward(
    block: nn.Module,
    plain: Callable[..., Tensor],
    select: SelectRows,
    rate: float,
    scaled: bool,
    x: Tensor,
    *rest: Any,
    **named: Any,
) -> Tensor:
    if not block.training:
        return plain(x, *rest, **named)
    if named or torch.compiler.is_compiling():
        return drop_block(x, plain(x, *rest, **named), rate, scaled)
    return drop_rows(plain, select, x, rest, rate, scaled)
