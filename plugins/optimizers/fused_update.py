"""Optimizers whose update of one tensor is a function, of which torch.compile makes one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.training.shards import local_tensors
from toolkit.shards import gradient_like

Function = Callable[..., Any]


class FusesUpdate:
    """Once `compile_update` was called, steps tensor by tensor with a compiled function; until then as its library does.

    For optimizers that treat every weight by itself: tensors are flat in that function, so that one graph serves all, and of
    sharded ones it is given the shards. Its arithmetic is in float32 where weights are stored in two bytes. A class says
    what changes from step to step in `begin`, and the formula in `update`.

    Attributes:
        written: Names in a parameter's state of the tensors that `update` is given and returns.
    """

    written: tuple[str, ...]
    _fused: Callable[..., None] | None = None

    def begin(self, group: dict[str, Any], parameters: Iterable[Tensor]) -> Sequence[float]:
        """Begins the step of a group: counts it, adds state that is missing, and returns the numbers for `update`."""
        raise NotImplementedError

    @staticmethod
    def update(
        numbers: Sequence[Tensor], gradient: Tensor, parameter: Tensor, *state: Tensor
    ) -> Sequence[Tensor]:
        """Returns the new values of a parameter and of its state; numbers are 0-d."""
        raise NotImplementedError

    def compile_update(self, compiled: Callable[[Function], Function]) -> None:
        """See `toolkit.updates.CompilesUpdate`."""
        update = type(self).update

        def fused(numbers: Tensor, gradient: Tensor, *written: Tensor) -> None:
            wide = [tensor.to(numbers.dtype) for tensor in (gradient, *written)]
            for tensor, value in zip(written, update(numbers.unbind(), *wide), strict=True):
                tensor.copy_(value)

        self._fused = compiled(fused)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Performs a step."""
        if self._fused is None:
            return super().step(closure)  # type: ignore[misc]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:  # type: ignore[attr-defined]
            self._step_group(group, self._fused)
        return loss

    def _step_group(self, group: dict[str, Any], fused: Callable[..., None]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        values, numbers = self.begin(group, parameters), dict[Any, Tensor]()
        for parameter in parameters:
            state = self.state[parameter]  # type: ignore[attr-defined]
            tensors = local_tensors(
                [gradient_like(parameter), parameter, *(state[name] for name in self.written)]
            )
            if not tensors[0].numel():  # this rank has no row of it
                continue
            if all(tensor.is_contiguous() for tensor in tensors):
                tensors = [tensor.view(-1) for tensor in tensors]
            tensors = [
                tensor.data for tensor in tensors
            ]  # no views: a graph would depend on the shapes of their bases
            kind = tensors[1].device, torch.promote_types(tensors[1].dtype, torch.float32)
            if kind not in numbers:
                numbers[kind] = _placed(torch.tensor(values, dtype=kind[1]), kind[0])
            fused(numbers[kind], *tensors)


def _placed(numbers: Tensor, device: torch.device) -> Tensor:
    """Returns numbers on a device, without waiting for it: an argument that is a tensor needs no graph for each value."""
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
