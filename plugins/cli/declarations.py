"""Checks the form of `@technique(...)` declarations: names, types and values of its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from core.errors import ConfigError, nearest
from core.technique import Declaration, Maturity, Package, declaration_of

OWNABLE = (
    "batch_size",
    "gradient_accumulation",
    "gradient_clipping",
    "learning_rate",
    "optimizer_step",
    "sequence_length",
)
LISTS = ("needs", "before", "after", "owns", "offers", "precision_words", "strategy_words")


def require_sound(target: Any) -> None:
    """Raises a ConfigError that names a class or function whose declaration has an argument of another form."""
    declared = declaration_of(target)
    if declared is not None and (fault := next(_faults(declared), None)):
        name = f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"
        raise ConfigError(f"@technique(...) of {name}: {fault}.")


def _faults(declared: Declaration) -> Iterator[str]:
    for name in LISTS:
        if not isinstance(value := getattr(declared, name), tuple):
            yield f"{name} is {value!r}, not a list: write {name}=[...]"
            return
    if not isinstance(declared.paper, str):
        yield f"paper is {declared.paper!r}, not a text"
    for need in declared.needs:
        if isinstance(need, type) or not callable(getattr(need, "missing", None)):
            example = f"Package({need!r})" if isinstance(need, str) else 'Package("acme>=2")'
            yield f"needs has {need!r}, which is no need: write needs=[{example}]"
        elif isinstance(need, Package) and (fault := _misread(need)):
            yield f"needs has {need!r}, which is no requirement as pip takes it: {fault}"
    for what, reasons in (("conflicts", declared.conflicts), ("replaces", declared.replaces)):
        if not isinstance(reasons, Mapping) or {type(i) for p in reasons.items() for i in p} - {str}:
            yield f"{what} is {reasons!r}, not a mapping of names to reasons"
    for name in (*declared.before, *declared.after, *declared.owns, *declared.offers):
        if not isinstance(name, str):
            yield f"before, after, owns and offers are lists of names; {name!r} is none"
        elif name in declared.owns and name not in OWNABLE:
            yield f"owns has {name!r}.{nearest(name, OWNABLE)} It takes {', '.join(OWNABLE)}"
    if not isinstance(declared.api, str | None):
        yield f"api is {declared.api!r}, not a range of versions, such as '>=1,<2'"
    if declared.maturity not in get_args(Maturity):
        yield f"maturity is {declared.maturity!r}, not one of {', '.join(get_args(Maturity))}"


def _misread(package: Package) -> str | None:
    """Returns why the requirement of a package cannot be read, or None."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(package.requirement)
    except (InvalidRequirement, TypeError) as error:
        return str(error).splitlines()[0]
    return None
