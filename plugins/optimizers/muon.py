"""Muon for the matrices inside the network, AdamW for the rest, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from core.technique import technique
from core.training.parameter_groups import hidden_matrices
from core.training.shards import is_spread, whole


@technique(
    paper="Muon, Jordan et al. 2024 (kellerjordan.github.io/posts/muon); scaled as in Moonlight, arXiv:2502.16982, 2.2",
)
class Muon(Optimizer):
    """Orthogonalises the momentum of each hidden matrix; embeddings, head, norms and biases get AdamW.

    Hidden matrices are the 2-dimensional weights of the network's blocks. Their update is scaled to a root
    mean square of about 0.2 times the learning rate, that of a usual AdamW update: one rate and one decay do
    for both. State: 4 bytes per float32 parameter of a hidden matrix, 8 of the others.

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate, of both.
        momentum: Decay rate of the matrices' momentum, taken ahead as Nesterov's.
        ns_steps: Newton-Schulz iterations, in bfloat16.
        betas: AdamW's decay rates of the first and the second moment.
        eps: AdamW's.
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
        shared = {"lr": lr, "weight_decay": weight_decay}
        own = {"momentum": momentum, "ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"}
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(_Matrices(matrices, **shared, **own))
        if rest:
            self._parts.append(torch.optim.AdamW(rest, **shared, betas=tuple(betas), eps=eps, fused=True))
        super().__init__([group for part in self._parts for group in part.param_groups], shared)
        self._share()

    def _share(self) -> None:
        """Lets both parts step this optimizer's groups, with this optimizer's state."""
        first = 0
        for part in self._parts:
            part.state = self.state
            part.param_groups = self.param_groups[first : first + len(part.param_groups)]
            first += len(part.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a saved state, flat as every optimizer's."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> Any:
        """Steps both parts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


class _Matrices(torch.optim.Muon):
    """Orthogonalises a matrix that is spread over ranks as a whole, one at a time, on each of them.

    torch's own sends a message for each of 15 products, and adds up parts of them in bfloat16: five iterations
    make a rounding up to 480 times larger, and weights were 0.5% off one process's after three steps.
    """

    def _init_group(self, group: Any, *lists: Any) -> bool:
        """Steps the spread matrices, and leaves the others to torch."""
        super()._init_group(group, *lists)
        for parameter, gradient, momentum in zip(*lists, strict=True):
            if is_spread([parameter]):
                _step_spread(group, parameter, gradient, momentum)
        rest = [index for index, parameter in enumerate(lists[0]) if not is_spread([parameter])]
        for tensors in lists:
            tensors[:] = [tensors[index] for index in rest]
        return False  # none is complex


def _step_spread(group: dict[str, Any], parameter: Any, gradient: Tensor, momentum: Tensor) -> None:
    from torch.distributed.tensor import distribute_tensor
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

    momentum.lerp_(gradient, 1 - group["momentum"])
    ahead = whole(gradient.lerp(momentum, group["momentum"]))
    update = _zeropower_via_newtonschulz(ahead, group["ns_coefficients"], group["ns_steps"], group["eps"])
    own = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(own, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape))


def _split(params: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns groups of hidden matrices and groups of all else, each with its settings."""
    groups = list(params)
    groups = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
    named = [[p if isinstance(p, tuple) else (None, p) for p in group["params"]] for group in groups]
    marked = {id(p) for p in hidden_matrices([p for own in named for _, p in own])}
    parts: list[list[dict[str, Any]]] = []
    for wanted in (True, False):
        found = []
        for group, own in zip(groups, named, strict=True):
            chosen = [(n, p) if n else p for n, p in own if (id(p) in marked) is wanted]
            found.append({**group, "params": chosen})
        parts.append([group for group in found if group["params"]])
    return parts[0], parts[1]
