"""Data types of weights that are gathered and of gradients that are reduced, where FSDP shards them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from plugins.strategies.shared_scaler import scales_losses

if TYPE_CHECKING:
    from toolkit.selection import Run

Format = Literal["fp32", "bf16", "fp16"]
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Formats:
    """In which data types weights are gathered and computed with, and gradients are reduced.

    Under the precision bf16-mixed FSDP gathers weights in bf16, and blocks compute in bf16 without autocast. Autocast would gather
    float32, keep a bf16 copy of each weight from forward to backward, and make norms return float32. What is sharded stays
    float32: the weights and gradients of the optimizer. So does, in bf16 too, what kernels and networks compute in float32
    themselves: statistics of norms, softmax, rotary positions, the choice of experts, the loss.

    Args:
        precision: Of the run.
        params: The option `param_format`; None: bf16 under bf16-mixed, else the data type of the parameters.
        reduced: The option `reduce_format`; None: the data type in which gradients are computed.

    Attributes:
        params: Data type in which weights are gathered; None: that of the parameters.
        reduced: Data type in which gradients are reduced; None: that of the parameters.
    """

    def __init__(self, precision: Precision, params: Format | None, reduced: Format | None) -> None:
        in_bf16 = isinstance(precision, MixedPrecision) and precision.precision == "bf16-mixed"
        self.params = FORMATS[params] if params else torch.bfloat16 if in_bf16 else None
        self.reduced = FORMATS[reduced] if reduced else self.params
        # A precision with layers of its own, such as Float8, asks autocast what to compute.
        self._disables_autocast = type(precision) is MixedPrecision and self.params is torch.bfloat16

    def policy(self, module: nn.Module) -> MixedPrecisionPolicy:
        """Returns torch's policy for a module that is sharded."""
        # Without a reduce_dtype torch takes param_dtype, or float32, by its version.
        reduced = self.reduced or next((p.dtype for p in module.parameters() if p.requires_grad), None)
        # Inputs are cast by `set_up`, not here: tables of rotary positions would lose too much in two bytes.
        return MixedPrecisionPolicy(self.params, reduced, cast_forward_inputs=False)

    def set_up(self, block: nn.Module) -> None:
        """Lets a block compute in the format, whatever its input is computed in."""
        if self.params is not None:
            cast = partial(_cast_hidden, self.params, _first_argument(block))
            block.register_forward_pre_hook(cast, with_kwargs=True)
        if self._disables_autocast:
            block.forward = partial(_without_autocast, block.forward)  # type: ignore[method-assign]


def _first_argument(block: nn.Module) -> str:
    """Returns the name of the hidden states, as the class has it: `forward` of the object may be wrapped."""
    return [*inspect.signature(type(block).forward).parameters][1]


def _cast_hidden(
    dtype: torch.dtype, name: str, block: nn.Module, inputs: tuple[Any, ...], more: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs:
        return (inputs[0].to(dtype), *inputs[1:]), more
    name = name if name in more else next(iter(more))  # a forward that takes anything
    return inputs, {**more, name: more[name].to(dtype)}


def _without_autocast(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    device = next(value for value in (*inputs, *more.values()) if isinstance(value, Tensor)).device
    with torch.autocast(device.type, enabled=False):
        return forward(*inputs, **more)


def compatibility_errors(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    """Yields an error if gradients are computed or sent in fp16 and not scaled; `given` are the strategy's arguments."""
    name = next((name for name in ("param_format", "reduce_format") if given.get(name) == "fp16"), None)
    if name is not None and not scales_losses(run):
        yield (
            f"{name} is fp16, in which small gradients become zero unless the loss is scaled: add "
            "--trainer.precision=16-mixed, or take bf16"
        )
