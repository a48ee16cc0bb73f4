"""Imports of Lightning without what no run needs: torchmetrics, matplotlib and torch's compiler load when they are used."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


def _disable(function: Any, recursive: bool = True, reason: str | None = None) -> Any:
    import torch

    # as torch does for its own functions: the compiler is loaded when they are called
    return torch._disable_dynamo(function, recursive)


def _function(module: str, name: str) -> Callable[..., Any]:
    def load(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return load


COMPILER, PLOT = "torch._dynamo", "torchmetrics.utilities.plot"
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
}
"""A module -> another one that it is imported without, and what stands for the names that it takes. matplotlib is in plots."""

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
        absent, names = STAND_INS.get(name, (name, {}))
        spec = None if not names or absent in sys.modules else PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            stand_in = _StandIn(absent, names)
            sys.modules[absent] = stand_in
            try:
                execute(module)
            finally:
                stand_in.leave()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def defer_compiler_and_plots() -> None:
    """Lets Lightning and torchmetrics be imported without torch._dynamo and matplotlib, a quarter of the time of a start.

    Lightning asks whether a module was compiled, torchmetrics draws its metrics. Whoever imports them otherwise gets them.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


@contextmanager
def optimizers_without_compiler() -> Iterator[None]:
    """Lets optimizers be built without torch._dynamo, which torch otherwise loads as the first one is: to keep it out of them."""
    from torch.optim import Optimizer

    plain: Any = getattr(Optimizer.add_param_group, "__wrapped__", None)
    known = "__dynamo_disable"  # where torch keeps what it calls instead, once it has made it
    if plain is None or hasattr(plain, known):
        yield
        return
    setattr(plain, known, plain)
    try:
        yield
    finally:
        delattr(plain, known)


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
