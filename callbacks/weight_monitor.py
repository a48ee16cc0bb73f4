"""Norms of gradients, weights and updates: by block and by kind of weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from core.errors import ConfigError
from core.technique import technique
from core.training.figures import log_figures
from core.training.shards import local_tensors
from toolkit.network_parts import weight_groups

FIGURES = ("gradient_norm", "weight_norm", "update_norm")


@technique(
    paper="update-to-weight ratio: Karpathy, CS231n, 'ratio of weights to updates' (about 1e-3); by layer: LARS, arXiv:1708.03888",
    conflicts={
        "DeepSpeedZero": "its gradients are flat shards of many weights; FSDP shards them weight by weight"
    },
    before=("SkipStep", "GradientClip"),
    observer=True,
)
class WeightMonitor(Callback):
    """Logs 2-norms of gradients, weights and updates, of each block and of each kind of weight.

    In every `every_n_steps`th optimizer step: `gradient_norm/<group>`, before clipping; `weight_norm/<group>`, before the
    step; `update_norm/<group>`, of the weights after the step minus those before it; and `update_ratio/<group>`, update
    over weight, unless the weights are zero. Groups are `block.<i>`; `attention`, `mlp`, `norm` and `router`, each over all
    blocks; `embedding` and `head`. Tied embeddings are of `embedding` alone, the last norm is of no group. Only weights that
    are trained count. Which modules are attention or MLP the network says (`toolkit.network_parts`); of one that does not,
    blocks and ends are logged.

    Norms are those of the full model under every strategy: each rank adds the squares of its shards, divided by the number
    of ranks that have the same ones. A monitored step takes memory for one more copy of the rank's weights. All other
    steps cost nothing.

    Args:
        every_n_steps: Optimizer steps between two that are monitored.
        detail: Whether each kind is also logged in each block, as `block.<i>.attention` and so on.

    Raises:
        ConfigError: If `every_n_steps` is below 1.

    Example:
        trainer:
          callbacks+:
            - class_path: WeightMonitor
              init_args: {every_n_steps: 50}
    """

    def __init__(self, every_n_steps: int = 50, detail: bool = False) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"WeightMonitor takes every_n_steps >= 1, not {every_n_steps}.")
        self.every_n_steps, self.detail = every_n_steps, detail
        self._groups: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._shares: Tensor | None = None
        self._before: list[Tensor] | None = None
        self._squares: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Asks the network for its groups, and counts on how many ranks each weight is."""
        network: Any = pl_module.network
        groups = weight_groups(network, self.detail)
        own = {name: parameter for group in groups.values() for name, parameter in group.items()}
        self._parameters = list(own.values())
        elements = {
            name: (local.numel(), parameter.numel())
            for (name, parameter), local in zip(own.items(), local_tensors(own.values()), strict=True)
        }
        self._groups, copies = _agree(list(groups), elements)
        self._shares = torch.zeros(len(self._groups), len(own), dtype=_widest(pl_module.device))
        places = {name: index for index, name in enumerate(own)}
        for row, group in enumerate(self._groups):
            for name in groups.get(group, ()):
                self._shares[row, places[name]] = 1 / copies[name]
        self._shares = self._shares.to(pl_module.device)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Measures gradients and weights of a step that is due, and keeps the weights."""
        if (trainer.global_step + 1) % self.every_n_steps:
            return
        weights = [weight.detach() for weight in local_tensors(self._parameters)]
        gradients = [_gradient(parameter) for parameter in self._parameters]
        self._squares = [self._sums(gradients), self._sums(weights)]
        self._before = [weight.clone() for weight in weights]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measures the update and logs the step."""
        if self._before is None:
            return
        updates, self._before = self._before, None
        with torch.no_grad():
            if updates:
                torch._foreach_sub_(updates, [weight.detach() for weight in local_tensors(self._parameters)])
            sums = torch.stack([*self._squares, self._sums(updates)])
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")  # type: ignore[assignment]
        log_figures(trainer, figures(self._groups, sums.sqrt()))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Frees the copy where a step breaks off."""
        self._before = None

    def _sums(self, tensors: list[Tensor | None] | list[Tensor]) -> Tensor:
        """Returns this rank's part of the sum of squares of each group, (groups,)."""
        assert self._shares is not None
        there = [(index, tensor) for index, tensor in enumerate(tensors) if tensor is not None]
        squares = self._shares.new_zeros(len(tensors))
        if there:
            wide = any(tensor.dtype == torch.float64 for _, tensor in there)
            norms = torch._foreach_norm(
                [tensor for _, tensor in there], 2, torch.float64 if wide else torch.float32
            )
            index = torch.tensor([index for index, _ in there], device=squares.device)
            squares[index] = torch.stack(norms).to(squares).square()
        return self._shares @ squares


def figures(groups: list[str], norms: Tensor) -> dict[str, float]:
    """Returns what is logged, given the norms (3, groups) of gradients, weights and updates."""
    found = {
        f"{name}/{group}": value
        for name, row in zip(FIGURES, norms.tolist(), strict=True)
        for group, value in zip(groups, row, strict=True)
    }
    for group in groups:
        if weight := found[f"weight_norm/{group}"]:
            found[f"update_ratio/{group}"] = found[f"update_norm/{group}"] / weight
    return found


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """Returns this rank's shard of a gradient, sharded as its parameter; None where there is none."""
    gradient: Any = parameter.grad
    if gradient is None:
        return None
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:  # partial sums
        gradient = gradient.redistribute(placements=placements)
    return local_tensors([gradient])[0]


def _agree(groups: list[str], elements: dict[str, tuple[int, int]]) -> tuple[list[str], dict[str, float]]:
    """Returns the groups of all ranks, and on how many ranks each element of a weight is.

    Args:
        groups: This rank's groups: a stage of a pipeline has only its blocks.
        elements: Name of a weight -> how many elements this rank has, and how many there are.
    """
    found: list[Any] = [(groups, elements)]
    if dist.is_available() and dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, (groups, elements))
    everywhere = list(dict.fromkeys(group for own, _ in found for group in own))
    held: dict[str, int] = {}
    for _, own in found:
        for name, (local, _) in own.items():
            held[name] = held.get(name, 0) + local
    return everywhere, {name: held[name] / max(whole, 1) for name, (_, whole) in elements.items()}


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
