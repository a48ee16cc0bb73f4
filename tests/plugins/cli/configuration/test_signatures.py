"""What classes take and which types name a class, held against jsonargparse, which parses by the same signatures."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, Optional

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import callbacks, loggers, strategies
from lightning.pytorch.callbacks import Callback
from torch import optim
from torch.optim import Optimizer

from core import catalog
from plugins.cli.configuration.signatures import (
    REQUIRED,
    class_types,
    describe,
    given,
    literals,
    parameters,
    sections,
    takes_list,
    takes_null,
    understood,
)

OURS = [entry for entry in catalog.entries() if entry.package == "leyden" and entry.kind != "commands"]
CLASSES = [
    *(sections()[name] for name in ("trainer", "model")),
    *(getattr(callbacks, name) for name in callbacks.__all__),
    *(loggers.CSVLogger, strategies.DDPStrategy, strategies.ModelParallelStrategy),
    *(optim.Adam, optim.SGD, optim.Muon, optim.lr_scheduler.OneCycleLR),
]


@pytest.mark.parametrize("entry", OURS, ids=lambda entry: entry.name)
def test_the_arguments_of_a_technique_are_those_that_jsonargparse_finds(entry):
    assert_the_same_are_found(entry.load())


@pytest.mark.parametrize("target", CLASSES, ids=lambda target: target.__name__)
def test_the_arguments_are_those_that_jsonargparse_finds(target):
    assert_the_same_are_found(target)


def assert_the_same_are_found(target):
    parser = ArgumentParser(exit_on_error=False)
    added = parser.add_class_arguments(target, "it", fail_untyped=False)
    theirs = {name.removeprefix("it.") for name in added}
    ours, takes_more = parameters(target)
    assert ours.keys() <= theirs
    assert takes_more or ours.keys() == theirs


class Base:
    def __init__(self, width: int, depth: "int | None" = None) -> None: ...


class PassesOn(Base):
    def __init__(self, lr: float, *rest, **kwargs):
        super().__init__(**kwargs)


class Keeps(Base):
    def __init__(self, lr: float, **kwargs):
        super().__init__(3, **kwargs)
        self.options = kwargs


class Untyped:
    def __init__(self, loss, at: "NoSuchType" = 3): ...  # noqa: F821


def test_what_is_passed_on_to_a_base_is_among_the_arguments():
    found, takes_more = parameters(PassesOn)
    assert list(found) == ["lr", "width", "depth"]
    assert not takes_more
    assert found["lr"] == (float, REQUIRED, "float")
    assert found["depth"] == (int | None, None, "int | None")


def test_what_is_kept_may_be_anything():
    assert parameters(Keeps) == ({"lr": (float, REQUIRED, "float")}, True)


def test_an_argument_without_a_known_type_is_there():
    assert parameters(Untyped) == ({"loss": (Any, REQUIRED, ""), "at": (Any, 3, "NoSuchType")}, False)


def test_of_a_function():
    def function(a: int, *, b: str = "x", **kwargs: Any) -> None: ...

    assert parameters(function) == ({"a": (int, REQUIRED, "int"), "b": (str, "x", "str")}, True)


@pytest.mark.parametrize(
    ("hint", "classes", "several"),
    [
        (int, (), False),
        (Callback, (Callback,), False),
        (list[Callback] | Callback | None, (Callback,), True),
        (Iterable[Callback] | bool, (Callback,), True),
        (Callable[[Optimizer], Callback], (Callback,), False),
        (Callable[[list[int]], Callback] | None, (Callback,), False),
        (Optional[Literal["a", "b"]], (), False),  # noqa: UP045
        (dict[str, Callback], (Callback,), False),
        (Any, (), False),
        (Callable, (), False),
    ],
)
def test_types_that_name_classes_and_lists(hint, classes, several):
    assert class_types(hint) == classes
    assert takes_list(hint) == several


def test_literals_and_descriptions():
    assert literals(Literal["a", 3] | None) == ["a", 3]
    assert literals(int) == []
    assert describe(int) == "int"
    assert describe(int | None) == "int | null"
    assert describe(list[Callback] | Callback | None) == "list[Callback] | Callback | null"
    assert describe(Callable[[Optimizer], Callback]) == "Callback"
    assert describe(Callable[[int], int]) == "a function"
    assert describe(tuple[float, float]) == "tuple[float, float]"
    assert describe(Optional[Literal["a", 3]]) == "a | 3 | null"  # noqa: UP045


@pytest.mark.parametrize(
    ("hint", "answer"),
    [
        (int, False),
        (int | None, True),
        (Any, True),
        (list[int], False),
        (Literal["a", None], True),
        (None, True),
    ],
)
def test_which_types_take_null(hint, answer):
    assert takes_null(hint) == answer


def test_how_much_the_caller_gives():
    assert given(Callable[[Optimizer], Callback] | None) == 1
    assert given(Callable[..., Callback]) == given(Callback) == 0


def test_what_is_passed_on_beyond_the_bases_is_understood():
    class Elsewhere:
        def __init__(self, first: int, **kwargs: Any) -> None:
            self.made = Untyped(first, **kwargs)

    assert understood(Elsewhere) == {"first", "at"}
    assert understood(Elsewhere, 1) == {"at"}
    assert understood(3) is None
