"""What is measured of an optimizer step: its gradients against those of its loss, its update, the optimizer's state, ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.training.loss_ranks import dp_rank
from core.training.seeding import mix, seed_generators
from core.training.shards import local_tensors


class _Compared(NamedTuple):
    """A parameter's gradient as the optimizer got it, and computed again.

    Attributes:
        dot: Their product.
        theirs: The norm of the first.
        ours: The norm of the second.
        size: Elements.
        moved: Whether any weight changed in the step.
        ratio: The norm of the change over that of the weights; NaN for zeros.
        along: The cosine between the change and the weights, turned around: 1 where the step shrinks them and does nothing else.
    """

    dot: float
    theirs: float
    ours: float
    size: int
    moved: bool
    ratio: float
    along: float


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
        last = sums
        for batch, index in batches:
            # the same random numbers as in the step: dropout drops the same
            seed = mix(module.seed, trainer.current_epoch, index, dp_rank(trainer))
            seed_generators(seed, module.device)
            with torch.enable_grad(), trainer.precision_plugin.train_step_context():
                loss, _ = module.objective.loss(module.network, batch)
            found = torch.autograd.grad(loss.total, parameters, allow_unused=True)
            last = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
            torch._foreach_add_(sums, last)
            weight = weight + loss.weight
        weight = module.sum_over_ranks(weight.clone()).clamp(min=1)
        several = len(batches) > 1
        self.parts = {"last_batch": last} if several else {}
        if trainer.world_size > 1:
            self.parts["own_rank"] = [one.clone() for one in sums]
        self.gradients = [module.sum_over_ranks(one) / weight for one in sums]
        self.before = [parameter.detach().clone() for parameter in parameters]
        self.inner = {id(p) for block in module.network.blocks for p in block.parameters() if p.ndim > 1}

    def norms(self) -> list[list[float]]:
        """Returns the norms of all parameters before and after the step."""
        return [norms_of(self.before), norms_of([parameter.detach() for _, parameter in self.named])]

    def figures(self, norm_before_clipping: float | None) -> dict[str, float]:
        """Returns the figures, once the step was made and before gradients are zeroed.

        Args:
            norm_before_clipping: Of the gradients that the optimizer was given, where it is known.
        """
        lost = nonzero = invented = missing = 0
        norm = math.sqrt(sum(float(one.float().square().sum()) for one in self.gradients))
        least = 1e-35 * (max(norm / self.clip, 1.0) if self.clip else 1.0)
        compared: list[_Compared] = []
        for (_, parameter), expected, before in zip(self.named, self.gradients, self.before, strict=True):
            found = torch.zeros_like(expected) if parameter.grad is None else parameter.grad.detach().float()
            expected = expected.float()
            meant = expected.abs() > least  # not of what clipping makes too small for float32
            nonzero += int(meant.sum())
            if parameter.grad is None:
                missing += int(meant.sum())
            else:
                lost += int((meant & (found == 0)).sum())
            invented += int(((expected == 0) & (found != 0)).sum())
            compared.append(_compare(found, expected, parameter.detach(), before))
        lost = 0 if invented > 0.1 * lost else lost  # gradients of something else have zeros in other places
        largest = max((float(p.grad.abs().max()) for _, p in self.named if p.grad is not None), default=0.0)
        finite = 0 < largest < math.inf
        if all(p.grad is None for _, p in self.named):
            missing = 0  # an optimizer may clear all
        cut = [p.grad.abs() >= 0.999 * largest for _, p in self.named if p.grad is not None and finite]
        result = {
            "doctor/gradients_lost": lost / max(nonzero, 1),
            "doctor/gradients_missing": missing / max(nonzero, 1),
            "doctor/gradients_cut": sum(int(one.sum()) for one in cut) / max(nonzero, 1),
        } | _of_updates(compared)
        inner = [one for one, (_, p) in zip(compared, self.named, strict=True) if id(p) in self.inner]
        if moves := [one.ratio for one in inner if math.isfinite(one.ratio)]:
            result["doctor/update_ratio"] = statistics.median(moves)
            result["doctor/update_shrinks"] = statistics.median(
                one.along for one in inner if math.isfinite(one.ratio)
            )
        result |= _of_gradients(compared, norm, self.clip, norm_before_clipping)
        if result.get("doctor/gradient_cosine", 1.0) < 0.9:  # what else they are like
            given = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for _, p in self.named]
            result["doctor/gradient_of_weights"] = of_weights(given, self.gradients, self.before)
            result["doctor/gradient_signs"] = _same_signs(given, self.gradients)
            for name, part in self.parts.items():
                result[f"doctor/gradient_like_{name}"] = _cosine(given, part)
        return result


def of_weights(given: Sequence[Tensor], expected: Sequence[Tensor], weights: Sequence[Tensor]) -> float:
    """Returns the share of the square of what is added to gradients that points along the weights, as a decay in them does.

    Below 0: it points against them.
    """
    dot = sum(float((a.float() * b.float()).sum()) for a, b in zip(given, expected, strict=True))
    own = sum(float(b.float().square().sum()) for b in expected)
    shares, whole = 0.0, 0.0
    weights = [weight.detach().float() for weight in weights]
    rests = [a.float() - dot / max(own, 1e-300) * b.float() for a, b in zip(given, expected, strict=True)]
    for rest, weight in zip(rests, weights, strict=True):
        if weight.numel() > 1 and weight.ndim > 1:
            whole += float(rest.square().sum())
            along = float((rest * weight).sum())
            shares += along * abs(along) / max(float(weight.square().sum()), 1e-300)
    return shares / whole if whole > 1e-6 * own else 0.0


def _same_signs(given: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the share of the gradients that are not zero whose signs are those of the expected ones."""
    known = sum(int(((a != 0) & (b != 0)).sum()) for a, b in zip(given, expected, strict=True))
    same = sum(int((a.float() * b.float() > 0).sum()) for a, b in zip(given, expected, strict=True))
    return same / max(known, 1)


