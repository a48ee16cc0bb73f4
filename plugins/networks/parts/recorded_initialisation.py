"""How a model of others is initialised: recorded on the meta device, so that each parameter can be drawn by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.initial_values import Fill, Start, ZeroRows
from toolkit.truncated_normal import truncated_normal

RANDOM, CONSTANT = ("normal_", "uniform_"), ("fill_", "zero_")
"""Operations in place that replace all numbers; the first ones draw them."""

EACH = ("mul_", "div_", "add_", "sub_", "clamp_", "erfinv_", "exp_", "log_", "neg_")
"""Those that change each number by itself."""

TRUNCATED = "_no_grad_trunc_normal_"
"""What `torch.nn.init.trunc_normal_` calls, under whatever name a model has that; it does nothing on the meta device since 2.14."""


class _Step(NamedTuple):
    """What is done to a parameter.

    Attributes:
        fill: Does it to a part.
        number: What the parameter has everywhere then; None: that depends.
    """

    fill: Fill
    number: float | None = None


Steps = list[_Step]


class _Watched(nn.Parameter):
    """A parameter on the meta device that is not asked whether it is there: what does nothing there would be missed."""

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Raises what an operator does that needs values."""
        raise NotImplementedError("what is done to it depends on whether it has values")


class _Recorder(TorchDispatchMode):
    """Notes what is done in place to parameters on the meta device.

    Attributes:
        found: Id of a parameter -> its steps, or its values; None: something else was done, or nothing.
        zeros: Id of a parameter -> rows that were set to zero afterwards.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.found: dict[int, Steps | Tensor | None] = {id(parameter): None for parameter in parameters}
        self.zeros: dict[int, tuple[int, ...]] = {}
        self._owners = {parameter.untyped_storage()._cdata: id(parameter) for parameter in parameters}
        self._rows: dict[int, tuple[int, int, Tensor]] = {}  # the view lives on: its id stays its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), func.overloadpacket.__name__
        target = kwargs.get("out", args[0] if args else None)
        if isinstance(target, Tensor) and _is_empty(target):
            if name == "select" and id(target) in self.found and args[1] == 0:
                self._rows[id(result)] = id(target), args[2] % len(target), result
            elif func._schema.is_mutable:
                plain = kwargs.keys() <= {"generator"}  # others, such as alpha, change what is done
                self._note(func, name if plain else "", target, args[1:])
        return result

    def _note(self, func: Any, name: str, target: Tensor, given: tuple[Any, ...]) -> None:
        owner = self._owners.get(target.untyped_storage()._cdata)
        if owner is None:
            return
        steps, numbers = self.found[owner], all(one is None or isinstance(one, int | float) for one in given)
        if id(target) in self._rows and isinstance(steps, list) and (name == "zero_" or given == (0,)):
            self.zeros[owner] = (*self.zeros.get(owner, ()), self._rows[id(target)][1])
        elif id(target) == owner and name in (*RANDOM, *CONSTANT) and numbers:
            number = float(given[0]) if name in CONSTANT and given else 0.0
            self.begin(owner, [_drawn(func, given) if name in RANDOM else _Step(_done(func, given), number)])
        elif id(target) == owner and name == "copy_" and not _is_empty(given[0]):
            self.begin(owner, given[0].to(target.dtype).expand(target.shape).clone())
        elif (
            id(target) == owner
            and name in EACH
            and numbers
            and isinstance(steps, list)
            and owner not in self.zeros
        ):
            steps.append(_Step(_done(func, given)))
        else:
            self.found[owner] = None

    def begin(self, owner: int, start: Steps | Tensor | None) -> None:
        """Notes what replaces all numbers of a parameter."""
        self.found[owner] = start
        self.zeros.pop(owner, None)

    @contextmanager
    def noting_truncated(self) -> Iterator[None]:
        """Notes truncated normal numbers, too, which no operator draws by itself."""
        own: Any = getattr(nn.init, TRUNCATED, None)  # of a torch without it such numbers are not known

        def note(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
        ) -> Tensor:
            owner = self._owners.get(tensor.untyped_storage()._cdata)
            if owner is None:
                found: Tensor = own(tensor, mean, std, a, b, generator)
                return found
            self.begin(owner, [_Step(truncated_normal(mean, std, a, b))] if id(tensor) == owner else None)
            return tensor

        if own is not None:
            setattr(nn.init, TRUNCATED, note)
        try:
            yield
        finally:
            if own is not None:
                setattr(nn.init, TRUNCATED, own)


def _drawn(func: Any, given: tuple[Any, ...]) -> _Step:
    return _Step(lambda part, generator: func(part, *given, generator=generator))


def _done(func: Any, given: tuple[Any, ...]) -> Fill:
    return lambda part, _: func(part, *given)


def _is_empty(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def recorded_starts(model: nn.Module, initialise: Callable[[], object]) -> Mapping[str, Start]:
    """Returns how each parameter begins; empty: of some it is not known.

    Args:
        model: On the meta device. Its parameters are replaced, and tied ones are no longer tied: each is initialised.
        initialise: Initialises it in place, and ties them again.
    """
    for part in model.modules():
        for name, own in part.named_parameters(recurse=False):
            setattr(part, name, _Watched(torch.empty_like(own), own.requires_grad))
    recorder, before = _Recorder([*model.parameters()]), torch.get_rng_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"), recorder:
            with recorder.noting_truncated():
                initialise()
            drawn = not torch.equal(torch.get_rng_state(), before)
    except (NotImplementedError, RuntimeError):  # it looks at values, which are not there
        return {}
    parameters = dict(model.named_parameters())  # of tied ones, the one that remains
    if drawn or any(recorder.found.get(id(parameter)) is None for parameter in parameters.values()):
        return {}
    return {name: _start(recorder, id(parameter)) for name, parameter in parameters.items()}


def _start(recorder: _Recorder, owner: int) -> Start:
    steps, rows = recorder.found[owner], recorder.zeros.get(owner, ())
    assert steps is not None
    start: Start = _replay(steps) if isinstance(steps, list) else steps
    return ZeroRows(start, rows) if rows else start


def _replay(steps: Steps) -> Fill | float:
    if len(steps) == 1 and steps[0].number is not None:
        return steps[0].number

    def fill(part: Tensor, generator: torch.Generator) -> None:
        for step in steps:
            step.fill(part, generator)

    return fill
