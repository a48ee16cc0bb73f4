"""Tables of positions: sinusoids, and rotary angles with the ways in which their range is extended.

Shapes: T tokens, D features of a head. A table is (length, D): sines, then cosines, D / 2 of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError, nearest

SCALINGS: dict[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}
"""Kind of scaling -> the keys it needs, and those it may have; they are named as in transformers' config.json."""


def sinusoid_table(length: int, dim: int, theta: float) -> Tensor:
    """Returns (length, dim): sines of position * theta^(-2i/dim), then their cosines; i < dim / 2."""
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), rates)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + D/2]) of x (B, heads, T, D) by the angles of `table` ([B,] 1, T, D)."""
    sin, cos = table.chunk(2, dim=-1)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


@dataclass(frozen=True)
class Rope:
    """Rotary positions, arXiv:2104.09864.

    Args:
        dim: Features D of a head.
        theta: Base of the wavelengths: pair i turns by theta^(-2i/D) radians a token.
        scaling: How they are stretched over more tokens than there were in training: `rope_type` is "linear"
            (positions divided by `factor`, arXiv:2306.15595), "llama3" (wavelengths above
            `original_max_position_embeddings` / `low_freq_factor` are stretched, those below it / `high_freq_factor`
            are not; arXiv:2407.21783) or "yarn" (arXiv:2309.00071), with its keys from `SCALINGS`. None: not at all.
    """

    dim: int
    theta: float
    scaling: Mapping[str, Any] | None = None

    def table(self, length: int) -> Tensor:
        """Returns (length, D) in float32, of the same operations in the same order as transformers."""
        rates, scale = self.rates()
        angles = torch.arange(length, dtype=torch.float32, device="cpu")[:, None] * rates
        return torch.cat((angles.sin() * scale, angles.cos() * scale), dim=-1)

    def rates(self) -> tuple[Tensor, float]:
        """Returns radians a token, (D / 2,), and the factor of sines and cosines."""
        wavelengths = self.theta ** (
            torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim
        )
        scaling = self.scaling or {}
        kind = scaling.get("rope_type")
        if kind == "linear":
            return 1.0 / wavelengths / scaling["factor"], 1.0
        if kind == "llama3":
            return _llama3(1.0 / wavelengths, scaling), 1.0
        if kind == "yarn":
            return self._yarn(wavelengths, scaling), _yarn_scale(scaling)
        return 1.0 / wavelengths, 1.0

    def _yarn(self, wavelengths: Tensor, scaling: Mapping[str, Any]) -> Tensor:
        """Rates of the pairs that turn often in the original length stay, the others are divided by the factor."""
        length, size = scaling["original_max_position_embeddings"], self.dim

        def pair(turns: float) -> float:
            return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
        if scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        ramp = torch.arange(size // 2, dtype=torch.float32, device="cpu") - first
        kept = 1 - torch.clamp(ramp / ((last - first) or 0.001), 0, 1)
        return 1.0 / (scaling["factor"] * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _llama3(rates: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / rates
    scaled = torch.where(wavelengths > length / low, rates / factor, rates)
    smooth = (length / wavelengths - low) / (high - low)
    between = ~(wavelengths < length / high) * ~(wavelengths > length / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn_scale(scaling: Mapping[str, Any]) -> float:
    factor = scaling["factor"]
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return yarn_mscale(factor, scaling["mscale"]) / yarn_mscale(factor, scaling["mscale_all_dim"])
    return yarn_mscale(factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Returns what YaRN multiplies queries and keys with, arXiv:2309.00071, equation 15; `weight` is DeepSeek's."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def check_scaling(name: str, scaling: Mapping[str, Any] | None) -> None:
    """Raises a ConfigError, beginning with the network's name, if a `rope_scaling` is none of `SCALINGS`."""
    if scaling is None:
        return
    kind = scaling.get("rope_type")
    if kind not in SCALINGS:
        raise ConfigError(
            f"{name}: rope_scaling.rope_type={kind!r} is none of {', '.join(SCALINGS)}.{nearest(str(kind), set(SCALINGS))}"
        )
    needed, possible = SCALINGS[kind]
    given = set(scaling) - {"rope_type"}
    if missing := sorted(needed - given):
        raise ConfigError(f"{name}: rope_scaling of type {kind} needs {', '.join(missing)}.")
    if unknown := sorted(given - needed - possible):
        raise ConfigError(
            f"{name}: rope_scaling of type {kind} has no {unknown[0]}.{nearest(unknown[0], needed | possible)}"
        )
    numbers = {key: value for key, value in scaling.items() if key not in ("rope_type", "truncate")}
    for key, value in numbers.items():
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ConfigError(f"{name}: rope_scaling.{key}={value!r} must be a number above 0.")
    if scaling["factor"] < 1:
        raise ConfigError(f"{name}: rope_scaling.factor={scaling['factor']} must be at least 1.")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ConfigError(f"{name}: rope_scaling.high_freq_factor must be above low_freq_factor.")
