"""AdamW with 8-bit moments that are sharded over ranks like the weights."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from core.technique import Package, technique
from core.training.shards import local_tensors
from plugins.optimizers.libraries import library

_states = library("torchao.optim.subclass_8bit", "torchao")
OptimState8bit, get_qmap_signed = _states.OptimState8bit, _states.get_qmap_signed
get_qmap_unsigned = _states.get_qmap_unsigned
NO_BLOCKS = "moments are quantised in blocks of rows, which only FSDP keeps together: take AdamW8bit with sharded weights, or FSDP"
MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 256


@technique(
    paper="8-bit optimizers via block-wise quantization, arXiv:2110.02861; torchao",
    needs=(Package("torchao>=0.18", extra="torchao"),),
    conflicts=dict.fromkeys(("HybridParallel", "ModelParallelStrategy", "FSDPStrategy"), NO_BLOCKS),
)
class TorchaoAdamW8bit(library("torchao.optim", "torchao").AdamW8bit):  # type: ignore[misc]
    """AdamW whose two moments are stored in 8 bits each, also under `FSDP`, in blocks of 256 with one scale each.

    State: about 2 bytes per parameter of a tensor of which every rank has the same number of elements, at least
    4,096 and a multiple of 256; 8 bytes in other tensors. A run can resume on another number of ranks.

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled decay per step, times the learning rate.
        compiled: Whether to compile the step, which takes 15 to 42 s in the first one; None: on CUDA only.

    Example:
        model:
          optimizer:
            class_path: TorchaoAdamW8bit
            init_args: {lr: 6.0e-4, betas: [0.9, 0.95], weight_decay: 0.1}
    """

    def __init__(
        self,
        params: Any,
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        compiled: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, block_size=BLOCK
        )
        self.compiled = compiled

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its learning rate stays a float, as schedules set it."""
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = rate

    def step(self, closure: Any = None) -> Any:
        """Performs a step. torchao takes the learning rate as a tensor, and compiles unless compilation is disabled."""
        rates = [group["lr"] for group in self.param_groups]
        device = self.param_groups[0]["params"][0].device
        compiled = device.type == "cuda" if self.compiled is None else self.compiled
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate)
        with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
            loss = super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        return loss

    def _new_buffer(self, p: Tensor, signed: bool) -> Any:
        """Returns 8-bit zeros if the blocks are the same as in a single process, else zeros like `p`."""
        return super()._new_buffer(p, signed) if _even(p) else torch.zeros_like(p)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict with codes (shaped as the parameter) and scales (one per block) as plain tensors."""
        found = super().state_dict()
        return {**found, "state": {key: _flat(own) for key, own in found["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned on any number of ranks."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        state = {key: self._joined(own, parameters[key]) for key, own in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})

    def _joined(self, own: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        found = {"step": own["step"]}
        for name in MOMENTS:
            found[name] = self._new_buffer(parameter, signed=name == "exp_avg")
            room = _local(found[name])
            if name in own:
                room.copy_(_local(own[name]))
                continue
            codes, scales = _local(own[f"{name}_codes"]), _local(own[f"{name}_scales"])
            first = _first(parameter) if len(scales) * BLOCK == parameter.numel() else 0
            if isinstance(room, OptimState8bit):
                room.codes.copy_(codes)
                room.scale.copy_(scales[first // BLOCK :][: len(room.scale)])
            else:
                values = torch.tensor(get_qmap_signed() if name == "exp_avg" else get_qmap_unsigned())
                at = torch.arange(first, first + room.numel(), device=room.device) // BLOCK
                room.copy_(values.to(room.device)[codes.int()] * scales.to(room.device)[at].view_as(room))
        return found


def _flat(own: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in own.items():
        if isinstance(inner := _local(value), OptimState8bit):
            found[f"{name}_codes"] = _sharded_like(inner.codes, value, value.shape)
            found[f"{name}_scales"] = _sharded_like(inner.scale, value, torch.Size([value.numel() // BLOCK]))
        else:
            found[name] = value
    return found


def _local(value: Tensor) -> Tensor:
    return local_tensors([value])[0]


def _sharded_like(part: Tensor, like: Any, shape: torch.Size) -> Tensor:
    """Returns a DTensor of that shape, sharded as `like`; or `part` itself, if `like` is not sharded."""
    if not hasattr(like, "to_local"):
        return part
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def _even(parameter: Any) -> bool:
    """Returns whether all ranks have the same number of rows."""
    if not hasattr(parameter, "to_local"):
        return True
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return parameter.shape[0] % math.prod(size for place, size in sizes if not place.is_replicate()) == 0


def _first(parameter: Any) -> int:
    """Returns the index of this rank's first element in the flattened parameter."""
    if not hasattr(parameter, "to_local"):
        return 0
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[0] * math.prod(parameter.shape[1:])
