"""Muon for the matrices inside the network, AdamW for the rest, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from core.technique import technique
from core.training.shards import local_tensors
from plugins.optimizers.half_precision import ChecksEps
from plugins.optimizers.matrix_owners import compute_whole
from toolkit.shards import is_sharded


@technique(
    paper="Muon, Jordan et al. 2024 (kellerjordan.github.io/posts/muon); scaled as in Moonlight, arXiv:2502.16982, 2.2",
)
class Muon(ChecksEps, Optimizer):
    """Orthogonalises the momentum of each hidden matrix; embeddings, head, norms and biases get AdamW.

    Hidden matrices are the 2-dimensional weights of the network's blocks. Their update is scaled to a root
    mean square of about 0.2 times the learning rate, that of a usual AdamW update: one learning rate and one weight
    decay serve both. Of sharded matrices each rank orthogonalises its share, whole, and sends the shards back: n ranks compute
    what one process does, in 1/n of its time, also where tensor parallelism shards them as well and where replicas have the same
    shards. Under DDP, which keeps no record of who has copies, each rank orthogonalises all of them: FSDP with as many `replicas`
    as ranks keeps copies, too, and divides the work. State: 4 bytes per float32 parameter of a hidden matrix, 8 of the others.

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate, for Muon and AdamW.
        momentum: Decay rate of the matrices' momentum (Nesterov).
        ns_steps: Newton-Schulz iterations, in bfloat16.
        betas: AdamW's decay rates of the first and the second moment.
        eps: Added to the square root of AdamW's second moment.
        weight_decay: Decoupled decay per step, times the learning rate.

    Example:
        model:
          optimizer:
            class_path: Muon
            init_args: {lr: 6.0e-4, momentum: 0.95, weight_decay: 0.1}
    """

    def __init__(
        self,
        params: Any,
        lr: float = 6e-4,
        momentum: float = 0.95,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        matrices, rest = _split(params)
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        own: dict[str, Any] = {"momentum": momentum, "ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"}
        adam: dict[str, Any] = {"betas": tuple(betas), "eps": eps, "fused": True}
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(_Matrices(matrices, **shared, **own))
        if rest:
            self._parts.append(torch.optim.AdamW(rest, **shared, **adam))
        super().__init__([group for part in self._parts for group in part.param_groups], shared)
        self._share()

    def _share(self) -> None:
        """Makes both optimizers use this optimizer's parameter groups and state."""
        first = 0
        for part in self._parts:
            part.state = self.state
            part.param_groups = self.param_groups[first : first + len(part.param_groups)]
            first += len(part.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> Any:
        """Steps both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


class _Matrices(torch.optim.Muon):
    """torch's Muon; of matrices on a mesh of ranks, each rank orthogonalises its share, one at a time (arXiv:2502.16982, 2.3).

    On DTensors torch's own communicates for each of 15 products and sums partial products in bfloat16. Five
    iterations make the rounding error up to 480 times larger: after three steps weights differed by 0.5% from those
    of one process.
    """

    def _init_group(self, group: Any, *lists: Any) -> bool:
        """Steps the sharded matrices, and leaves the others to torch."""
        super()._init_group(group, *lists)
        _step_sharded(group, [found for found in zip(*lists, strict=True) if is_sharded([found[0]])])
        rest = [index for index, parameter in enumerate(lists[0]) if not is_sharded([parameter])]
        for tensors in lists:
            tensors[:] = [tensors[index] for index in rest]
        return False  # has_complex: none of the matrices is


def _step_sharded(group: dict[str, Any], found: list[tuple[Any, Any, Any]]) -> None:
    """Steps (parameter, gradient, momentum) of each sharded matrix; called on every rank."""
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

    def orthogonal(matrix: Tensor) -> Tensor:
        return _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

    ahead = []
    for parameter, gradient, momentum in found:
        gradient = gradient.redistribute(placements=parameter.placements)
        momentum.lerp_(gradient, 1 - group["momentum"])
        ahead.append(gradient.lerp(momentum, group["momentum"]))
    updates = compute_whole(ahead, orthogonal, torch.bfloat16)
    for (parameter, _, _), update in zip(found, updates, strict=True):
        [own] = local_tensors([parameter])
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape))


def _split(params: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the groups of hidden matrices and the groups of all other parameters, with their settings."""
    groups = list(params)
    groups = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
    named = [[p if isinstance(p, tuple) else (None, p) for p in group["params"]] for group in groups]
    marked = {id(p) for p in _hidden_matrices([p for own in named for _, p in own])}
    parts: list[list[dict[str, Any]]] = []
    for wanted in (True, False):
        found = []
        for group, own in zip(groups, named, strict=True):
            chosen = [(n, p) if n else p for n, p in own if (id(p) in marked) is wanted]
            found.append({**group, "params": chosen})
        parts.append([group for group in found if group["params"]])
    return parts[0], parts[1]


def _hidden_matrices(parameters: list[Tensor]) -> list[Tensor]:
    """Returns those that are marked as hidden matrices; where none of a model's is, all 2-dimensional ones."""
    marked = [parameter for parameter in parameters if hasattr(parameter, "hidden_matrix")]
    return marked or [parameter for parameter in parameters if parameter.ndim == 2]
