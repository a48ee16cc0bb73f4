"""What a proof is, which there are for a kind, and how to run them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from conformance.case import Case
from core.catalog import KINDS, Entry
from core.errors import ConfigError, nearest

STATIC = ("declared", "offers")
MODULES = (
    *STATIC,
    "training",
    "own_state",
    "networks",
    "objectives",
    "optimizers",
    "schedules",
    "data",
    "transforms",
    "engines",
    "tokens",
    "rewards",
    "evaluations",
    "commands",
    "parallel",
    "on_gpu",
)
"""Modules of this package whose functions are proofs; those of `STATIC` read and import, and run nothing."""


class NotProvable(Exception):
    """A promise that cannot be tested here, or that the technique says it does not give; holds the reason."""


@dataclass(frozen=True)
class Proof:
    """One promise and the function that tests it.

    Attributes:
        name: As in test ids.
        kinds: Of the techniques that give the promise.
        promise: In one sentence.
        check: Raises AssertionError, saying what was measured, if a case breaks the promise.
        runs: Whether the technique is run, for which what it needs must be there.
        contract: The class of `core.contracts` whose promise it is, where a kind has several.
        gpu: Whether it needs one.
    """

    name: str
    kinds: tuple[str, ...]
    promise: str
    check: Callable[[Case], None]
    runs: bool = True
    contract: str | None = None
    gpu: bool = False

    def __str__(self) -> str:
        return self.name

    def __call__(self, case: Case) -> None:
        """Runs the proof.

        Raises:
            AssertionError: Which technique, which promise, what was measured.
            NotProvable: If the case is exempt, or the promise cannot be tested here.
        """
        if reason := case.exempt.get(self.name):
            raise NotProvable(f"exempt: {reason}")
        try:
            if self.runs and (absent := case.absent()):
                raise NotProvable(absent)
            self.check(case)
        except NotProvable:
            raise
        except (AssertionError, ConfigError) as error:
            raise AssertionError(f"{self._broken(case)}\n{error}") from None
        except Exception as error:  # whatever a technique raises breaks the promise
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}\nat {at.filename}:{at.lineno} in {at.name}"
            raise AssertionError(f"{self._broken(case)}\n{what}") from error

    def _broken(self, case: Case) -> str:
        return f"{case.entry.name} of {case.entry.origin} breaks {self.name}: {self.promise}"


def proof(
    *kinds: str, runs: bool = True, contract: str | None = None, gpu: bool = False
) -> Callable[[Callable[[Case], None]], Proof]:
    """Makes a function the proof of its name, for techniques of these kinds, or of all if none is given.

    The first line of its docstring is the promise.
    """

    def make(check: Callable[[Case], None]) -> Proof:
        promise = (check.__doc__ or "").partition("\n")[0]
        return Proof(check.__name__, kinds or KINDS, promise, check, runs, contract, gpu)

    return make


def require(condition: Any, message: str) -> None:
    """Raises AssertionError with the message unless the condition holds, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def proofs(of: Case | str, modules: tuple[str, ...] = MODULES) -> list[Proof]:
    """Returns the proofs for a case, or for all techniques of a kind, in the order in which they are best run.

    Raises:
        ConfigError: If the case is exempt from a proof that does not exist.
    """
    kind = of if isinstance(of, str) else of.entry.kind
    found: list[Proof] = []
    for name in modules:
        members: Mapping[str, Any] = vars(import_module(f"conformance.{name}"))
        found += [item for item in members.values() if isinstance(item, Proof) and kind in item.kinds]
    if isinstance(of, str):
        return found
    _check_exemptions(of, {item.name for item in found}, modules)
    if not any(item.contract for item in found):
        return found
    try:
        contracts = {base.__name__ for base in of.target.__mro__}
    except (ConfigError, AttributeError):  # not imported, or no class: each proof reports it
        return found
    return [item for item in found if item.contract is None or item.contract in contracts]


def _check_exemptions(case: Case, names: set[str], modules: tuple[str, ...]) -> None:
    unknown = [name for name in case.exempt if name not in names]
    if unknown and modules == MODULES:
        hint = nearest(unknown[0], names)
        raise ConfigError(f"{case}: there is no proof {unknown[0]!r} to be exempt from.{hint}")


def prove(technique: Case | Entry | str, /, **init_args: Any) -> None:
    """Runs every proof for a technique.

    Args:
        technique: A case, or the technique's name.
        init_args: Its arguments, if a name is given; without any, those of the docstring's example count.

    Raises:
        AssertionError: With every promise that is broken.
    """
    case = technique if isinstance(technique, Case) else Case(technique, init_args or None)
    broken = []
    for item in proofs(case):
        try:
            item(case)
        except NotProvable:
            continue
        except AssertionError as error:
            broken.append(str(error))
    require(not broken, "\n\n".join(broken))
