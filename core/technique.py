"""The `@technique(...)` declaration: what a technique needs, excludes, owns, and where it comes from.

Light on purpose: importing this module imports no torch, so that a declaration costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_ATTRIBUTE = "__technique__"


class Need(Protocol):
    """Something that must be present before a technique can run."""

    def missing(self) -> str | None:
        """Returns what is missing and how to get it, or None when the need is met."""


@dataclass(frozen=True)
class Package:
    """A Python distribution that must be installed, for example ``Package("deepspeed>=0.19")``.

    Args:
        requirement: A PEP 508 requirement.
        extra: The extra of `leyden` that installs it, when there is one.
    """

    requirement: str
    extra: str | None = None

    def missing(self) -> str | None:
        """Returns the pip line that would satisfy the requirement, or None."""
        from importlib.metadata import PackageNotFoundError, version

        from packaging.requirements import Requirement

        requirement = Requirement(self.requirement)
        target = f"leyden[{self.extra}]" if self.extra else self.requirement
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            return f"{requirement.name} is not installed: pip install '{target}'"
        if requirement.specifier.contains(found, prereleases=True):
            return None
        return f"{self.requirement} is needed, {found} is installed: pip install '{target}'"


@dataclass(frozen=True)
class Device:
    """A kind of accelerator that must be present, for example ``Device("cuda")``."""

    kind: str

    def missing(self) -> str | None:
        """Returns a line that says the device is absent, or None."""
        import torch

        found = torch.accelerator.current_accelerator(check_available=True)
        if found is not None and found.type == self.kind:
            return None
        return f"no {self.kind.upper()} device is visible to this process"


@dataclass(frozen=True)
class Declaration:
    """What `@technique` recorded about a class; see :func:`technique`."""

    paper: str
    needs: tuple[Need, ...] = ()
    conflicts: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    owns: tuple[str, ...] = ()


def technique(
    *,
    paper: str,
    needs: Iterable[Need] = (),
    conflicts: Mapping[str, str] | None = None,
    before: Iterable[str] = (),
    after: Iterable[str] = (),
    owns: Iterable[str] = (),
) -> Callable[[T], T]:
    """Declares a class (or function) as a technique.

    Args:
        paper: The paper or source that the technique follows, with section where it has one.
        needs: What must be present: packages, devices.
        conflicts: Name of another technique -> why the two cannot run together. Declared on either side.
        before: Callbacks whose hooks must fire after this one's, whatever the order in YAML.
        after: Callbacks whose hooks must fire before this one's.
        owns: What only one technique of a run may change: "learning_rate", "sequence_length",
            "batch_size", "gradient_clipping", "optimizer_step".

    Returns:
        A decorator that returns its argument unchanged but for the recorded :class:`Declaration`.
    """
    declaration = Declaration(
        paper, tuple(needs), dict(conflicts or {}), tuple(before), tuple(after), tuple(owns)
    )

    def record(target: T) -> T:
        setattr(target, _ATTRIBUTE, declaration)
        return target

    return record


def declaration_of(target: Any) -> Declaration | None:
    """Returns the declaration of a class or function itself; a base class's is not inherited."""
    found: Declaration | None = vars(target).get(_ATTRIBUTE) if hasattr(target, "__dict__") else None
    return found
