"""Imports of Lightning without what no run needs: torchmetrics, matplotlib, triton, boto3 and torch's compiler load when used."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PARTS = {
    "Metric": "torchmetrics.metric",
    "MetricCollection": "torchmetrics.collections",
    "__version__": "torchmetrics.__about__",
}
"""Names of torchmetrics that Lightning imports -> the module that defines them."""


class _AsLoaded(type):
    """The class of a class that has the instances of another, of a module that may not be loaded yet."""

    place: tuple[str, str]

    def __instancecheck__(cls, instance: Any) -> bool:
        module, name = cls.place
        found = getattr(sys.modules.get(module), name, None)
        return found is not None and isinstance(instance, found)


def _class(module: str, name: str) -> type:
    return _AsLoaded(name, (), {"place": (module, name), "__module__": module})


_CALLED_INSTEAD = "__dynamo_disable"
"""Where torch keeps what it calls in place of a function that its compiler is kept out of: loaded for that at the first call."""

_called_plainly: list[Any] = []
"""Functions that are called as they are until the compiler is loaded for something else."""


def _call_plainly(function: Any) -> None:
    setattr(function, _CALLED_INSTEAD, function)
    _called_plainly.append(function)


def _give_back_to_torch() -> None:
    """Lets torch keep its compiler, which is being loaded, out of these functions."""
    while _called_plainly:
        vars(_called_plainly.pop()).pop(_CALLED_INSTEAD, None)


def _disable(function: Any, recursive: bool = True, reason: str | None = None) -> Any:
    import torch

    _call_plainly(function)
    return torch._disable_dynamo(function, recursive)


def _function(module: str, name: str) -> Callable[..., Any]:
    def load(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return load


COMPILER, OPTIMIZER = "torch._dynamo", "torch.optim.optimizer"
PLOT, TRITON, S3 = "torchmetrics.utilities.plot", "triton.runtime.jit", "boto3"
_MODULE = {"OptimizedModule": _class(COMPILER, "OptimizedModule")}
_DRAWING = {
    "_AX_TYPE": _class("matplotlib.axes", "Axes"),
    "_PLOT_OUT_TYPE": tuple[Any, Any],
    "plot_single_or_multi_val": _function(PLOT, "plot_single_or_multi_val"),
}
STAND_INS: dict[str, tuple[str, dict[str, Any]]] = {
    "lightning.fabric.wrappers": (COMPILER, _MODULE),
    "lightning.pytorch.utilities.compile": (COMPILER, _MODULE),
    "lightning.pytorch.trainer.connectors.logger_connector.result": (COMPILER, {"disable": _disable}),
    "torchmetrics.metric": (PLOT, _DRAWING),
    "torchmetrics.collections": (PLOT, _DRAWING),
    "torch.utils.flop_counter": (TRITON, {"JITFunction": _class(TRITON, "JITFunction")}),
    "tensorboard.compat.tensorflow_stub.io.gfile": (S3, {}),
}
"""A module -> another one that it is imported without, and what stands for the names that it takes. matplotlib is in plots.

Without names it takes the stand-in itself, which loads the module as it is used.
"""

DECORATORS = ("disable",)
"""Names that are taken more than once."""


class _StandIn(ModuleType):
    """Is found in place of a module until the names that stand for others have been taken, and then no more."""

    def __init__(self, name: str, names: dict[str, Any]) -> None:
        super().__init__(name)
        self.left = dict(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in DECORATORS and name in self.left:
            return self.left[name]
        if name in self.left:
            value = self.left.pop(name)
            if not self.left:
                self.leave()
            return value
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def leave(self) -> None:
        """Lets the next import find the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _Finder:
    """Finds the modules of `STAND_INS` as always, and puts the stand-in there for the time of their import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == COMPILER:
            _give_back_to_torch()
        if name not in STAND_INS and name != OPTIMIZER:
            return None
        wrap = _executing_optimizers if name == OPTIMIZER else _executing_without
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader.exec_module = wrap(name, spec.loader.exec_module)  # type: ignore[assignment,method-assign]
        return spec


def _executing_without(name: str, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Returns what executes a module of `STAND_INS`."""
    absent, names = STAND_INS[name]

    def exec_module(module: ModuleType) -> None:
        # what is not installed, or what stands for it already, is for the module to find
        package = absent.partition(".")[0]
        replaced = package in sys.modules and getattr(sys.modules[package], "__spec__", None) is None
        if absent in sys.modules or replaced or not importlib.util.find_spec(package):
            return execute(module)
        stand_in = _StandIn(absent, names)
        sys.modules[absent] = stand_in
        try:
            execute(module)
        finally:
            stand_in.leave()

    return exec_module


def _executing_optimizers(_: str, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Returns what executes torch's module of the class Optimizer, whose methods then do not load the compiler."""

    def exec_module(module: Any) -> None:
        execute(module)
        for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
            function = getattr(getattr(module.Optimizer, name), "__wrapped__", None)
            if function is not None:
                _call_plainly(function)
        if hasattr(module, "_use_grad_for_differentiable"):
            module._use_grad_for_differentiable = _stepping(module._use_grad_for_differentiable)

    return exec_module


def _stepping(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's decorator of an optimizer's `step` without its import of the compiler, which only a traced step needs."""

    def decorate(step: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        traced = theirs(step)

        @functools.wraps(step)
        def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return traced(self, *args, **kwargs)
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return stepping

    return decorate


def defer_compiler_and_plots() -> None:
    """Lets Lightning and what it imports be imported without torch._dynamo, matplotlib, triton and boto3: a third of a start.

    Lightning asks whether a module was compiled, torchmetrics draws its metrics, torch's counter of FLOPs knows kernels of
    triton, TensorBoard writes to S3. Whoever imports them otherwise gets them. Optimizers step without the compiler, too.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


def defer_torchmetrics() -> None:
    """Lets Lightning import its two classes of torchmetrics without the 100 other metrics.

    With these come transformers and torchvision, wherever they are installed: a quarter of the time of a start. Any other
    name of torchmetrics loads the whole package into the same module, so that its users see no difference.
    """
    spec = None if "torchmetrics" in sys.modules else importlib.util.find_spec("torchmetrics")
    if spec is None or spec.loader is None:
        return
    package, loader = importlib.util.module_from_spec(spec), spec.loader

    def load(name: str) -> Any:
        if name == "__path__":  # asked for as the first part is imported
            package.__path__ = spec.submodule_search_locations or []
            # else it and torchmetrics.metric import each other in a circle
            importlib.import_module("torchmetrics.utilities")
            return package.__path__
        if name in PARTS:
            hasattr(package, "__path__")  # has been asked for once
            return getattr(importlib.import_module(PARTS[name]), name)
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        package.__dict__.pop("__getattr__", None)
        loader.exec_module(package)
        return getattr(package, name)

    package.__dict__.update(
        _logger=logging.getLogger("torchmetrics"), __getattr__=load
    )  # its parts import _logger
    del package.__path__
    sys.modules["torchmetrics"] = package
