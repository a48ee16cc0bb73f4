"""Checks of what a network is given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from core.errors import ConfigError, nearest
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.positions import check_scaling

FROM_ZERO = {"max_window_layers", "dense_layers", "sinks"}
"""Integers that may be 0."""


class Sizes(TypedDict):
    """Those arguments of :class:`Decoder` that follow from what all families are given."""

    vocab_size: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_dim: int
    max_sequence_length: int
    init: Init
    init_std: Mapping[str, float] | None


def check_sizes(cls: type, values: Mapping[str, Any], rotary: bool = True) -> Sizes:
    """Checks the arguments of a decoder family as :func:`check_arguments` and returns those that :class:`Decoder` takes.

    Args:
        cls: The class, for its name and types.
        values: Argument -> value; without `head_dim` it is C / H, without `n_kv_head` G is H.
        rotary: Whether all features of a head are rotated, in pairs: then they must be even in number.
    """
    check_arguments(cls, values)
    head_dim = values.get("head_dim") or values["n_embd"] // values["n_head"]
    if rotary:
        check_even(cls.__name__, head_dim, "head_dim")
    return Sizes(
        vocab_size=values["vocab_size"],
        n_embd=values["n_embd"],
        n_head=values["n_head"],
        n_kv_head=values.get("n_kv_head") or values["n_head"],
        head_dim=head_dim,
        max_sequence_length=values["max_sequence_length"],
        init=values["init"],
        init_std=values["init_std"],
    )


def check_arguments(cls: type, values: Mapping[str, Any]) -> None:
    """Raises a ConfigError for the first argument of a network's constructor that is out of range.

    Integers are at least 1 (some 0), a `Literal` is one of its words, what ends in `dropout` is in [0, 1), other numbers (bases
    of rotary positions, caps, epsilons, standard deviations) are above 0 and finite; `n_kv_head` divides `n_head`, which
    divides `n_embd` unless there is a `head_dim`.

    Args:
        cls: The class, for its name and types.
        values: Argument -> value; others are ignored.
    """
    name = cls.__name__
    hints = get_type_hints(cls.__init__)  # type: ignore[misc]  # of this class, as it is asked for
    for key, hint in hints.items():
        value, options = values.get(key), get_args(hint)
        if get_origin(hint) is Literal and value not in options:
            raise ConfigError(f"{name}: {key}={value!r} is none of {options}.{nearest(str(value), options)}")
        least = int(key not in FROM_ZERO)
        if hint in (int, int | None) and value is not None and value < least:
            raise ConfigError(f"{name}: {key}={value} must be at least {least}.")
        if hint in (float, float | None) and value is not None:
            _check_number(name, key, value)
    for pattern, value in (values.get("init_std") or {}).items():
        _check_number(name, f"init_std[{pattern}]", value)
    check_scaling(name, values.get("rope_scaling"))
    n_embd, n_head = values["n_embd"], values["n_head"]
    n_kv_head = values.get("n_kv_head") or n_head
    if values.get("head_dim") is None and (fits := n_embd + -n_embd % n_head) != n_embd:
        raise ConfigError(f"{name}: n_embd={n_embd} is not divisible by n_head={n_head}; {fits} is.")
    if n_head % n_kv_head:
        raise ConfigError(f"{name}: n_kv_head={n_kv_head} does not divide n_head={n_head}.")


def check_even(name: str, dim: int, what: str, position: str = "rotary") -> None:
    """Raises a ConfigError where features that are rotated in pairs are odd in number."""
    if dim % 2:
        raise ConfigError(f"{name}: position={position} needs an even {what}, not {dim}.")


def _check_number(name: str, key: str, value: float) -> None:
    if key.endswith("dropout"):
        if not 0 <= value < 1:
            raise ConfigError(f"{name}: {key}={value} must be at least 0 and below 1.")
    elif not 0 < value < math.inf:
        raise ConfigError(f"{name}: {key}={value} must be above 0.")
