"""AdamW with 8-bit moments whose step a compiler makes, sharded over ranks like the weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from core.technique import Package, technique
from core.training.shards import local_tensors
from plugins.optimizers.block_shards import BLOCK, has_blocks, own_scales, own_values, scales_of
from plugins.optimizers.libraries import library, not_with_lightnings
from plugins.optimizers.own_shards import StepsOwnShards, own_shard

_states = library("torchao.optim.subclass_8bit", "torchao")
OptimState8bit, get_qmap_signed = _states.OptimState8bit, _states.get_qmap_signed
get_qmap_unsigned = _states.get_qmap_unsigned
MOMENTS = ("exp_avg", "exp_avg_sq")


@technique(
    paper="8-bit optimizers via block-wise quantization, arXiv:2110.02861; torchao",
    needs=(Package("torchao>=0.18", extra="torchao"),),
    conflicts=not_with_lightnings("its moments are in blocks that only our strategies' checkpoints have"),
)
class TorchaoAdamW8bit(StepsOwnShards, library("torchao.optim", "torchao").AdamW8bit):  # type: ignore[misc]
    """AdamW whose two moments are stored in 8 bits each, in blocks of 256 with one scale each.

    State: about 2 bytes per parameter of a tensor of at least 4,096 elements, a multiple of 256; 8 bytes in other tensors.
    Of sharded weights each rank steps its shard, with the same blocks; where shards are not made of whole blocks (rows of
    all ranks alike, a multiple of 256 elements on each; never the columns that tensor parallelism cuts), 8 bytes. A run can
    resume on another number of ranks.

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

    def _new_buffer(self, p: Any, signed: bool) -> Any:
        """Returns 8-bit zeros if the blocks are those of a single process, else zeros like `p`."""
        return (
            self._subclass_zeros(p, signed, BLOCK)
            if has_blocks(getattr(p, "shard_of", p))
            else torch.zeros_like(p)
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict with codes (shaped as the parameter) and scales (one per block) as plain tensors."""
        found = super().state_dict()
        return {
            **found,
            "state": self.sharded_states({key: _flat(own) for key, own in found["state"].items()}),
        }

    def with_mesh(self, name: str, value: Any, parameter: Any) -> Any:
        """Returns a value of the state of this rank's shard, as a DTensor if it is one per element or block."""
        return (
            scales_of(value, parameter)
            if name.endswith("_scales")
            else super().with_mesh(name, value, parameter)
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned on any number of ranks."""
        parameters = self.all_parameters()
        state = {key: self._joined(own, parameters[key]) for key, own in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})

    def _joined(self, own: dict[str, Any], parameter: Any) -> dict[str, Any]:
        found = {"step": own["step"]}
        shard = own_shard(parameter)
        for name in MOMENTS:
            signed = name == "exp_avg"
            found[name] = room = self._new_buffer(shard, signed)
            if name in own:
                room.copy_(_local(own[name]))
                continue
            codes, scales = _local(own[f"{name}_codes"]), _local(own[f"{name}_scales"])
            if isinstance(room, OptimState8bit):
                room.codes.copy_(codes)
                room.scale.copy_(own_scales(scales, parameter))
            else:
                qmap = torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned())
                room.copy_(own_values(codes, scales, qmap, parameter))
        return found


def _flat(own: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in own.items():
        if isinstance(value, OptimState8bit):
            found |= {f"{name}_codes": value.codes, f"{name}_scales": value.scale}
        else:
            found[name] = value
    return found


def _local(value: Tensor) -> Tensor:
    return local_tensors([value])[0]
