"""How the house is laid out: who imports whom, what is registered, what lies where."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from lightning.fabric.plugins import CheckpointIO, Precision
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from core import catalog, contracts
from core.technique import declaration_of

HOUSE = Path(__file__).resolve().parent.parent.parent
TECHNIQUES = ("plugins", "callbacks", "datamodules")
TOP = {"core", *TECHNIQUES, "configs", "tests", "README.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml"}
BASES = (
    contracts.Network,
    contracts.Objective,
    contracts.Tokenizer,
    contracts.DocumentSource,
    contracts.TokenWriter,
    contracts.Transform,
    contracts.Engine,
    Callback,
    CheckpointIO,
    LightningDataModule,
    Logger,
    LRScheduler,
    Optimizer,
    Precision,
    Strategy,
)


def registered():
    """Returns (kind, name, value) of each entry point in pyproject.toml."""
    project = tomllib.loads((HOUSE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {g: lines for g, lines in project["entry-points"].items() if g.startswith("leyden.")}
    return [
        (g.removeprefix("leyden."), name, value)
        for g, lines in groups.items()
        for name, value in lines.items()
    ]


def imported_packages(path, package):
    """Returns the top-level packages that a file imports anywhere, functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(package if node.level else str(node.module).partition(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            found |= {str(arg.value).partition(".")[0] for arg in node.args if isinstance(arg, ast.Constant)}
    return found


@pytest.mark.parametrize("package", ["core", *TECHNIQUES])
def test_arrows_run_one_way(package):
    files = sorted((HOUSE / package).rglob("*.py"))
    assert files
    forbidden = {"tests", *TECHNIQUES} - {package}
    wrong = {
        str(path.relative_to(HOUSE)): found
        for path in files
        if (found := imported_packages(path, package) & forbidden)
    }
    assert not wrong


def test_imports_are_found_wherever_they_stand(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import a.b, c\nfrom d.e import f\nfrom . import g\n"
        "def h():\n    import i\n    importlib.import_module('j.k')\n    __import__('l')\n"
    )
    assert imported_packages(path, "own") == {"a", "c", "d", "own", "i", "j", "l"}


def imported_modules(path):
    """Returns the modules that a file imports anywhere, and the names it takes from them, which may be modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_core_holds_what_it_needs_itself_or_what_several_folders_stand_on():
    users = {}
    for package in ("core", *TECHNIQUES):
        for path in sorted((HOUSE / package).rglob("*.py")):
            for module in imported_modules(path):
                users.setdefault(module, set()).add(package)
    house = [
        path.relative_to(HOUSE).with_suffix("").as_posix().replace("/", ".")
        for path in sorted((HOUSE / "core").rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py") and "testing" not in path.parts
    ]
    assert "core.runs.lightning_cli" in house
    entries = {value.partition(":")[0] for _, _, value in registered()}
    found = {name: users.get(name, set()) for name in house if name not in entries}
    assert not {name: by for name, by in found.items() if "core" not in by and len(by) < 2}


def modules():
    """Imports every module of ours that may hold techniques."""
    for package in TECHNIQUES:
        for module in pkgutil.walk_packages([str(HOUSE / package)], f"{package}."):
            yield importlib.import_module(module.name)


def public_members(module):
    for name, member in vars(module).items():
        if not name.startswith("_") and getattr(member, "__module__", None) == module.__name__:
            yield name, member


@pytest.fixture(scope="module")
def paths():
    return {value.replace(":", ".") for _, _, value in registered()}


def test_what_is_declared_a_technique_is_registered(paths):
    declared = {
        f"{module.__name__}.{name}"
        for module in modules()
        for name, member in public_members(module)
        if (inspect.isclass(member) or inspect.isfunction(member)) and declaration_of(member)
    }
    assert "plugins.networks.gpt.GPT" in declared
    assert not declared - paths


def test_every_class_that_fulfils_a_contract_is_registered(paths):
    fulfilling = {
        f"{module.__name__}.{name}"
        for module in modules()
        for name, member in public_members(module)
        if inspect.isclass(member) and issubclass(member, BASES) and not inspect.isabstract(member)
    }
    assert "callbacks.periodic_checkpoint.PeriodicCheckpoint" in fulfilling
    made_by_a_strategy = {"plugins.strategies.deepspeed_engine.EngineOptimizer"}  # nobody names it
    assert fulfilling - paths == made_by_a_strategy


@pytest.mark.parametrize(("kind", "name", "value"), registered(), ids=lambda part: part)
def test_every_entry_point_leads_to_a_declared_technique_of_its_name(kind, name, value):
    module, _, attribute = value.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    assert kind in catalog.KINDS
    assert target.__name__ == name.replace("-", "_")
    assert target.__module__ == module, "registered where it is imported, not where it is defined"
    assert inspect.isfunction(target) if kind == "commands" else inspect.isclass(target)
    declaration = declaration_of(target)
    assert declaration is not None
    assert declaration.paper
    assert inspect.getdoc(target)
    assert kind == "commands" or "Example:" in target.__doc__


def test_the_installed_entry_points_are_those_of_pyproject():
    installed = {
        (e.kind, e.name, f"{e.module}:{e.attribute}") for e in catalog.entries() if e.package == "leyden"
    }
    assert installed == set(registered()), "pyproject.toml has changed: run `pip install -e .` again"


def test_no_group_is_misspelled():
    assert {kind for kind, _, _ in registered()} <= set(catalog.KINDS)


def test_every_package_has_an_init_file():
    """Without one, a folder is left out of the wheel."""
    folders = {
        path.parent for name in ("core", *TECHNIQUES) for path in (HOUSE / name).rglob("*.py")
    }  # fmt: skip
    parents = {
        parent for folder in folders for parent in (folder, *folder.parents) if HOUSE in parent.parents
    }
    assert not [str(folder) for folder in parents if not (folder / "__init__.py").is_file()]


def test_the_top_level_holds_what_the_design_lists():
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=HOUSE,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    top = {line.partition("/")[0] for line in listing.stdout.splitlines()}
    top = {name for name in top if (HOUSE / name).exists() and not name.startswith(".")}
    assert top == TOP


def lines_of(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_of_the_core_is_longer_than_300_lines():
    assert not {path.name: lines_of(path) for path in (HOUSE / "core").rglob("*.py") if lines_of(path) > 300}
