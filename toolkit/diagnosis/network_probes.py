"""What is measured of the network on one batch: what it sees, how loud it is, what its gradients are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from core.training.loss_ranks import dp_rank
from core.training.seeding import mix, seed_generators
from toolkit.generation.rows import evaluating
from toolkit.network_parts import MLP_READERS, NamesParts


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
        changed = _logits(
            network, {**batch, "input_ids": _other(ids, torch.arange(ids.shape[1]) == middle, network)}
        )
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
    restarts = (positions == 0).long()
    restarts[:, 0] = 0
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
def inner_state(network: Any, batch: Mapping[str, Any]) -> dict[str, float]:
    """Returns figures of logits, attention and hidden units on a batch.

    `doctor/logit_deviation` over the vocabulary and `doctor/max_logit`; `doctor/attention_entropy`, of the block where it is
    least, over that of equal weights; `doctor/dead_units`, the share of hidden units that are 0 for all tokens in the block where
    most are.
    """
    zeros: list[Tensor] = []
    readers = network.parts_by_kind().get(MLP_READERS, ()) if isinstance(network, NamesParts) else ()
    handles = [
        reader.register_forward_pre_hook(
            lambda _, inputs: zeros.append((inputs[0] == 0).flatten(0, -2).all(0).float().mean())
        )
        for reader in readers
    ]
    try:
        with evaluating(network), _AttentionEntropy() as attention:
            logits = _logits(network, batch)
    finally:
        for handle in handles:
            handle.remove()
    found = {
        "doctor/logit_deviation": float(logits.std(-1).mean()),
        "doctor/max_logit": float(logits.abs().max()),
    }
    if attention.found:
        found["doctor/attention_entropy"] = float(torch.stack(attention.found).min())
    if zeros:
        found["doctor/dead_units"] = float(torch.stack(zeros).max())
    return found


class _AttentionEntropy(TorchFunctionMode):
    """Notes the entropy of the weights of each call of `scaled_dot_product_attention`, over that of equal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self._note(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **more: Any
    ) -> None:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q.float() @ k.float().mT * (more.get("scale") or q.shape[-1] ** -0.5)
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        if more.get("is_causal"):
            visible = visible.tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            visible = visible & attn_mask
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        entropy = -torch.xlogy(weights, weights).sum(-1)
        most = visible.sum(-1).clamp(min=1).log().expand_as(entropy)
        several = most > 1.0  # of three tokens and more
        if bool(several.any()):
            self.found.append((entropy[several] / most[several]).mean())


@torch.no_grad()
def plain_loss(module: Any, batches: Sequence[Mapping[str, Any]]) -> float:
    """Returns the mean loss over the labels of some batches, of all ranks, without what training adds to it, such as dropout."""
    sums = torch.zeros(2, dtype=torch.float64, device=module.device)
    objective, was = module.objective, module.objective.training
    objective.eval()
    try:
        with evaluating(module.network):
            for batch in batches:
                loss, _ = objective.loss(module.network, batch)
                sums += torch.stack((loss.total.double(), loss.weight.double()))
    finally:
        objective.train(was)
    total, weight = module.sum_over_ranks(sums).tolist()
    return total / max(weight, 1.0)


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

    def figures(self, norm_before_clipping: float | None) -> dict[str, float]:
        """Returns the figures, once the step was made and before gradients are zeroed.

        Args:
            norm_before_clipping: Of the gradients that the optimizer was given, where it is known.
        """
        dot = theirs = ours = 0.0
        lost = nonzero = unchanged = with_gradient = 0
        moves: list[float] = []
        norm = math.sqrt(sum(float(one.float().square().sum()) for one in self.gradients))
        ours_at_least = 1e-35 * (max(norm / self.clip, 1.0) if self.clip else 1.0)
        for (_, parameter), expected, before in zip(self.named, self.gradients, self.before, strict=True):
            found = torch.zeros_like(expected) if parameter.grad is None else parameter.grad.detach().float()
            expected = expected.float()
            dot += float((found * expected).sum())
            theirs, ours = theirs + float(found.square().sum()), ours + float(expected.square().sum())
            meant = expected.abs() > ours_at_least  # not of what clipping makes too small for float32
            lost, nonzero = lost + int((meant & (found == 0)).sum()), nonzero + int(meant.sum())
            if id(parameter) in self.inner and (size := float(before.norm())) > 0:
                moves.append(float((parameter.detach() - before).norm()) / size)
            moved = bool((parameter.detach() != before).any())
            has = bool((found != 0).any())
            with_gradient += parameter.numel() if has else 0
            unchanged += parameter.numel() if has and not moved else 0
        ours, theirs = math.sqrt(ours), math.sqrt(theirs)
        expected_norm, found_norm = min(ours, self.clip) if self.clip else ours, theirs
        if norm_before_clipping is not None:
            expected_norm, found_norm = ours, norm_before_clipping
        result = {
            "doctor/gradients_lost": lost / max(nonzero, 1),
            "doctor/weights_unchanged": unchanged / max(with_gradient, 1),
        }
        if moves:
            result["doctor/update_ratio"] = statistics.median(moves)
        if expected_norm > 0 and math.isfinite(theirs):
            result["doctor/gradient_ratio"] = found_norm / expected_norm
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


def blocks_of_zeros(network: Any) -> int:
    """Returns how many blocks have matrices of zeros alone."""
    matrices = [[p for p in block.parameters() if p.ndim > 1] for block in network.blocks]
    return sum(bool(block) and not any(bool(p.any()) for p in block) for block in matrices)
