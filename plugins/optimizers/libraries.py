"""Helpers for optimizers of optional packages: imports, conflicts, state dicts."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from core.errors import ConfigError


def library(name: str, extra: str = "optimizers") -> Any:
    """Imports an optional package, or a module of it.

    Args:
        name: The module.
        extra: The extra of leyden that installs it, for the message.

    Raises:
        ConfigError: If it is not installed, with the pip command.
    """
    # bitsandbytes warns that kernels for 4-bit weights are missing, which no optimizer uses.
    logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ConfigError(f"{package} is not installed: pip install 'leyden[{extra}]'") from error


def not_with_lightnings(why: str) -> dict[str, str]:
    """Returns the conflicts of an optimizer with Lightning's strategies that shard weights."""
    return dict.fromkeys(("ModelParallelStrategy", "FSDPStrategy"), f"{why}: take FSDP or HybridParallel")


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state dict with nested mappings in a parameter's state flattened.

    bitsandbytes nests quantised tensors to hide them from FSDP. Its `load_state_dict` takes both forms.
    """
    state = {}
    for key, own in state_dict["state"].items():
        plain = {name: value for name, value in own.items() if not isinstance(value, dict)}
        hidden = [value for value in own.values() if isinstance(value, dict)]
        state[key] = {name: value for part in (plain, *hidden) for name, value in part.items()}
    return {**state_dict, "state": state}
