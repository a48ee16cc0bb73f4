"""How a network's parameters begin, each by itself: a rank draws its shards, and the values are those of one process.

A value depends on the seed, the name of the parameter and its place in it, and on nothing else: not on the device, nor on how
the parameter is sharded. Values are drawn on the CPU, in tiles of a fixed size with a generator of their own.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from core.training.seeding import mix
from toolkit.safetensors_files import LazyTensor

__all__ = [
    "STRIP",
    "Added",
    "CopyOf",
    "DrawsWeights",
    "Fill",
    "HasInitialValues",
    "NormsOf",
    "SpreadOf",
    "Start",
    "ZeroRows",
    "added_start",
    "clear_row",
    "clear_rows",
    "cleared_rows",
    "copied",
    "draw",
    "draw_part",
    "initial_values",
    "is_random",
    "named",
    "new_seed",
    "normal",
    "spread",
    "start_added",
    "start_as_norms",
    "start_as_spread",
    "uniform",
]

M = TypeVar("M", bound=nn.Module)

TILE, COLUMNS = 2**15, 1024
"""Elements of a tile, and the most columns that it has: a part is drawn with little of what lies around it.

Of more elements than that torch copies on several threads, which here would be those of each thread."""

PARALLEL = 64
"""Tiles from which on several threads draw them."""

MOST_THREADS = 16
"""More would wait for Python."""

Fill = Callable[[Tensor, torch.Generator], object]
"""Fills any part of a parameter in place, element by element, with numbers of a generator."""


class ZeroRows(NamedTuple):
    """A tensor that begins as another one does, with zeros in some rows.

    Attributes:
        start: How the other one begins.
        rows: Their numbers.
    """

    start: Any  # a Start
    rows: Sequence[int]


Start = Fill | Tensor | LazyTensor | float | ZeroRows
"""How a tensor begins: with a distribution, with these values, with those of a file, with one number, or with rows of zeros."""


@runtime_checkable
class HasInitialValues(Protocol):
    """A network that says of each parameter and buffer how it begins. Its `init_weights` calls :func:`draw`.

    Strategies that shard it then let each rank draw its own shards. Of other networks rank 0 initialises all. It counts
    where the class sets `deferred_init`, and `init_weights` is not that of a class further down.
    """

    def initial_value(self, name: str, tensor: Tensor) -> Start | None:
        """Returns how a parameter or buffer begins; None: it stays as it is.

        Args:
            name: Of the parameter or buffer, as in `named_parameters`.
            tensor: It, whole, possibly on the meta device: for its shape.
        """


@runtime_checkable
class DrawsWeights(Protocol):
    """A strategy whose ranks draw their own shards."""

    def draw_weights(self) -> bool:
        """Draws all weights again, with a new seed; False: rank 0 has to initialise them. Called on every rank."""


def normal(std: float) -> Fill:
    """Fills with N(0, std^2)."""
    return lambda part, generator: part.normal_(0.0, std, generator=generator)


def uniform(low: float, high: float) -> Fill:
    """Fills with numbers of [low, high)."""
    return lambda part, generator: part.uniform_(low, high, generator=generator)


def new_seed() -> int:
    """Returns a seed for a network, drawn from torch's generator of the CPU."""
    return int(torch.randint(2**62, (), device="cpu"))


def initial_values(network: nn.Module) -> dict[str, Start] | None:
    """Returns name -> how it begins, of each parameter and buffer; None: the network does not say it of all of them."""
    kind = type(network)
    last = next((one for one in kind.__mro__ if {"initial_value", "init_weights"} & vars(one).keys()), kind)
    if "initial_value" not in vars(last) or not vars(kind).get("deferred_init"):
        return None
    assert isinstance(network, HasInitialValues)
    found = {name: network.initial_value(name, tensor) for name, tensor in named(network)}
    known = {name: start for name, start in found.items() if start is not None}
    return known if len(known) == len(found) else None


class Added(NamedTuple):
    """How a tensor begins that was added on the meta device.

    Attributes:
        start: How it begins.
        name: That its numbers depend on.
    """

    start: Start
    name: str


class CopyOf(NamedTuple):
    """A tensor that begins as another one, of the same module that is trained.

    Attributes:
        source: The other one.
        cleared: Its rows that had been set to zero by then.
    """

    source: Tensor
    cleared: Sequence[int]


class NormsOf(NamedTuple):
    """A vector that begins as the norms of the rows of a matrix of the network.

    Attributes:
        source: The matrix.
        cleared: Its rows that had been set to zero by then.
    """

    source: Tensor
    cleared: Sequence[int]


class SpreadOf(NamedTuple):
    """A tensor that begins with normal numbers, which spread as those in a matrix of the network.

    Attributes:
        source: The matrix.
        cleared: Its rows that had been set to zero by then.
        name: That the numbers depend on.
    """

    source: Tensor
    cleared: Sequence[int]
    name: str


