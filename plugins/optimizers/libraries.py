"""Optimizers of packages that are extras of leyden, and what some cannot do."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from core.errors import ConfigError


def library(name: str, extra: str = "optimizers") -> Any:
    """Imports an optional package, or a module of it, which an extra of leyden's installs.

    Raises:
        ConfigError: If it is not installed; with the pip line.
    """
    logging.getLogger(name).setLevel(
        logging.ERROR
    )  # bitsandbytes warns of 4-bit kernels, which are not wanted
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ConfigError(f"{package} is not installed: pip install 'leyden[{extra}]'") from error


def not_on_shards(why: str, instead: str) -> dict[str, str]:
    """Returns the conflicts of an optimizer that cannot step sharded weights (DTensors)."""
    reason = f"{why}: take {instead} with sharded weights"
    return dict.fromkeys(("ModelParallelStrategy", "FSDP", "HybridParallel", "FSDPStrategy"), reason)


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state with what lies in mappings of a parameter's state beside the rest of it.

    bitsandbytes hides quantised tensors from FSDP in that way; its `load_state_dict` takes both forms.
    """
    state = {}
    for key, own in state_dict["state"].items():
        plain = {name: value for name, value in own.items() if not isinstance(value, dict)}
        hidden = [value for value in own.values() if isinstance(value, dict)]
        state[key] = {name: value for part in (plain, *hidden) for name, value in part.items()}
    return {**state_dict, "state": state}
