"""Compares the weights of a checkpoint with those of a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError

__all__ = ["EXTRA_STATE"]

EXTRA_STATE = "_extra_state"
"""Suffix of names in a `state_dict` that are no weights, but what a module's `get_extra_state` returned."""


def check_weights(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises a ConfigError that names the first weight of another shape, or that one side does not have."""
    for name in [*own, *saved]:
        if name.endswith(EXTRA_STATE):
            continue
        here, there = (tuple(d[name].shape) if name in d else "absent" for d in (own, saved))
        if here != there:
            raise ConfigError(
                f"The checkpoint holds another network: {name} is {there} there and {here} here.\n"
                "Give the network the checkpoint's arguments, or leave them out: what you do not write is "
                "taken from the checkpoint."
            )