Noted = Added | CopyOf | NormsOf | SpreadOf

_NOTE, _CLEARED = "_leyden_begins", "_leyden_cleared"
"""Attributes of a tensor on the meta device. A weak reference would keep torch from swapping it for a real one."""

STRIP = 1024
"""Rows of a matrix that are looked at together."""

_seeds: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Network -> the seed that it was drawn with."""


@torch.no_grad()
def start_added(tensor: Tensor, start: Start, network: nn.Module, name: str) -> None:
    """Fills a parameter that is added to a network or belongs to it, or notes for the strategy how it begins.

    Whoever changes a network calls it for all that it adds, and declares `offers=("keeps_weights",)`. The values depend on the
    network's seed and on the name.

    Args:
        tensor: The parameter, whole; on the meta device it is noted.
        start: How it begins.
        network: The network.
        name: No other tensor of the network, or added to it, has the same.
    """
    if tensor.is_meta:
        vars(tensor)[_NOTE] = Added(start, name)
    else:
        if network not in _seeds:
            _seeds[network] = new_seed()
        draw_part(tensor, start, _seeds[network], name)


def copied(module: M) -> M:
    """Returns a deep copy of a part of a network; on the meta device each tensor begins as that of which it is a copy."""
    found = copy.deepcopy(module)
    for (_, source), (_, tensor) in zip(named(module), named(found), strict=True):
        if tensor.is_meta:
            vars(tensor)[_NOTE] = CopyOf(source, cleared_rows(source))
    return found


def start_as_norms(tensor: Tensor, source: Tensor) -> None:
    """Notes that a vector on the meta device begins as the norms of the rows of a matrix of the network.

    Args:
        tensor: (n,), a parameter that is added to the network.
        source: (n, m).
    """
    vars(tensor)[_NOTE] = NormsOf(source, cleared_rows(source))


def start_as_spread(tensor: Tensor, source: Tensor, network: nn.Module, name: str) -> None:
    """Fills a parameter that is added to a network with normal numbers, or notes it on the meta device.

    Args:
        tensor: The parameter.
        source: A matrix of the network, whose standard deviation they have.
        network: The network.
        name: As for :func:`start_added`.
    """
    if tensor.is_meta:
        vars(tensor)[_NOTE] = SpreadOf(source, cleared_rows(source), name)
    else:
        start_added(tensor, normal(spread(source.detach().split(STRIP))), network, name)


def spread(strips: Iterable[Tensor]) -> float:
    """Returns the standard deviation of the numbers in a matrix, given in strips; rounded to float32."""
    count, sums = (
        0,
        torch.zeros(2, dtype=torch.float64, device="cpu"),
    )  # networks are built within `torch.device`
    for strip in strips:
        wide = strip.double()
        count, sums = count + wide.numel(), sums + torch.stack((wide.sum(), wide.square().sum())).cpu()
    mean, square = (sums / count).tolist()
    return float(torch.tensor(max(square - mean**2, 0.0), dtype=torch.float32, device="cpu").sqrt())


@torch.no_grad()
def clear_row(tensor: Tensor, row: int) -> None:
    """Sets a row of a parameter of the network to zero; on the meta device it is noted that it begins so."""
    if tensor.is_meta:
        vars(tensor)[_CLEARED] = (*cleared_rows(tensor), row)
    else:
        tensor[row] = 0.0


def cleared_rows(tensor: Tensor) -> Sequence[int]:
    """Returns the rows of a tensor on the meta device that were set to zero."""
    found: Sequence[int] = vars(tensor).get(_CLEARED, ())
    return found


def clear_rows(part: Tensor, rows: Sequence[int], first: int) -> None:
    """Sets rows of a whole to zero, in a part of it that begins with the row `first`."""
    for row in rows:
        if 0 <= row - first < len(part):
            part[row - first] = 0.0


def is_random(start: Start) -> bool:
    """Returns whether a tensor begins with random numbers."""
    return callable(start.start if isinstance(start, ZeroRows) else start)


def added_start(tensor: Tensor) -> Noted | None:
    """Returns how a tensor begins that was added on the meta device; None: that was not noted."""
    found: Noted | None = vars(tensor).get(_NOTE)
    return found


@torch.no_grad()
def draw(network: nn.Module, seed: int | None = None) -> None:
    """Fills the parameters and buffers of a network that says how they begin; those on the meta device are left out.

    Args:
        network: Offers `HasInitialValues`.
        seed: None: a new one.
    """
    _seeds[network] = seed = new_seed() if seed is None else seed
    assert isinstance(network, HasInitialValues)
    for name, tensor in named(network):
        start = None if tensor.is_meta else network.initial_value(name, tensor)
        if start is not None:
            draw_part(tensor, start, seed, name)


def draw_part(
    target: Tensor,
    start: Start,
    seed: int,
    name: str,
    shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> None:
    """Fills a part of a parameter or buffer, in place.

    Args:
        target: The part, on any device.
        start: How the whole begins.
        seed: Of the network.
        name: Of the parameter in the network.
        shape: Of the whole; None: the part is the whole.
        offset: Where the part begins in each dimension of the whole.
    """
    whole = target.shape if shape is None else shape
    offset = offset or [0] * len(whole)
    target = target.detach()
    if isinstance(start, ZeroRows):
        draw_part(target, start.start, seed, name, shape, offset)
        clear_rows(target, start.rows, offset[0])
    elif isinstance(start, LazyTensor):
        if target.numel():
            ends = (first + size for first, size in zip(offset, target.shape, strict=True))
            target.copy_(start.part(tuple(map(slice, offset, ends))))
    elif isinstance(start, Tensor):
        for dim, (size, first) in enumerate(zip(target.shape, offset, strict=True)):
            start = start.narrow(dim, first if size else 0, size)
        target.copy_(start)
    elif not callable(start):
        target.fill_(start)
    elif target.numel():
        # not narrower than float32: values are then the same ones, rounded
        wide, own = torch.promote_types(target.dtype, torch.float32), target
        if target.device.type != "cpu" or target.dtype != wide or not target.is_contiguous():
            own = torch.empty(target.shape, dtype=wide, device="cpu")
        key = mix(seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()))
        tiles = list(_tiles(own, whole, offset))
        threads = 1 if len(tiles) < PARALLEL else _threads()
        if threads == 1:
            _draw_tiles(tiles, start, key)
        else:
            with ThreadPoolExecutor(threads) as pool:
                shares = (tiles[number::threads] for number in range(threads))
                list(pool.map(lambda share: _draw_tiles(share, start, key), shares))
        if own is not target:
            target.copy_(own)


class _Tile(NamedTuple):
    """A tile of a parameter that is looked at as rows, and what is kept of it.

    Attributes:
        number: Its place among all.
        shape: Its rows and columns.
        kept: Where the part that is kept begins in it.
        target: What is filled with that.
    """

    number: int
    shape: tuple[int, int]
    kept: tuple[int, int]
    target: Tensor


@torch.no_grad()  # in each thread: its mode is its own
def _draw_tiles(tiles: Sequence[_Tile], fill: Fill, key: int) -> None:
    """Draws tiles, each whole, and copies what is kept."""
    scratch, generator = tiles[0].target.new_empty(TILE), torch.Generator()
    for number, (height, width), (row, column), target in tiles:
        generator.manual_seed(mix(key, number))
        if target.shape == (height, width) and target.is_contiguous():
            fill(target, generator)
        else:
            values = scratch[: height * width].view(height, width)
            fill(values, generator)
            rows, columns = target.shape
            target.copy_(values[row : row + rows, column : column + columns])


def _tiles(part: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Iterator[_Tile]:
    """Yields the tiles of a whole of this shape that a part touches; all dimensions but the last one are rows."""
    *leading, (width, left, columns) = [*zip(shape, offset, part.shape, strict=True)] or [(1, 0, 1)]
    leading = leading or [(1, 0, 1)]
    while len(leading) > 1 and leading[-1][0] == leading[-1][2]:  # complete: rows of the dimension before it
        size = leading.pop()[0]
        leading[-1] = leading[-1][0] * size, leading[-1][1] * size, leading[-1][2] * size
    *outer, (inner, top, rows) = leading
    height = math.prod(size for size, _, _ in leading)
    wide = min(width, COLUMNS)
    high, across = max(TILE // wide, 1), -(-width // wide)
    places = itertools.product(*(range(first, first + count) for _, first, count in outer))
    for lane, place in zip(part.view(-1, rows, columns), places, strict=True):
        first = 0
        for (size, _, _), index in zip(outer, place, strict=True):
            first = first * size + index
        first = first * inner + top
        for (y, above, below), (x, before, after) in itertools.product(
            _cuts(first, rows, high), _cuts(left, columns, wide)
        ):
            yield _Tile(
                y * across + x,
                (min(high, height - y * high), min(wide, width - x * wide)),
                (above - y * high, before - x * wide),
                lane[above - first : below - first, before - left : after - left],
            )


def _cuts(first: int, count: int, step: int) -> Iterator[tuple[int, int, int]]:
    """Yields number, begin and end within [first, first + count) of the tiles of this size that lie there."""
    for number in range(first // step, -(-(first + count) // step)):
        yield number, max(first, number * step), min(first + count, (number + 1) * step)


def _threads() -> int:
    """Returns how many threads draw: those of torch, or this process' share of the cores, where it is launched with others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // int(os.environ.get("LOCAL_WORLD_SIZE", cores))
    return min(max(torch.get_num_threads(), share), MOST_THREADS)


def named(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields each parameter and buffer once, with its name."""
    yield from network.named_parameters()
    yield from network.named_buffers()