def _cosine(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    dot = sum(float((a.float() * b.float()).sum()) for a, b in zip(some, others, strict=True))
    sizes = [math.sqrt(sum(float(one.float().square().sum()) for one in each)) for each in (some, others)]
    return dot / max(math.prod(sizes), 1e-300)


def _compare(found: Tensor, expected: Tensor, after: Tensor, before: Tensor) -> _Compared:
    change = (after - before).float()
    size, moved = float(before.float().norm()), float(change.norm())
    along = -float((change * before.float()).sum()) / (moved * size) if moved * size > 0 else 0.0
    return _Compared(
        float((found * expected).sum()), float(found.norm()), float(expected.norm()), expected.numel(),
        bool((after != before).any()), moved / size if size > 0 else math.nan, along,
    )  # fmt: skip


def _of_updates(compared: list[_Compared]) -> dict[str, float]:
    """Returns shares of weights: those that have a gradient and stay, and those that have none."""
    given = [one for one in compared if one.theirs != 0]
    stay = [one for one in given if not one.moved]
    without = sum(one.size for one in compared if one.ours == 0)
    return {
        "doctor/weights_unchanged": sum(one.size for one in stay) / max(sum(one.size for one in given), 1),
        "doctor/tensors_unchanged": len(stay) / max(len(given), 1),
        "doctor/without_gradient": without / max(sum(one.size for one in compared), 1),
    }


def _of_gradients(
    compared: list[_Compared], norm: float, clip: float | None, before_clipping: float | None
) -> dict[str, float]:
    """Returns how gradients differ from those of the loss.

    `doctor/gradient_ratio`: in length; of the tensor that differs most, where some differ and others do not.
    `doctor/gradient_cosine`: in direction, tensor by tensor, weighed by their squares; the sign is that of the ratio.
    `doctor/gradient_norm`: what the optimizer was given.
    """
    theirs = math.sqrt(sum(one.theirs**2 for one in compared))
    expected = min(norm, clip) if clip and before_clipping is None else norm
    found = theirs if before_clipping is None else before_clipping
    if not expected > 0 or not math.isfinite(theirs) or not math.isfinite(found):
        return {}
    large = [one for one in compared if one.ours > 1e-3 * norm]
    cosine = sum(abs(one.dot) / one.theirs * one.ours for one in large if one.theirs > 0)
    sign = -1.0 if sum(one.dot for one in large) < 0 else 1.0
    whole = found / expected
    clipped = theirs / found if found > 0 else 1.0
    each = [one.theirs / one.ours / clipped for one in large]
    odd = max(each, key=lambda ratio: abs(math.log(max(ratio, 1e-30))), default=whole)
    return {
        "doctor/gradient_ratio": sign * (whole if 1 / 1.5 < odd / max(whole, 1e-30) < 1.5 else odd),
        "doctor/gradient_cosine": cosine / max(sum(one.ours**2 for one in large), 1e-30),
        "doctor/gradient_norm": theirs,
    }


def between_steps(module: Any, norms: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns whether weights have changed since an examined step, where no optimizer moves them; before the next step.

    `doctor/shrunk_outside`: by how much matrices are smaller, the median; `doctor/restored_outside`: the share of tensors that the
    step changed and that are now what they were before it.

    Args:
        module: The LanguageModule.
        norms: Of its trained parameters before and after the examined step.
    """
    parameters = [p.detach() for p in module.network.parameters() if p.requires_grad]
    if any(len(each) != len(parameters) for each in norms):
        return {}
    before, after, now = torch.tensor([*norms, norms_of(parameters)], dtype=torch.float64)
    stepped = before != after
    matrices = torch.tensor([p.ndim > 1 for p in parameters])
    return {
        "doctor/shrunk_outside": float((1 - now / after.clamp(min=1e-30))[matrices].median()),
        "doctor/restored_outside": float((stepped & (now == before)).sum() / stepped.sum().clamp(min=1)),
    }


def norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """Returns the norm of each tensor."""
    found: list[float] = torch.stack(list(torch._foreach_norm(list(tensors)))).tolist()
    return found


class OptimizerState:
    """Follows what an optimizer keeps for each parameter, from one examined step to the next."""

    def __init__(self) -> None:
        self._last: tuple[int, dict[int, float], dict[int, float]] = 0, {}, {}
        self._empty = 0.0

    def before_step(self, optimizer: Any) -> None:
        """Looks for means of gradients that are zero, of parameters that have a gradient and were stepped before."""
        means = [
            state[name]
            for parameter, state in optimizer.state.items()
            for name in ("exp_avg", "momentum_buffer")
            if isinstance(state.get(name), Tensor) and float(state.get("step", 1)) >= 1
            if parameter.grad is not None and bool(parameter.grad.any())
        ]
        zeros = sum(not bool(mean.any()) for mean in means)
        self._empty = zeros / len(means) if means else 0.0

    def figures(self, optimizer: Any, step: int) -> dict[str, float]:
        """Returns `doctor/optimizer_steps_behind`, by how much its counts are below the run's, and `doctor/state_lost`.

        That is the share of the parameters whose count went back, or whose second moments fell by more than their decay lets
        them: gradients may become small, but the mean of their squares forgets only so fast.
        """
        counts, sums = dict[int, float](), dict[int, Tensor]()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if "step" in state:
                    counts[id(parameter)] = float(state["step"])
                if isinstance(state.get("exp_avg_sq"), Tensor) and "betas" in group:
                    sums[id(parameter)] = (
                        local_tensors([state["exp_avg_sq"]])[0].float().sum()
                    )  # this rank's part
        squares = dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}
        before, old_counts, old_squares = self._last
        self._last = step, counts, squares
        decays = {
            id(p): group["betas"][1]
            for group in optimizer.param_groups
            if "betas" in group
            for p in group["params"]
        }
        lost = {key for key, count in old_counts.items() if counts.get(key, 0.0) < count}
        lost |= {
            key for key, square in old_squares.items()
            if squares.get(key, 0.0) < 0.9 * decays.get(key, 0.0) ** (step - before) * square
        }  # fmt: skip
        found = {"doctor/state_lost": max(self._empty, len(lost) / max(len(old_counts | old_squares), 1))}
        if counts:
            found["doctor/optimizer_steps_behind"] = step - max(counts.values())
        return found


@torch.no_grad()
def ranks_apart(module: Any) -> float:
    """Returns by how much the weights of ranks that should have the same ones differ, over their size: sums of each tensor."""
    sums = torch.stack(
        [torch.stack((p.double().sum(), p.double().abs().sum())) for p in module.network.parameters()]
    ).to(torch.float64)
    every = module.all_gather(sums).view(-1, *sums.shape) if module.trainer.world_size > 1 else sums[None]
    apart = (every[..., 0] - every[:1, :, 0]).abs() / every[..., 1].clamp(min=1e-30)
    return float(apart.max())
