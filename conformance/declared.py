"""Proofs that only import and read: registration, declaration, documentation, conflicts."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from conformance.case import Case
from conformance.proof import proof, require
from core import API_VERSION, catalog
from core.contracts import ChecksRun
from core.errors import ConfigError
from core.technique import Declaration, declaration_of
from plugins.cli import declarations, preflight, selection
from plugins.cli.configuration.docstrings import described, documented, sections
from plugins.cli.configuration.signatures import parameters
from plugins.cli.configuration.yaml_texts import parse_yaml
from toolkit.selection import Run

BASES = {
    "callbacks": "lightning.pytorch.callbacks.Callback",
    "checkpoints": "lightning.fabric.plugins.CheckpointIO",
    "datamodules": "lightning.pytorch.LightningDataModule",
    "evaluations": "toolkit.evaluation.Evaluation",
    "loggers": "lightning.pytorch.loggers.Logger",
    "networks": "core.contracts.Network",
    "objectives": "core.contracts.Objective",
    "optimizers": "torch.optim.Optimizer",
    "precision": "lightning.fabric.plugins.Precision",
    "rewards": "toolkit.rewards.Reward",
    "schedules": "torch.optim.lr_scheduler.LRScheduler",
    "strategies": "lightning.pytorch.strategies.Strategy",
}
"""Kind -> what its classes derive from. Adapters and `data` have several contracts and are not held to one."""


@proof(runs=False)
def has_a_name_of_its_own(case: Case) -> None:
    """No other technique is registered under its name, so that the short name can be used."""
    entry = case.entry
    rivals = [e for e in catalog.entries() if (e.kind == "commands") == (entry.kind == "commands")]
    same = [e.origin for e in rivals if e.name == entry.name]
    require(
        len(same) == 1, f"registered {len(same)} times ({', '.join(same)}): only the full path can be used"
    )


@proof(runs=False)
def imports(case: Case) -> None:
    """Its module is imported without an error."""
    _ = case.target


@proof(runs=False)
def leads_to_its_name(case: Case) -> None:
    """The entry point leads to what has the entry's name, with underscores for the hyphens of a command."""
    name = getattr(case.target, "__name__", None)
    require(
        name == case.entry.name.replace("-", "_"),
        f"the entry is named {case.entry.name}, what it leads to {name or case.target!r}",
    )


@proof(runs=False)
def is_declared(case: Case) -> None:
    """It carries @technique and names a paper or source; its `preflight`, if it has one, yields lines."""
    declarations.require_sound(case.target)
    declaration = declaration_of(case.target)
    require(declaration is not None, "not declared: put @technique(paper=...) on it")
    require(
        declaration and declaration.paper.strip(),
        "@technique(paper=...) is empty: name the paper or source",
    )
    if isinstance(case.target, ChecksRun):
        answer = _answer(case)
        require(
            answer is not None and not isinstance(answer, str),
            f"preflight returns {answer!r}, where it has to yield a line for each problem",
        )


def _answer(case: Case) -> Any:
    """Returns what a `preflight` says of the defaults; no lines where it cannot judge them without a run."""
    arguments = {name: argument.default for name, argument in parameters(case.target)[0].items()}
    own = selection.describe("own", case.target, case.entry.class_path, arguments)
    try:
        return case.target.preflight(Run((own,)), own)
    except Exception:  # a run with all that it needs is tried by the proofs that train
        return ()


@proof(runs=False)
def is_for_this_api(case: Case) -> None:
    """It is written for this version of the core's API."""
    wanted = getattr(declaration_of(case.target), "api", None) or ""
    advice = catalog.upgrade(wanted, API_VERSION, case.entry.package)
    require(advice is None, f"written for core API {wanted}, this is {API_VERSION}: {advice}")


@proof(runs=False)
def is_of_its_kind(case: Case) -> None:
    """It is a class of its kind that can be built; a command is a function."""
    target, kind = case.target, case.entry.kind
    if kind == "commands":
        wanted = "a command is a function that takes the arguments after its name"
        require(callable(target) and not inspect.isclass(target), wanted)
        return
    require(inspect.isclass(target), f"not a class but a {type(target).__name__}")
    problems = []
    if path := BASES.get(kind):
        module, _, name = path.rpartition(".")
        if not issubclass(target, getattr(importlib.import_module(module), name)):
            problems.append(f"does not derive from {path}")
    if inspect.isabstract(target):
        problems.append(f"cannot be built: {', '.join(sorted(target.__abstractmethods__))} is not written")
    require(not problems, "\n".join(problems))


@proof(runs=False)
def is_documented(case: Case) -> None:
    """Its docstring says what it does; it, or that of a base class, describes each argument."""
    target = case.target
    docstring = sections(getattr(target, "__doc__", None))
    require(docstring[""], "no docstring")
    if not inspect.isclass(target):
        return
    described_at_all, taken = described(target), parameters(target)[0]
    problems = []
    if missing := [name for name in taken if name not in described_at_all]:
        problems.append(f"`Args:` does not describe {', '.join(missing)}")
    if unknown := [name for name in documented(docstring.get("Args", "")) if name not in taken]:
        problems.append(f"`Args:` describes what is no argument: {', '.join(unknown)}")
    require(not problems, "\n".join(problems))


@proof(runs=False)
def shows_an_example(case: Case) -> None:
    """Its docstring has an `Example:` that can be pasted: YAML that names it, or a command line."""
    docstring = sections(getattr(case.target, "__doc__", None))
    if case.entry.kind != "commands" or "Example" in docstring:
        problem = example_problem(case.entry, docstring.get("Example", ""))
        require(problem is None, problem or "")


def example_problem(entry: catalog.Entry, snippet: str) -> str | None:
    """Returns what is wrong with the snippet of a docstring's Example section, or None."""
    if not snippet:
        return "the docstring has no `Example:` section"
    if entry.kind == "commands":
        found = re.search(rf"(-m core|leyden) {re.escape(entry.name)}\b", snippet)
        return None if found else f"the example does not call `python -m core {entry.name}`"
    try:
        parse_yaml(snippet, "the example")
    except ConfigError as error:
        return str(error).splitlines()[0]
    return None if re.search(rf"\b{entry.name}\b", snippet) else f"the example does not name {entry.name}"


@proof(runs=False)
def conflicts_raise(case: Case) -> None:
    """A selection with what it declares a conflict with is refused, with the reason."""
    declaration = declaration_of(case.target) or Declaration(paper="")
    own = selection.describe("trainer.callbacks.0", case.target, case.entry.class_path)
    for other, reason in declaration.conflicts.items():
        require(str(reason).strip(), f"the conflict with {other} has no reason")
        require(other != case.entry.name, "it is declared to conflict with itself")
        stand_in = type(other, (), {})  # the other need not be installed
        pair = own, selection.describe("trainer.callbacks.1", stand_in, f"stand_in.{other}")
        refusal = ""
        try:
            preflight.check(Run(pair))
        except ConfigError as error:
            refusal = " ".join(str(error).split())
        require(
            other in refusal and " ".join(reason.split()) in refusal,
            f"with {other} it is {'refused, but not for that: ' + refusal if refusal else 'not refused'}",
        )
