"""Activation checkpointing: few activations are kept for backward, the others are computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from core.contracts import Network
from core.errors import ConfigError, nearest
from core.technique import technique
from toolkit.further_blocks import further_blocks

OPERATORS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}
"""Names that `keep` knows -> what PyTorch calls the operators, under torch.ops.aten."""


@technique(
    paper="Chen et al., arXiv:1604.06174; selective: Korthikanti et al., arXiv:2205.05198, section 5; torch.utils.checkpoint",
    offers=("keeps_weights",),
)
class ActivationCheckpointing(Callback):
    """Frees the activations of the network's blocks after forward, and recomputes them during backward.

    Losses, gradients and weights are bitwise those of a run without it: dropout draws the same random numbers
    again. By default only the input of each block is kept, which costs about a third more computation. `keep` names
    operators whose results are kept as well, so that they are not computed again. Names of parameters do not change;
    evaluation and sampling are not affected.

    With `memory_budget` the compiler chooses: each block is compiled with torch.compile, which keeps, within the
    budget, the activations that take longest to compute again. The results are those of a compiled run: they differ
    by rounding and by dropout. On a CPU this needs a C++ compiler.

    Args:
        every_n_blocks: 1: every block; n: the first of every n.
        keep: "matmul", "attention", or what an operator is called under `torch.ops.aten`.
        memory_budget: Between 0 (keep only the inputs) and 1 (compute nothing again).

    Raises:
        ConfigError: If a number is out of range, an operator is unknown, both `memory_budget` and `keep`
            are given, or the network has no blocks.

    Example:
        trainer:
          callbacks+:
            - class_path: ActivationCheckpointing
              init_args: {keep: [matmul, attention]}
    """

    def __init__(
        self, every_n_blocks: int = 1, keep: list[str] | None = None, memory_budget: float | None = None
    ) -> None:
        if every_n_blocks < 1:
            raise ConfigError(f"ActivationCheckpointing takes every_n_blocks >= 1, not {every_n_blocks}.")
        if memory_budget is not None and (keep or not 0 <= memory_budget <= 1):
            raise ConfigError(
                f"ActivationCheckpointing takes a memory_budget between 0 and 1, not {memory_budget}, and no "
                "`keep` beside it: with a budget the compiler chooses."
            )
        self.every_n_blocks, self.memory_budget = every_n_blocks, memory_budget
        self._kept = frozenset(overload for name in keep or () for overload in overloads(name))

    def change_network(self, network: Network) -> None:
        """Wraps the blocks' `forward`: modules and their names stay."""
        if not network.blocks:
            raise ConfigError(
                f"ActivationCheckpointing: {type(network).__name__} has no blocks to checkpoint."
            )
        for block in [*network.blocks, *further_blocks(network)][:: self.every_n_blocks]:
            if self.memory_budget is None:
                checkpoint_block(block, self._kept)
            else:
                compile_block(block, self.memory_budget)


def overloads(name: str) -> Iterable[Any]:
    """Returns the overloads of an operator, or of those that a name of `OPERATORS` means.

    Raises:
        ConfigError: If there is no such operator.
    """
    for operator in OPERATORS.get(name, (name,)):
        packet = getattr(torch.ops.aten, operator, None)
        if packet is None and name not in OPERATORS:  # those may be missing in a build without GPUs
            known = {*OPERATORS, *dir(torch.ops.aten)}
            raise ConfigError(
                f"ActivationCheckpointing: keep has {name!r}, which is no operator.{nearest(name, known)} "
                f"It takes {' and '.join(OPERATORS)}, and names under torch.ops.aten."
            )
        if packet is not None:
            yield from (getattr(packet, overload) for overload in packet.overloads())


def checkpoint_block(block: nn.Module, kept: frozenset[Any] = frozenset()) -> None:
    """Makes a module keep only its inputs and the results of the operators in `kept`."""
    options: dict[str, Any] = {"use_reentrant": False}
    if kept:

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    block.forward = partial(_forward, block.forward, partial(checkpoint, block.forward, **options))  # type: ignore[method-assign]


def compile_block(block: nn.Module, memory_budget: float) -> None:
    """Compiles a module so that it keeps this share of its activations. The setting is global to the process."""
    from torch._functorch import config  # the command line imports no compiler for runs that may not need it

    config.activation_memory_budget = memory_budget
    block.forward = partial(_forward, block.forward, torch.compile(block.forward))  # type: ignore[method-assign]


def _forward(plain: Callable[..., Any], training: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (training if torch.is_grad_enabled() else plain)(*args, **kwargs)
