"""What is measured of the network on one batch: what it sees, how loud it is, what its gradients are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.training.loss_ranks import dp_rank
from core.training.seeding import mix, seed_generators
from toolkit.generation.rows import evaluating


@torch.no_grad()
def visibility(network: Any, batch: Mapping[str, Any]) -> dict[str, float]:
    """Returns how much logits change with tokens that they must not depend on, over how much with those they may.

    `doctor/sees_future`: of positions before a token that is changed. `doctor/sees_documents`: of the documents behind the
    first, where positions restart within rows.
    """
    with evaluating(network):
        plain = _logits(network, batch)
        ids = batch["input_ids"]
        middle = ids.shape[1] // 2
        changed = _logits(network, {**batch, "input_ids": _other(ids, torch.arange(ids.shape[1]) == middle, network)})
        moved = (changed - plain).abs().amax(-1)
        found = {"doctor/sees_future": _ratio(moved[:, :middle], moved[:, middle])}
        first, later = _documents(batch)
        if first is not None and later is not None:
            changed = _logits(network, {**batch, "input_ids": _other(ids, first, network)})
            moved = (changed - plain).abs().amax(-1)
            found["doctor/sees_documents"] = _ratio(moved[later], moved[first])
    return found


def _documents(batch: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Returns the positions of each row's first document and of the others, (B, T); None where rows have but one."""
    positions = batch.get("position_ids")
    if positions is None:
        return None, None
    restarts = torch.zeros_like(positions)
    restarts[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    number = restarts.cumsum(1)
    several = number.amax(1, keepdim=True) > 0
    later = (number > 0) & several
    if "document_ids" in batch:
        later &= batch["document_ids"] >= 0
    return ((number == 0) & several, later) if bool(later.any()) else (None, None)


def _other(ids: Tensor, chosen: Tensor, network: Any) -> Tensor:
    return torch.where(chosen.to(ids.device), (ids + 1) % network.vocab_size, ids)


def _ratio(forbidden: Tensor, allowed: Tensor) -> float:
    most, usual = float(forbidden.max()), float(allowed.max())
    return most / usual if usual > 0 else 0.0


def _logits(network: Any, batch: Mapping[str, Any]) -> Tensor:
    logits: Tensor = network.logits(network(batch)).float()
    return logits


@torch.no_grad()
def loudness(network: Any, batch: Mapping[str, Any]) -> dict[str, float]:
    """Returns the standard deviation of the logits over the vocabulary, and their largest size."""
    with evaluating(network):
        logits = _logits(network, {name: value[:1] for name, value in batch.items()})
    return {"doctor/logit_deviation": float(logits.std(-1).mean()), "doctor/max_logit": float(logits.abs().max())}


@torch.no_grad()
def plain_loss(module: Any, batch: Mapping[str, Any]) -> float:
    """Returns the loss of a batch without what training adds to it, such as dropout."""
    with evaluating(module.network):
        objective, was = module.objective, module.objective.training
        objective.eval()
        try:
            loss, _ = objective.loss(module.network, batch)
        finally:
            objective.train(was)
    return float(loss.mean)


class GradientCheck:
    """Compares the gradients that an optimizer step was made with with those of the loss on the same batches.

    Args:
        module: The LanguageModule.
        batches: The micro-batches of the step, each with its index.
        clip: The norm to which gradients are clipped; None: to none.
    """

    def __init__(self, module: Any, batches: Sequence[tuple[Any, int]], clip: float | None) -> None:
        self.clip = clip
        self.named = [(name, p) for name, p in module.network.named_parameters() if p.requires_grad]
        parameters = [parameter for _, parameter in self.named]
        trainer, weight = module.trainer, torch.zeros((), device=module.device)
        sums: list[Tensor] = [torch.zeros_like(parameter) for parameter in parameters]
        for batch, index in batches:
            # the same random numbers as in the step: dropout drops the same
            seed = mix(module.seed, trainer.current_epoch, index, dp_rank(trainer))
            seed_generators(seed, module.device)
            with torch.enable_grad(), trainer.precision_plugin.train_step_context():
                loss, _ = module.objective.loss(module.network, batch)
            found = torch.autograd.grad(loss.total, parameters, allow_unused=True)
            for one, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    one.add_(gradient)
            weight = weight + loss.weight
        weight = module.sum_over_ranks(weight.clone()).clamp(min=1)
        self.gradients = [module.sum_over_ranks(one) / weight for one in sums]
        self.before = [parameter.detach().clone() for parameter in parameters]
        self.inner = {id(p) for block in module.network.blocks for p in block.parameters() if p.ndim > 1}

    def figures(self) -> dict[str, float]:
        """Returns the figures, once the step was made and before gradients are zeroed."""
        dot = theirs = ours = 0.0
        lost = nonzero = unchanged = with_gradient = 0
        moves: list[float] = []
        for (_, parameter), expected, before in zip(self.named, self.gradients, self.before, strict=True):
            found = torch.zeros_like(expected) if parameter.grad is None else parameter.grad.detach().float()
            expected = expected.float()
            dot += float((found * expected).sum())
            theirs, ours = theirs + float(found.square().sum()), ours + float(expected.square().sum())
            meant = expected != 0
            lost, nonzero = lost + int((meant & (found == 0)).sum()), nonzero + int(meant.sum())
            if id(parameter) in self.inner and (size := float(before.norm())) > 0:
                moves.append(float((parameter.detach() - before).norm()) / size)
            moved = bool((parameter.detach() != before).any())
            has = bool((found != 0).any())
            with_gradient += parameter.numel() if has else 0
            unchanged += parameter.numel() if has and not moved else 0
        ours, theirs = math.sqrt(ours), math.sqrt(theirs)
        expected_norm = min(ours, self.clip) if self.clip else ours
        result = {
            "doctor/gradients_lost": lost / max(nonzero, 1),
            "doctor/weights_unchanged": unchanged / max(with_gradient, 1),
        }
        if moves:
            result["doctor/update_ratio"] = statistics.median(moves)
        if expected_norm > 0 and math.isfinite(theirs):
            result["doctor/gradient_ratio"] = theirs / expected_norm
            result["doctor/gradient_cosine"] = dot / (ours * theirs) if ours * theirs > 0 else 0.0
        return result


def frozen_share(network: nn.Module) -> float:
    """Returns which share of the network's weights is not trained."""
    total = sum(parameter.numel() for parameter in network.parameters())
    return sum(p.numel() for p in network.parameters() if not p.requires_grad) / max(total, 1)


def optimizer_steps(optimizer: Any) -> float | None:
    """Returns the most steps that an optimizer's state counts; None where it has no count."""
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(counts, default=None)
