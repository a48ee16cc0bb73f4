"""The `@technique(...)` declaration: what a technique needs, excludes, owns, and where it comes from.

Light on purpose: importing this module imports no torch, so that a declaration costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from core.errors import deprecated

T = TypeVar("T")
Maturity = Literal["stable", "experimental"]
_ATTRIBUTE = "__technique__"


class Need(Protocol):
    """Something that must be present before a technique can run; `str` says what, for listings."""

    def missing(self, run: Any) -> str | None:
        """Returns what of it a `toolkit.selection.Run` lacks and how to get it, or None when the need is met."""


@dataclass(frozen=True)
class Package:
    """A Python distribution that must be installed, for example ``Package("deepspeed>=0.19")``.

    Args:
        requirement: A PEP 508 requirement.
        extra: The extra of `leyden` that installs it, when there is one.
    """

    requirement: str
    extra: str | None = None

    def __str__(self) -> str:
        return self.requirement

    def missing(self, run: Any = None) -> str | None:
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
    """A kind of accelerator that the run must be on, for example ``Device("cuda", capability=(9, 0))``.

    Args:
        kind: "cuda", "mps", "cpu" or the name of another accelerator of Lightning's.
        capability: The least CUDA compute capability, as (major, minor), of every visible device.
    """

    kind: str
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        least = " of compute capability {}.{} or more".format(*self.capability) if self.capability else ""
        return f"a {self.kind.upper()} device{least}"

    def missing(self, run: Any) -> str | None:
        """Returns a line that says which device the run has instead, or None."""
        if run.offline:
            return None
        if run.accelerator != self.kind:
            return (
                f"{self} is needed, this run is on {run.accelerator.upper()}: "
                f"set --trainer.accelerator={self.kind} on a machine that has one"
            )
        if self.capability is None:
            return None
        import torch

        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            if (major, minor) < self.capability:
                return f"{self} is needed, device {index} has {major}.{minor}: leave it out with CUDA_VISIBLE_DEVICES"
        return None


@dataclass(frozen=True)
class WorldSize:
    """A least number of processes, for example ``WorldSize(at_least=2)``."""

    at_least: int

    def __str__(self) -> str:
        return f"at least {self.at_least} processes"

    def missing(self, run: Any) -> str | None:
        """Returns a line with the number that the run has, or None."""
        if run.world_size >= self.at_least:
            return None
        return (
            f"{self} are needed, this run has {run.world_size}: set --trainer.devices or --trainer.num_nodes"
        )


@dataclass(frozen=True)
class Feature:
    """Something that another selected technique must offer, for example ``Feature("exact_resume")``."""

    name: str

    def __str__(self) -> str:
        return f"the feature {self.name}"

    def missing(self, run: Any) -> str | None:
        """Returns a line that names who among the registered techniques offers the feature, or None."""
        if any(self.name in item.declaration.offers for item in run.selected):
            return None
        from core import catalog

        offering = [entry.name for entry in catalog.offers(self.name)]
        hint = f"select {' or '.join(offering)}" if offering else "no installed package has one that does"
        return f"nothing in this run offers {self.name}: {hint}"


@dataclass(frozen=True)
class Declaration:
    """Declares a class (or function) as a technique: `technique` is this class, used as a decorator.

    What depends on the arguments, a class says in a classmethod ``preflight(run, own)``: see
    :class:`core.contracts.ChecksRun`.

    The decorator returns its argument unchanged but for the recorded declaration. The command line and the conformance
    kit refuse a declaration whose arguments are not of this form.

    Args:
        paper: The paper or source that the technique follows, with section where it has one.
        needs: What must be present: packages, devices, processes, features of other techniques.
        conflicts: Name of another technique -> why the two cannot run together. Declared on either side.
        before: Callbacks whose hooks must fire after this one's, whatever the order in YAML.
        after: Callbacks whose hooks must fire before this one's.
        owns: What only one technique of a run may change: "learning_rate", "sequence_length",
            "batch_size", "gradient_accumulation", "gradient_clipping", "optimizer_step". A schedule owns the
            learning rate, `trainer.gradient_clip_val` the clipping and `trainer.accumulate_grad_batches` the
            accumulation without a declaration.
        offers: Features that other techniques may need, such as "exact_resume".
        api: The versions of the core's API (`core.API_VERSION`) that this was written for, for example
            ">=1,<2"; None: any.
        maturity: "stable" where arguments and results change only with a major version, else "experimental".
        observer: Whether a callback only looks on (logs, draws, saves): it takes no part in trial steps, and is not
            wound back when training goes back. Another callback's `load_state_dict` holds at once, also in mid-run.
        precision_words: Values of `trainer.precision` that mean this precision plugin with its defaults, such as
            ("16", "16-mixed"). Written as literals: they are read without importing anything.
        strategy_words: Values of `trainer.strategy` that mean this strategy with its defaults, such as ("ddp",), in place of
            what Lightning means by them. Literals, too.
        replaces: Name of a class of Lightning or torch that is refused in favour of this -> what is wrong with it.
            Written as literals.
        watches: Deprecated: `observer`.
    """

    paper: str
    needs: Sequence[Need] = ()
    conflicts: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    owns: Sequence[str] = ()
    offers: Sequence[str] = ()
    api: str | None = None
    maturity: Maturity = "experimental"
    observer: bool = False
    precision_words: Sequence[str] = ()
    strategy_words: Sequence[str] = ()
    replaces: Mapping[str, str] = field(default_factory=dict)
    watches: InitVar[bool | None] = None

    def __post_init__(self, watches: bool | None) -> None:
        if watches is not None:
            deprecated("@technique(watches=...)", "observer", 4)
            object.__setattr__(self, "observer", watches)
        for name in ("needs", "before", "after", "owns", "offers", "precision_words", "strategy_words"):
            values = getattr(self, name)  # what is no list stays as it is, for those that check declarations
            if isinstance(values, Iterable) and not isinstance(values, str):
                object.__setattr__(self, name, tuple(values))
        for name in ("conflicts", "replaces"):
            object.__setattr__(self, name, getattr(self, name) or {})

    def __call__(self, target: T) -> T:
        """Records this declaration in a class or function, and returns it."""
        setattr(target, _ATTRIBUTE, self)
        return target


technique = Declaration
"""Declares a class or function as a technique: ``@technique(paper="PaLM, arXiv:2204.02311, section 5.1")``."""


def declaration_of(target: Any) -> Declaration | None:
    """Returns the declaration of a class or function itself; a base class's is not inherited."""
    found: Declaration | None = vars(target).get(_ATTRIBUTE) if hasattr(target, "__dict__") else None
    return found
