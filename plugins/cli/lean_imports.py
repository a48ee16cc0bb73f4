"""Imports of Lightning without what no run needs: torchmetrics as a package that loads itself when it is used."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from typing import Any

PARTS = {
    "Metric": "torchmetrics.metric",
    "MetricCollection": "torchmetrics.collections",
    "__version__": "torchmetrics.__about__",
}
"""Names of torchmetrics that Lightning imports -> the module that defines them."""


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
