"""Adafactor: second moments factored into rows and columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.technique import technique
from core.training.shards import full_tensor, local_tensors, total_norm
from toolkit.shards import gradient_like, is_sharded


@technique(paper="Adafactor, arXiv:1804.04235, algorithms 4 and 5; torch.optim.Adafactor")
class Adafactor(torch.optim.Adafactor):
    """Adam without first moments; the second moments of a matrix take one number per row and one per column.

    State: about 0.01 bytes per float32 parameter. The step is `lr` or, if that is less, 1/sqrt(step), times
    the root mean square of the weights. The weight decay is decoupled. torch's implementation reads two norms of
    each tensor on the host: every step waits for the device.

    Of weights that are sharded over ranks, each rank has all row and column means, and computes the update of its
    shard. Means and norms are reduced over the ranks: for an (m, n) matrix m + n + 2 numbers.

    Args:
        params: Parameters or parameter groups.
        lr: Largest step, relative to the root mean square of the weights.
        beta2_decay: The second moments' decay rate in step t is 1 - t to this power.
        d: Updates are scaled down to a root mean square of at most this.
        weight_decay: Decoupled decay per step, times the learning rate.

    Example:
        model:
          optimizer:
            class_path: Adafactor
            init_args: {lr: 0.02}
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        beta2_decay: float = -0.8,
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, beta2_decay=beta2_decay, d=d, weight_decay=weight_decay)

    def _init_group(self, group: Any, *lists: Any) -> bool:
        """Steps the sharded parameters, and leaves the others to torch."""
        sharded = [p for p in group["params"] if p.grad is not None and is_sharded([p])]
        for parameter in sharded:
            _step_sharded(group, parameter, gradient_like(parameter), self.state[parameter])
        kept = {id(parameter) for parameter in sharded}
        rest = {**group, "params": [p for p in group["params"] if id(p) not in kept]}
        return bool(super()._init_group(rest, *lists))


def _step_sharded(group: dict[str, Any], parameter: Any, gradient: Any, state: dict[str, Any]) -> None:
    """Does what torch's `_single_tensor_adafactor` does, on this rank's shard; called on every rank."""
    if not state:
        state["step"] = torch.tensor(0.0)
        if gradient.ndim > 1:
            rows, columns = (*gradient.shape[:-1], 1), (*gradient.shape[:-2], 1, gradient.shape[-1])
            own = local_tensors([gradient])[0]
            state["row_var"], state["col_var"] = own.new_zeros(rows), own.new_zeros(columns)
        else:
            state["variance"] = torch.zeros_like(gradient)
    eps, least = group["eps"]
    eps = torch.finfo(parameter.dtype).eps if eps is None else eps
    state["step"] += 1
    step, rate = float(state["step"]), float(group["lr"])
    fresh, size = step ** group["beta2_decay"], parameter.numel() ** 0.5
    alpha = max(least, total_norm([parameter]).item() / size) * min(rate, step**-0.5)
    parameter.mul_(1 - rate * group["weight_decay"])
    update = _estimate(gradient, state, fresh, eps).clamp_(min=eps * eps).rsqrt_().mul_(gradient)
    parameter.add_(update, alpha=-alpha / max(1.0, total_norm([update]).item() / (size * group["d"])))


def _estimate(gradient: Any, state: dict[str, Any], fresh: float, eps: float) -> Any:
    """Returns the second moments, sharded as the gradient."""
    from torch.distributed.tensor import DTensor

    if gradient.ndim == 1:
        return state["variance"].lerp_(gradient.square(), fresh).clone()
    for name, dim in (("row_var", -1), ("col_var", -2)):
        norms = full_tensor(torch.linalg.vector_norm(gradient, dim=dim, keepdim=True))
        state[name].lerp_(norms.square_().div_(gradient.shape[dim]), fresh)
    rows, columns = state["row_var"], state["col_var"]
    own = _cut(rows, gradient) @ _cut(columns, gradient)
    own /= _cut(rows.mean(dim=-2, keepdim=True).clamp_(min=eps), gradient)
    shape, stride = gradient.shape, gradient.stride()
    return DTensor.from_local(
        own, gradient.device_mesh, gradient.placements, run_check=False, shape=shape, stride=stride
    )


def _cut(full: Tensor, like: Any) -> Tensor:
    """Returns the part of a full tensor that broadcasts with this rank's shard of `like`."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (size, start) in enumerate(zip(sizes, offsets, strict=True)):
        if full.shape[dim] == like.shape[dim]:
            full = full.narrow(dim, start if size else 0, size)
    return full
