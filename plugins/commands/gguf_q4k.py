"""Quantises matrices to GGUF's Q4_K: 4 bits for each weight, with scales and minima of 6 bits.

The package `gguf` reads this type and does not write it. 256 values of a row are a super-block of 144 bytes: two float16
factors, eight scales and eight minima of 6 bits, and 256 numbers from 0 to 15. A value is
`factor * scale * number - minimum_factor * minimum`, with a scale and a minimum for each 32 values, a part.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["BLOCK", "quantize"]

BLOCK, PART, BYTES = 256, 32, 144
MOST, MOST_SCALE = 15, 63

RANGES = np.linspace(MOST - 2.5, MOST + 1, 15, dtype=np.float32)
"""Candidates for the number of the largest value of a part. Further ones change the error by less than 0.2%."""

AT_ONCE = 2048
"""Super-blocks that are quantised together: a thread needs some 20 MiB."""

Floats = NDArray[np.float32]
Numbers = NDArray[np.uint8]


def quantize(matrix: Floats) -> Numbers:
    """Returns the bytes of a matrix, (..., columns) -> (..., columns / 256 * 144).

    The weighted squared error is what is made small; large values weigh more, as in llama.cpp without an importance matrix.

    Args:
        matrix: Its last dimension is a multiple of 256.
    """
    blocks = matrix.reshape(-1, BLOCK // PART, PART)
    found = np.empty((len(blocks), BYTES), np.uint8)

    def fill(begin: int) -> None:
        found[begin : begin + AT_ONCE] = _blocks(blocks[begin : begin + AT_ONCE])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, range(0, len(blocks), AT_ONCE)))
    return found.reshape(*matrix.shape[:-1], -1)


def _blocks(values: Floats) -> Numbers:
    """Returns super-blocks, (B, 8, 32) -> (B, 144)."""
    weights = np.sqrt(np.mean(values**2, axis=-1, keepdims=True)) + np.abs(values)
    lines = _lines(values, weights)
    factors = (np.stack([line.max(axis=-1) for line in lines], axis=-1) / MOST_SCALE).astype(
        np.float16
    )  # (B, 2)
    scales, minima = (
        np.clip(np.rint(_ratio(line, factors[:, [place]])), 0, MOST_SCALE).astype(np.uint8)
        for place, line in enumerate(lines)
    )
    factors = _refined(values, weights, factors, scales, minima)
    numbers = _numbers(values, factors, scales, minima).astype(np.uint8).reshape(len(values), 4, 2, PART)
    packed = (numbers[:, :, 0] | numbers[:, :, 1] << 4).reshape(len(values), -1)
    return np.concatenate([factors.view(np.uint8), _packed(scales, minima), packed], axis=1)


def _lines(values: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Returns scale and minimum of each part, (B, 8), neither below 0.

    For each candidate, numbers are rounded and a straight line is fitted to them; the best counts.
    """
    low = np.minimum(values.min(axis=-1, keepdims=True), 0)
    spread = values.max(axis=-1, keepdims=True) - low
    above = _ratio(values - low, spread)
    total, first = weights.sum(-1), _dot(weights, values)
    least = np.full(total.shape, np.inf, np.float32)
    slopes, shifts = (spread / MOST)[..., 0], low[..., 0]
    for most in RANGES:
        numbers = np.clip(np.rint(above * most), 0, MOST)
        weighted = weights * numbers
        one, two, mixed = weighted.sum(-1), _dot(weighted, numbers), _dot(weighted, values)
        determinant = total * two - one * one
        shift = np.minimum(_ratio(two * first - one * mixed, determinant), 0)
        slope = _ratio(mixed - shift * one, two)
        # The squared error, but for what is the same for all lines.
        error = slope * (slope * two + 2 * shift * one - 2 * mixed) + shift * (shift * total - 2 * first)
        better = (error < least) & (slope > 0) & (determinant > 0)
        least = np.where(better, error, least)
        slopes, shifts = np.where(better, slope, slopes), np.where(better, shift, shifts)
    return slopes, -shifts


def _refined(
    values: Floats, weights: Floats, factors: NDArray[np.float16], scales: Numbers, minima: Numbers
) -> NDArray[np.float16]:
    """Returns the factors, (B, 2), that fit best to the rounded scales, minima and numbers of a super-block."""
    one = _numbers(values, factors, scales, minima) * scales[..., None]
    two = np.broadcast_to(-minima[..., None].astype(np.float32), one.shape)
    flat = [array.reshape(len(values), BLOCK) for array in (values, weights, one, two)]
    value, weight, one, two = flat
    aa, ab, bb = _dot(weight * one, one), _dot(weight * one, two), _dot(weight * two, two)
    ax, bx = _dot(weight * one, value), _dot(weight * two, value)
    determinant = aa * bb - ab * ab
    found = _ratio(np.stack([bb * ax - ab * bx, aa * bx - ab * ax], axis=-1), determinant[:, None])
    good = (determinant > 1e-6 * aa * bb) & (found > 0).all(axis=-1)
    return np.where(good[:, None], found, factors).astype(np.float16)


def _numbers(values: Floats, factors: NDArray[np.float16], scales: Numbers, minima: Numbers) -> Floats:
    """Returns the numbers from 0 to 15 nearest to the values, (B, 8, 32)."""
    factor, minimum_factor = factors.astype(np.float32).T[..., None]
    above = values + (minimum_factor * minima)[..., None]
    return np.clip(np.rint(_ratio(above, (factor * scales)[..., None])), 0, MOST)


def _packed(scales: Numbers, minima: Numbers) -> Numbers:
    """Returns 8 scales and 8 minima in 12 bytes: the first 4 of each, whose upper 2 bits hold those of the last 4."""
    parts = [number[:, :4] | number[:, 4:] >> 4 << 6 for number in (scales, minima)]
    return np.concatenate([*parts, scales[:, 4:] & 15 | minima[:, 4:] << 4], axis=1)


def _dot(one: Floats, other: Floats) -> Floats:
    found: Floats = np.einsum("...i,...i->...", one, other)
    return found


def _ratio(one: Floats, other: Floats | NDArray[np.float16]) -> Floats:
    """Returns a quotient, 0 where the divisor is not above 0."""
    wide: NDArray[Any] = np.broadcast_to(other, one.shape)
    return np.divide(one, wide, out=np.zeros_like(one), where=wide > 0)
