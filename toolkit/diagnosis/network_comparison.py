"""A network and an objective compared with leyden's own of the same configuration, on the same weights, rows and random numbers.

Each module is also compared by itself: leyden's gets what the module was given, so that only the first one that differs does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from core.contracts import IGNORED_LABEL
from core.training.seeding import seed_generators
from toolkit.diagnosis.data_probes import figures_of, label_counts
from toolkit.diagnosis.foreign import APART, KINDS
from toolkit.diagnosis.gradient_probes import of_weights
from toolkit.diagnosis.network_probes import backward_gains, few_digits, inner_state, kept_buffers, visibility
from toolkit.generation.rows import evaluating
from toolkit.network_parts import NamesParts
from toolkit.routing import RoutesTokens

SEED = 7


class NetworkComparison:
    """Compares; figures are of this rank.

    Args:
        module: The LanguageModule.
        network: Leyden's network; None: it cannot be built, and the objectives alone are compared, on the run's own.
        objective: Leyden's objective; None: it is not known.
        is_supposed: Whether nothing says that it is meant to be this one.
    """

    def __init__(self, module: Any, network: Any, objective: Any, is_supposed: bool = False) -> None:
        self.is_supposed, self.is_alone = is_supposed, network is None
        self.live, self.own_objective = module.network, module.objective
        self.network, self.objective, self.device = network or module.network, objective, module.device

    def figures(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns how far apart both are, where, and what is usual for leyden's with these weights.

        Args:
            batch: A few rows, on the device.
        """
        if self.is_alone:
            return self._objectives(batch) if self.objective is not None else {}
        with torch.no_grad():
            self.network.load_state_dict(self.live.state_dict(), strict=False)
        self.network.train()
        found = self._forward(batch)
        apart = max(found.values()) if found else 0.0
        if apart > APART:
            found |= self._place(batch, found["doctor/forward_apart_evaluating"] > APART)
            seen = visibility(self.live, batch)
            found |= {name.replace("doctor/", "doctor/now_"): value for name, value in seen.items()}
        elif self.objective is not None:
            found |= self._backward(batch)
        if self.objective is not None:
            found |= self._objectives(batch)
        usual = inner_state(self.network, batch)
        usual |= backward_gains(self.network, batch)
        own = inner_state(self.live, batch) | backward_gains(self.live, batch)
        for prefix, values in (("usual", usual), ("own", own)):
            found |= {name.replace("doctor/", f"doctor/{prefix}_"): value for name, value in values.items()}
        return found

    def _forward(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns how far logits are apart, in training and in evaluation."""
        found = dict[str, float]()
        with torch.no_grad():
            for name in ("forward_apart", "forward_apart_evaluating"):
                logits = []
                for network in (self.live, self.network):
                    seed_generators(SEED, self.device)
                    if name == "forward_apart":
                        logits.append(network.logits(network(batch)).float())
                    else:
                        with evaluating(network):
                            logits.append(network.logits(network(batch)).float())
                found[f"doctor/{name}"] = _apart(*logits)
        return found

    def _place(self, batch: Mapping[str, Tensor], evaluates: bool) -> dict[str, float]:
        """Returns the kind of the first part that differs, and how large its output is beside leyden's."""
        own = dict(self.network.named_modules())
        calls: list[tuple[str, Any, Any, Any]] = []
        with torch.no_grad(), _Calls(self.live, calls):
            if evaluates:
                with evaluating(self.live):
                    self.live.logits(self.live(batch))
            else:
                self.live.logits(self.live(batch))
        different: dict[str, float] = {}
        with torch.no_grad():
            for name, args, kwargs, output in calls:
                if name in own and name not in different:
                    with evaluating(own[name]) if evaluates else nullcontext():
                        seed_generators(SEED, self.device)
                        expected = own[name](*args, **kwargs)
                    if _apart(_values(output), _values(expected)) > APART:
                        different[name] = float(
                            _values(output).norm() / _values(expected).norm().clamp(min=1e-30)
                        )
        found = self._reaches(own, calls)
        inmost = [n for n in different if not any(other.startswith(f"{n}.") for other in different)]
        if not inmost:
            return found | {"doctor/part_kind": 0.0, "doctor/part_size": 1.0}
        return found | {
            "doctor/part_kind": float(KINDS.index(self._kind(inmost[0]))),
            "doctor/part_size": different[inmost[0]],
        }

    def _reaches(self, own: Mapping[str, nn.Module], calls: Sequence[Any]) -> dict[str, float]:
        """Returns over how many tokens attention reaches, as its gradient shows it: of the block where that is least."""
        kinds = self.network.parts_by_kind() if isinstance(self.network, NamesParts) else {}
        wanted = {id(module) for module in kinds.get("attention", ())}
        live, pairs = dict(self.live.named_modules()), []
        for name, args, kwargs, _ in calls:
            if name in own and id(own[name]) in wanted and isinstance(args[0], Tensor):
                with evaluating(live[name]), evaluating(own[name]):
                    pairs.append([_reach(one[name], args, kwargs) for one in (live, own)])
        if not pairs:
            return {}
        pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
        if not pairs:
            return {}
        least = min(pairs, key=lambda pair: pair[0] / max(pair[1], 1e-9))
        return {"doctor/own_reach": least[0], "doctor/usual_reach": least[1]}

    def _kind(self, name: str) -> str:
        network = self.network
        if (
            isinstance(network.get_submodule(name), nn.Linear)
            and network.output_weight is not network.get_submodule(name).weight
        ):
            return "matrix"
        kinds = dict(network.parts_by_kind()) if isinstance(network, NamesParts) else {}
        if isinstance(network, RoutesTokens):
            kinds["router"] = network.routers
        modules = dict(network.named_modules())
        while name:
            for kind in ("router", "norm", "attention", "mlp", "embedding", "head"):
                if any(modules[name] is one for one in kinds.get(kind, ())):
                    return kind
            if any(modules[name] is block for block in network.blocks):
                return "block"
            name = name.rpartition(".")[0]
        return "network"

    def _parameters(self, network: Any) -> list[nn.Parameter]:
        """Returns the parameters of a network that leyden's has, too."""
        names = {name for name, _ in self.network.named_parameters()}
        return [p for name, p in network.named_parameters() if name in names]

    def _gradients(self, network: Any, objective: Any, batch: Mapping[str, Tensor]) -> list[Tensor]:
        seed_generators(SEED, self.device)
        with torch.enable_grad(), kept_buffers(network):  # such as vectors of spectral norms
            parameters = self._parameters(network)
            for p in parameters:
                p.requires_grad_(p.requires_grad or (network is self.network and not self.is_alone))
            loss, _ = objective.loss(network, batch)
            wanted = [p for p in parameters if p.requires_grad]
            mean = loss.total / loss.weight.clamp(min=1)
            found = iter(torch.autograd.grad(mean, wanted, allow_unused=True)) if mean.requires_grad else None
        if found is None:
            return [torch.zeros_like(p) for p in parameters]
        taken = [next(found) if p.requires_grad else None for p in parameters]
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, taken, strict=True)]

    def _backward(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns how the backward pass of the network differs, of leyden's objective: over its tensors.

        `backward_lost` is the share of the weights in tensors that get no gradient, `backward_holes` that of zeros in others, and
        `backward_single` that of zeros in rows that have others; `backward_single_size`: how large these should be beside the rest;
        `backward_coarse`: the share of values with few digits.
        """
        pair = [self._gradients(network, self.objective, batch) for network in (self.live, self.network)]
        trained = [p.requires_grad for p in self._parameters(self.live)]
        both = [(a, b) for a, b, is_trained in zip(*pair, trained, strict=True) if is_trained]
        whole = torch.stack([b.norm() for _, b in both]).norm() if both else torch.zeros(())
        large = [(a, b, float(a.norm() / b.norm())) for a, b in both if b.norm() > 1e-4 * whole]
        kept = [(a, b, ratio) for a, b, ratio in large if ratio > 0]
        cosines = [float((a * b).sum() / a.norm() / b.norm()) for a, b, _ in kept]
        size = sum(b.numel() for _, b, _ in large)
        holes = sum(int(((a == 0) & (b != 0)).sum()) for a, b, _ in kept)
        single = [((a == 0) & (b != 0) & a.any(-1, keepdim=True), b.abs()) for a, b, _ in kept]
        sizes = [float(b[zeros].mean() / b.mean()) for zeros, b in single if bool(zeros.any())]
        return {
            "doctor/backward_single": sum(int(zeros.sum()) for zeros, _ in single)
            / max(sum(b.numel() for _, b, _ in kept), 1),
            "doctor/backward_single_size": statistics.median(sizes) if sizes else 1.0,
            "doctor/backward_coarse": statistics.median([few_digits(a) for a, _, _ in kept]) if kept else 0.0,
            "doctor/backward_apart": max((_apart(a, b) for a, b, _ in large), default=0.0),
            "doctor/backward_least": min((ratio for *_, ratio in kept), default=1.0),
            "doctor/backward_most": max((ratio for *_, ratio in kept), default=1.0),
            "doctor/backward_cosine": min(cosines, default=1.0),
            "doctor/backward_holes": holes / max(sum(b.numel() for _, b, _ in kept), 1),
            "doctor/backward_lost": sum(b.numel() for _, b, r in large if r == 0) / max(size, 1),
        }

    def _objectives(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns how the objective differs, on leyden's network.

        The factor between gradients, and the share that it does not explain. If there is such a rest: how much gradients of
        routers differ; how straight the rest pushes logits up (below 0, at most -1); how many tokens have a loss, and which share of
        the labels that it takes are the next tokens, or tokens at another distance, as its gradient shows them.
        """
        pair = [self._gradients(self.network, one, batch) for one in (self.own_objective, self.objective)]
        given, own = (torch.cat([one.flatten() for one in each]).double() for each in pair)
        factor = float((given @ own) / (own @ own).clamp(min=1e-300))
        rest = float((given - factor * own).norm() / given.norm().clamp(min=1e-300))
        found = {"doctor/objective_factor": factor, "doctor/objective_rest": rest}
        found["doctor/objective_supposed"] = float(self.is_supposed)
        if rest > APART:
            routers = (
                [id(r.weight) for r in self.network.routers] if isinstance(self.network, RoutesTokens) else []
            )
            of_routers = [
                (a - b).norm() / b.norm().clamp(min=1e-30)
                for a, b, p in zip(*pair, self.network.parameters(), strict=True)
                if id(p) in routers
            ]
            found["doctor/objective_of_weights"] = of_weights(pair[0], pair[1], [*self.network.parameters()])
            found["doctor/objective_routers"] = float(torch.stack(of_routers).max()) if of_routers else 0.0
            found |= self._on_logits(batch, factor)
        return found

    def _on_logits(self, batch: Mapping[str, Tensor], factor: float) -> dict[str, float]:
        slopes, hidden, lengths = [], [], []
        for objective in (self.own_objective, self.objective):
            scale, kept = torch.ones((), device=self.device, requires_grad=True), list[Tensor]()

            def scaled(
                module: Any, inputs: Any, x: Tensor, scale: Tensor = scale, kept: Any = kept
            ) -> Tensor:
                kept.append(x * scale)
                return kept[-1]

            handle = self.network.register_forward_hook(scaled)
            try:
                seed_generators(SEED, self.device)
                with torch.enable_grad(), kept_buffers(self.network):
                    loss, _ = objective.loss(self.network, batch)
                    mean = loss.total / loss.weight.clamp(min=1)
                if not kept or not mean.requires_grad:  # it takes other ways through the network
                    return {}
                slope, *gradients = torch.autograd.grad(mean, (scale, *kept), allow_unused=True)
            finally:
                handle.remove()
            taken = [one.float() for one in gradients if one is not None]
            if not taken or any(one.shape[:2] != batch["labels"].shape for one in taken):
                return {}
            slopes.append(float(slope))
            hidden.append(torch.stack(taken).sum(0))
            lengths.append(float(kept[0].detach().float().norm()))
        most = float((hidden[0] - factor * hidden[1]).norm()) * lengths[0]
        found = {"doctor/objective_slope": (slopes[0] - factor * slopes[1]) / max(most, 1e-30)}
        weight = self.network.output_weight
        if weight is not None and hidden[0].shape[-1] == weight.shape[-1]:
            chosen = hidden[0].norm(dim=-1) > 1e-6 * hidden[0].norm(dim=-1).max()
            scores = -(hidden[0] @ weight.detach().float().T)
            labels = torch.where(chosen, scores.argmax(-1), IGNORED_LABEL)
            implied: Any = {**batch, "labels": labels}
            counts = figures_of(label_counts([implied]))
            found["doctor/objective_next"] = counts.get("doctor/labels_next", 0.0)
            found["doctor/objective_elsewhere"] = counts.get("doctor/labels_elsewhere", 0.0)
            found["doctor/objective_labelled"] = float(
                chosen.sum() / (batch["labels"] != IGNORED_LABEL).sum()
            )
        return found


class _Calls:
    """Notes what each module is given and returns; random numbers begin anew with each, as they do where it is repeated."""

    def __init__(self, network: nn.Module, calls: list[tuple[str, Any, Any, Any]]) -> None:
        self.network, self.calls = network, calls
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        device = next(self.network.parameters()).device
        for name, module in self.network.named_modules():
            if not name:
                continue
            given: list[Any] = []

            def enter(_: Any, args: Any, kwargs: Any, given: list[Any] = given) -> None:
                given.append(tree_map(_kept, (args, kwargs)))
                seed_generators(SEED, device)

            def leave(_: Any, __: Any, output: Any, name: str = name, given: list[Any] = given) -> None:
                self.calls.append((name, *given.pop(), tree_map(_kept, output)))

            self.handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self.handles.append(module.register_forward_hook(leave))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _reach(module: nn.Module, args: Any, kwargs: Any) -> float:
    """Returns the entropy of how much outputs depend on each token before them, over that of equal dependence; NaN: on none."""
    x = args[0].detach().requires_grad_(True)
    with torch.enable_grad():
        output = module(x, *args[1:], **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        direction = torch.linspace(-1, 1, output.shape[-1], device=x.device, dtype=output.dtype)
        found = []
        for place in {x.shape[1] - 1, x.shape[1] // 2}:
            [gradient] = torch.autograd.grad((output[:, place] * direction).sum(), x, retain_graph=True)
            share = gradient[:, : place + 1].float().norm(dim=-1)
            if not bool(share.any()):
                return math.nan
            share = share / share.sum(-1, keepdim=True).clamp(min=1e-30)
            entropy = -torch.xlogy(share, share).sum(-1)
            found.append(float(entropy.mean()) / max(math.log(place + 1), 1e-9))
    return sum(found) / len(found)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _values(output: Any) -> Tensor:
    found: Sequence[Tensor] = [
        leaf.flatten().float() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)
    ]
    return torch.cat(list(found)) if found else torch.zeros(1)


def _apart(one: Tensor, other: Tensor) -> float:
    """Returns the norm of the difference over that of the second."""
    if one.shape != other.shape:
        return 1.0
    return float((one - other).norm() / other.norm().clamp(min=1e-30))
