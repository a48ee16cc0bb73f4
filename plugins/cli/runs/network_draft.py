"""The network of a run without its weights: checked before the run starts, given its weights once it has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch.overrides import TorchFunctionMode

from core.contracts import ChangesNetwork, Network


class NetworkDraft:
    """Builds a network on the meta device, and gives it its weights when it is called for.

    In the place of `LanguageModule.build_network`. The first call, in `configure_model`, returns the network that was
    checked; later calls build others. The network is built again on the first call if

    - its class does not set `deferred_init`: a constructor draws random numbers on a real device and none on the meta
      device, so the weights of a seed would be others;
    - the precision or a callback changes it: they were tried on this one, and some need its weights;
    - the precision or the strategy takes part in how modules are constructed, such as Lightning's `bf16-true`.

    Args:
        build: Builds the network.
        trainer: The trainer of the run.

    Attributes:
        network: The network on the meta device; None once it has its weights or is not needed any more.
    """

    def __init__(self, build: Callable[[], Network], trainer: Trainer) -> None:
        self._build = build
        with torch.device("meta"), _Unfilled():
            self.network: Network | None = build()
        declares = vars(type(self.network)).get("deferred_init", False)  # not inherited
        self._is_final = declares and not _takes_part(trainer)

    def __call__(self) -> Network:
        """Returns the network, on the default device."""
        network, self.network = self.network, None
        if network is None or not self._is_final:
            return self._build()
        device = torch.get_default_device()
        if device.type != "meta":
            with _Empty():
                network.to_empty(device=device)
            network.init_weights()
        return network


class _Unfilled(TorchFunctionMode):
    """Leaves out `torch.nn.init`: there is nothing to fill, and on the meta device torch loads its compiler to do so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


class _Empty(TorchFunctionMode):
    """Allocates for a contiguous tensor by its size: to find the strides of one on the meta device torch loads sympy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # as `to_empty` calls it: a network's own method may ask for more, such as a memory format
        if func is not torch.empty_like or len(args) != 1 or set(kwargs) != {"device"}:
            return func(*args, **kwargs)
        [like] = args
        if type(like) not in (torch.Tensor, torch.nn.Parameter) or not like.is_contiguous():
            return func(*args, **kwargs)
        return torch.empty(like.size(), dtype=like.dtype, **kwargs)


def _takes_part(trainer: Trainer) -> bool:
    """Returns whether the run constructs or changes the network in another way than its class does."""
    parts = (trainer.precision_plugin, *trainer.callbacks)  # type: ignore[attr-defined]
    return (
        any(isinstance(part, ChangesNetwork) for part in parts)
        or not isinstance(trainer.precision_plugin.module_init_context(), nullcontext)
        or type(trainer.strategy).model_sharded_context is not Strategy.model_sharded_context
    )
