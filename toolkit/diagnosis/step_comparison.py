"""What an optimizer step did to weights, rates and the optimizer's state, compared with what was configured."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.diagnosis.gradient_probes import norms_of
from toolkit.diagnosis.plain import PlainParts

LEAST = 16
"""Elements of a parameter of which the update says something."""

EPSILONS = (1e-6, 1e-4, 1e-2, 1.0)
"""Values of Adam's epsilon that are tried where an update is not as configured."""


class UpdateComparison:
    """An optimizer step, made again from the same weights, gradients and state, as it is configured.

    Args:
        plain: Builds the optimizer.
        rates: Of the configured groups in this step; None: not known, and those of the run are taken.
    """

    def __init__(self, plain: PlainParts, rates: Sequence[float] | None) -> None:
        self.plain, self.rates = plain, rates
        self.groups = plain.groups()
        self.optimizer: Any = plain.trainer.optimizers[0]
        parameters = [p for group in self.groups for p in group["params"]]
        self.before = [p.detach().clone() for p in parameters]
        self.state = {id(p): copy.deepcopy(dict(self.optimizer.state.get(p, {}))) for p in parameters}
        self.settings = self._settings()

    def is_complete(self) -> bool:
        """Returns whether the configured groups have all that the optimizer has: not so where weights were frozen since."""
        return set(self.settings) <= set(self.state)

    def _settings(self) -> dict[int, dict[str, Any]]:
        return {
            id(p): {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
            for p in group["params"]
        }

    def figures(self) -> dict[str, float]:
        """Returns the figures, once the step was made and before gradients are zeroed."""
        parameters = [p for group in self.groups for p in group["params"]]
        if any(p.grad is not None and not bool(torch.isfinite(p.grad).all()) for p in parameters):
            return {}
        expected = self._stepped()
        if expected is None:
            return {}
        found = self._of_settings(expected[1]) | self._clipped(parameters)
        after = [p.detach() for p in parameters]
        fits = [
            _fit(now, before, then.detach())
            for now, before, then in zip(after, self.before, expected[0], strict=True)
            if before.numel() >= LEAST and bool((then != before).any())
        ]
        if not fits:
            return found
        names = ("times", "decays", "rest")
        middle = {
            f"doctor/update_{n}": statistics.median(one[i] for one in fits) for i, n in enumerate(names)
        }
        found |= middle
        times = [one[0] for one in fits]
        found |= {"doctor/update_times_least": min(times), "doctor/update_times_most": max(times)}
        found["doctor/update_decays_most"] = max(one[1] for one in fits)
        if middle["doctor/update_rest"] > 0.2 or middle["doctor/update_times"] < 0.5:
            found |= self._epsilon(after)
        return found | self._of_state(parameters, expected[1])

    def _clipped(self, parameters: Sequence[Tensor]) -> dict[str, float]:
        """Returns the norm of the gradients that the step was made with, over that to which they are to be clipped."""
        trainer, module = self.plain.trainer, self.plain.module
        given = [p.grad for p in parameters if p.grad is not None]
        if not given or trainer.gradient_clip_algorithm not in (None, "norm"):
            return {}
        norm, limit = float(module.gradient_norm(self.optimizer)), trainer.gradient_clip_val
        if not math.isfinite(norm):
            return {}
        expected = min(norm, float(limit)) if limit else norm
        return {"doctor/clipped_times": float(nn.utils.get_total_norm(given)) / max(expected, 1e-30)}

    def _stepped(self, eps: float | None = None) -> tuple[list[nn.Parameter], Any] | None:
        """Returns the parameters after the configured step, and its optimizer."""
        groups, copies, sources = [], list[nn.Parameter](), list[Tensor]()
        for group in self.groups:
            own = []
            for p in group["params"]:
                twin = nn.Parameter(self.before[len(copies)].clone())
                twin.grad = None if p.grad is None else p.grad.detach().clone()
                if hasattr(p, "hidden_matrix"):
                    twin.hidden_matrix = True  # type: ignore[attr-defined]
                copies.append(twin)
                sources.append(p)
                own.append(twin)
            groups.append({**group, "params": own})
        optimizer = self.plain.optimizer(groups)
        if optimizer is None:
            return None
        place = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        source = {id(twin): p for twin, p in zip(copies, sources, strict=True)}
        for group in optimizer.param_groups:
            first = group["params"][0]
            if self.rates is not None:
                group["lr"] = self.rates[place[id(first)]]
            else:
                group["lr"] = self.settings.get(id(source[id(first)]), group)["lr"]
            if eps is not None and "eps" in group:
                group["eps"] = eps
        for twin in copies:
            if kept := self.state[id(source[id(twin)])]:
                optimizer.state[twin] = copy.deepcopy(kept)
        optimizer.step()
        self._twins = source
        return copies, optimizer

    def _of_settings(self, optimizer: Any) -> dict[str, float]:
        """Returns how the settings of groups differ from the configured ones, where they differ most."""
        rate = eps = memory = 1.0
        decay = 0.0
        for group in optimizer.param_groups:
            for twin in group["params"]:
                given = self.settings.get(id(self._twins[id(twin)]))
                if given is None:
                    continue
                rate = _further(rate, given["lr"], group["lr"])
                for name in ("betas", "momentum"):
                    memory = _further(memory, _horizon(given.get(name)), _horizon(group.get(name)))
                eps = _further(eps, given.get("eps", 1.0), group.get("eps", 1.0))
                decay = max(
                    decay, float(given.get("weight_decay", 0.0)) - float(group.get("weight_decay", 0.0))
                )
        found = {"doctor/rate_times": rate, "doctor/eps_times": eps, "doctor/decay_more": decay}
        return found | {"doctor/memory_times": memory}

    def _epsilon(self, after: Sequence[Tensor]) -> dict[str, float]:
        """Returns the epsilon with which the step would have come out most nearly as it did, if it is nearly so."""
        best = (0.1, 0.0)
        for eps in EPSILONS:
            stepped = self._stepped(eps)
            if stepped is None or "eps" not in stepped[1].param_groups[0]:
                return {}
            rests = [
                float((now - then.detach()).norm() / (now - before).norm().clamp(min=1e-30))
                for now, before, then in zip(after, self.before, stepped[0], strict=True)
                if before.numel() >= LEAST
            ]
            best = min(best, (statistics.median(rests), eps))
        return {"doctor/fitted_eps": best[1]} if best[1] else {}

    def _of_state(self, parameters: Sequence[Tensor], optimizer: Any) -> dict[str, float]:
        """Returns which share of the means of gradients, and of their squares, is larger, or smaller, than the configured step makes it.

        What the step makes of those before it and of its gradients; a mean that only points elsewhere counts as smaller.
        """
        total, counts = (
            0,
            dict.fromkeys(("means_larger", "means_smaller", "squares_larger", "squares_smaller"), 0),
        )
        by_source = {id(self._twins[id(twin)]): twin for twin in optimizer.state if id(twin) in self._twins}
        for p in parameters:
            twin = by_source.get(id(p))
            for name, value in (optimizer.state.get(twin, {}) if twin is not None else {}).items():
                own = self.optimizer.state.get(p, {}).get(name)
                if not isinstance(value, Tensor) or value.numel() == 1:
                    continue
                total += 1
                same = isinstance(own, Tensor) and own.shape == value.shape
                given, meant = (own.float() if same else torch.zeros_like(value)), value.float()
                if float((given - meant).norm() / meant.norm().clamp(min=1e-30)) > 1e-2:
                    what = "squares" if name == "exp_avg_sq" else "means"
                    larger = float(given.norm()) > 1.005 * float(meant.norm())
                    counts[f"{what}_{'larger' if larger else 'smaller'}"] += 1
        return {f"doctor/state_{name}": count / total for name, count in counts.items()} if total else {}


def _horizon(decays: Any) -> float:
    """Returns the steps over which a decay, or the longest of two, remembers; 1: there is none."""
    given = decays if isinstance(decays, list | tuple) else [decays or 0.0]
    return 1 / max(1 - max(map(float, given)), 1e-9)


def _further(ratio: float, given: float, configured: float) -> float:
    """Returns whichever is further from 1: a ratio, or that of two values."""
    own = float(given) / max(float(configured), 1e-30) if configured > 0 else 1.0
    return max(ratio, own, key=lambda one: max(one, 1 / max(one, 1e-30)))


def _fit(now: Tensor, before: Tensor, then: Tensor) -> tuple[float, float, float]:
    """Returns how many times the configured update a step made, which share of the weights it took off besides, and the rest."""
    change, meant, weight = ((a.double()).flatten() for a in (now - before, then - before, before))
    size = float(change.norm())
    if size == 0:
        return 0.0, 0.0, 0.0
    rounding = 4 * 1.2e-7 * float(weight.norm()) if now.dtype == torch.float32 else size
    alone = float((change @ meant) / (meant @ meant))
    rest = float((change - alone * meant).norm())
    both = torch.stack((meant, -weight), dim=1)
    if rest <= max(0.02 * size, rounding) or float(weight.norm()) == 0:
        return alone, 0.0, max(rest - rounding, 0.0) / size
    found = torch.linalg.lstsq(both, change[:, None]).solution[:, 0]
    left = float((change - both @ found).norm())
    if left > 0.5 * rest:
        return alone, 0.0, max(rest - rounding, 0.0) / size
    return float(found[0]), float(found[1]), max(left - rounding, 0.0) / size


class StepSize:
    """How far the optimizer moves the weights in a step, and how much of that is taken back before the next one.

    Args:
        module: The LanguageModule.
    """

    def __init__(self, module: Any) -> None:
        self.weights = [p.detach() for p in module.network.parameters() if p.requires_grad]
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []

    def begin(self) -> None:
        """Keeps the weights before a step."""
        self._before = [weight.clone() for weight in self.weights]

    def figures(self) -> dict[str, float]:
        """Returns the norm of the change over that of the weights."""
        if not self._before:
            return {}
        size = nn.utils.get_total_norm(self._before)
        moved = nn.utils.get_total_norm(torch._foreach_sub(self.weights, self._before))
        self._after = [weight.clone() for weight in self.weights]
        return {"doctor/step_size": float(moved / size.clamp(min=1e-30))}

    def taken_back(self) -> dict[str, float]:
        """Returns, before the next step, which share of the kept one was undone, and how nearly nothing else was changed."""
        before, after, self._before, self._after = self._before, self._after, [], []
        if not after:
            return {}
        step, change = (torch._foreach_sub(one, after) for one in (before, self.weights))
        along, own, other = (
            sum(float((a * b).sum()) for a, b in zip(*pair, strict=True))
            for pair in ((step, change), (step, step), (change, change))
        )
        if other == 0 or own == 0:
            return {}
        return {"doctor/step_back": along / own, "doctor/step_back_cosine": along / math.sqrt(own * other)}


class StateBetween:
    """Compares weights and the optimizer's state behind a step with those in the next one: nothing should change them between."""

    def __init__(self) -> None:
        self.kept: tuple[int, list[float], list[float]] | None = None

    def keep(self, step: int, module: Any, optimizer: Any) -> None:
        """Keeps what there is behind a step."""
        self.kept = step, weights_of(module), state_of(optimizer)

    def compare(self, step: int, module: Any, optimizer: Any) -> dict[str, float]:
        """Returns the share of tensors that are others; nothing if the step before was not kept."""
        kept, self.kept = self.kept, None
        if kept is None or kept[0] != step:
            return {}
        weights = weights_of(module)
        found = {"doctor/weights_moved": _share(kept[1], weights)}
        ratios = [
            (b / a - 1 if a > 0 else 0.0, index)
            for index, (a, b) in enumerate(zip(kept[1], weights, strict=False))
            if _differ(a, b)
        ]
        if ratios:
            ends = _ends(module)
            found["doctor/weights_grown"] = statistics.median(ratio for ratio, _ in ratios)
            found["doctor/weights_moved_at_ends"] = sum(ends[index] for _, index in ratios) / len(ratios)
        states = state_of(optimizer)
        grown = [
            name == "exp_avg_sq" and b > 1.001 * a
            for a, b, name in zip(kept[2], states, (name for name, _ in _state(optimizer)), strict=False)
        ]
        found["doctor/squares_grown"] = sum(grown) / max(len(grown), 1)
        return found | {"doctor/state_moved": _share(kept[2], states)}


def _share(before: Sequence[float], after: Sequence[float]) -> float:
    if len(before) != len(after):
        return 1.0 if before else 0.0
    moved = [_differ(a, b) for a, b in zip(before, after, strict=True)]
    return sum(moved) / max(len(moved), 1)


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > 1e-6 * max(abs(one), abs(other))


def _ends(module: Any) -> list[bool]:
    """Returns which of the weights lie outside of the blocks."""
    inside = {id(p) for block in module.network.blocks for p in block.parameters()}
    return [id(p) not in inside for p in module.network.parameters() if p.is_floating_point()]


def weights_of(module: Any) -> list[float]:
    """Returns the norm of each floating-point weight."""
    return norms_of([p.detach() for p in module.network.parameters() if p.is_floating_point()])


def state_of(optimizer: Any) -> list[float]:
    """Returns a number of each tensor that an optimizer keeps: its norm, and where it is large, changes with its parameter."""
    found = [value.detach().float() for _, value in _state(optimizer)]
    return norms_of(found) if found else []


def _state(optimizer: Any) -> list[tuple[str, Tensor]]:
    return [
        (name, value)
        for group in optimizer.param_groups
        for p in group["params"]
        for name, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, Tensor) and value.numel() > 1
    ]
