"""How the house is laid out: who imports whom, what is registered, what lies where."""

import ast
import functools
import importlib
import inspect
import io
import pkgutil
import re
import subprocess
import tokenize
import tomllib
from pathlib import Path

import lightning
import pytest
from lightning.fabric.plugins import CheckpointIO, Precision
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from core import catalog, contracts
from core.technique import declaration_of
from tests.support.parsed import forget, nodes, text_of, tree_of

HOUSE = Path(__file__).resolve().parent.parent.parent
TECHNIQUES = ("plugins", "callbacks", "datamodules")
ROOMS = ("core", "toolkit", "conformance", *TECHNIQUES)
BELOW = {
    "core": (),
    "toolkit": ("core",),
    **dict.fromkeys(TECHNIQUES, ("core", "toolkit")),
    "conformance": ("core", "toolkit", "plugins"),
    "plugins.commands": ("core", "toolkit", "plugins", "conformance"),
    "core.testing": ("core", "conformance"),
    "core.selection": ("core", "toolkit"),
}
"""Room -> the rooms that it may import. `plugins check` runs the kit, which runs `fit`: the commands are a room of their
own above both. `core.testing` and `core.selection` are former names of `conformance` and `toolkit.selection`, which nothing of ours uses.
"""
TOP = {
    *ROOMS,
    "configs",
    "docs",
    "tests",
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"),
}
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


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    """The files are parsed for this module alone."""
    yield
    forget()


def registered():
    """Returns (kind, name, value) of each entry point in pyproject.toml."""
    project = tomllib.loads((HOUSE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {g: lines for g, lines in project["entry-points"].items() if g.startswith("leyden.")}
    return [
        (g.removeprefix("leyden."), name, value)
        for g, lines in groups.items()
        for name, value in lines.items()
    ]


@functools.cache
def imported_modules(path, typed=True):
    """Returns the modules that a file imports anywhere, functions included, and the names it takes from them.

    Args:
        path: The file; it has no relative imports (a test).
        typed: Whether imports under `if TYPE_CHECKING:` count.
    """
    untyped = set() if typed else {id(node) for node in typing_imports(path)}
    found = set()
    for node in nodes(path, ast.Import, ast.ImportFrom, ast.Call):
        if id(node) in untyped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
            "moved",
        ):
            found.update(str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))
    return found


def typing_imports(path):
    """Yields every node below an `if TYPE_CHECKING:` of a file, its `else:` aside."""
    for node in nodes(path, ast.If):
        if ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                yield from ast.walk(statement)


def test_imports_are_found_wherever_they_are(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import a.b, c\nfrom d.e import f\nfrom . import g\nif TYPE_CHECKING:\n    import m\n"
        "def h():\n    import i\n    importlib.import_module('j.k')\n    __import__('l')\n"
        "__getattr__ = moved(__name__, 'n.o')\n"
    )
    found = {"a.b", "c", "d.e", "d.e.f", ".", "..g", "i", "j.k", "l", "n.o"}
    assert set(imported_modules(path, typed=False)) == found
    assert set(imported_modules(path)) == {*found, "m"}


def room_of(module):
    """Returns the room that a module belongs to, the innermost; None for modules that are not ours."""
    rooms = (room for room in {*BELOW, "tests"} if f"{module}.".startswith(f"{room}."))
    return max(rooms, key=len, default=None)


def module_of(path):
    return ".".join(path.relative_to(HOUSE).with_suffix("").parts).removesuffix(".__init__")


def source_files():
    files = [path for room in ROOMS for path in sorted((HOUSE / room).rglob("*.py"))]
    assert {room_of(module_of(path)) for path in files} == set(BELOW)
    return files


def test_arrows_run_one_way():
    wrong = {}
    for path in source_files():
        room = room_of(module_of(path))
        for module in imported_modules(path):
            if module.startswith(".") or room_of(module) not in (None, room, *BELOW[room]):
                wrong.setdefault(str(path.relative_to(HOUSE)), set()).add(module)
    assert not wrong


def circles(arrows):
    """Returns the groups of modules that import each other, directly or over others (Tarjan's algorithm)."""
    order, low, stack, found = {}, {}, [], []

    def visit(module):
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in arrows[module]:
            if other not in order:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1 or module in arrows[module]:
                found.append(sorted(group))

    for module in arrows:
        if module not in order:
            visit(module)
    return found


def test_circles_are_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert sorted(circles(arrows)) == [["b", "c"], ["e"]]


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions count: they only hide that neither file can be understood without the other."""
    files = {module_of(path): path for path in source_files()}
    arrows = {
        module: (files.keys() & set(imported_modules(path, typed=False))) - {module}
        for module, path in files.items()
    }
    assert not circles(arrows)


def test_nothing_is_said_where_the_command_line_does_not_print_it():
    """It silences Lightning's hints, and `rank_zero_info` with them."""
    assert not [path for path in source_files() if "rank_zero_info" in path.read_text()]


CORE_LINES = 2000
"""The kernel is small: what is not needed to train from Python without YAML belongs in another room.

Lower this number with each file that leaves, and never raise it.
"""


def code_lines(path):
    """Returns the number of a file's lines that hold code: neither blank, nor comments, nor docstrings."""
    source = text_of(path)
    texts = {
        line
        for node in nodes(path, ast.Expr)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    layout = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in layout
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - texts)


def test_code_lines_are_counted_without_blanks_comments_and_docstrings(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        '"""Doc.\n\nMore."""\n\n# comment\nX = 1  # one\n"""Of X."""\n\n\ndef f():\n    """F."""\n    return """\n    two\n    """\n'
    )
    assert code_lines(path) == 5


def test_core_is_small():
    lines = {str(path.relative_to(HOUSE)): code_lines(path) for path in (HOUSE / "core").rglob("*.py")}
    assert lines["core/language_module.py"] > 100
    assert sum(lines.values()) <= CORE_LINES, sorted(lines.items(), key=lambda item: -item[1])


def test_core_holds_what_it_needs_itself_or_what_several_folders_stand_on():
    users = {}
    for package in ROOMS:
        for path in sorted((HOUSE / package).rglob("*.py")):
            for module in imported_modules(path):
                users.setdefault(module, set()).add(package)
    house = [
        path.relative_to(HOUSE).with_suffix("").as_posix().replace("/", ".")
        for path in sorted((HOUSE / "core").rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py", "language_module.py")
        and "testing" not in path.parts
        and path.name != "selection.py"
    ]
    assert "core.training.shards" in house
    entries = {value.partition(":")[0] for _, _, value in registered()}
    found = {name: users.get(name, set()) for name in house if name not in entries}
    assert not {name: by for name, by in found.items() if "core" not in by and len(by) < 2}


COMPAT = HOUSE / "core" / "lightning_compat.py"


@functools.cache
def private_names_of_lightning():
    """Returns every private name that Lightning's loops, trainer, strategies and plugins define or set."""
    house = Path(lightning.__file__).parent
    text = "".join(
        path.read_text(encoding="utf-8")
        for part in ("pytorch", "fabric")
        for path in (house / part).rglob("*.py")
    )
    return set(re.findall(r"(?:\b(?:self|trainer)\.|\bdef )(_[a-z]\w*)", text))


def private_touches(path):
    """Yields (line, name) where a file reads, sets or imports a private name of Lightning; scalers and tensors are torch's."""
    theirs = private_names_of_lightning()
    for node in nodes(path, ast.ImportFrom, ast.Attribute, ast.Call, ast.Constant):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning"):
            for name in (*str(node.module).split("."), *(alias.name for alias in node.names)):
                if name.startswith("_"):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and node.attr in theirs and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()", "scaler", "tensor") and not owner.startswith("torch"):
                yield node.lineno, f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            name = getattr(node.args[1], "value", None)
            if isinstance(name, str) and name in theirs and not name.startswith("__"):
                yield node.lineno, f"{ast.unparse(node.args[0])}.{name}"
        elif isinstance(node, ast.Constant) and node.value in theirs and not node.value.startswith("__"):
            yield node.lineno, repr(node.value)  # a key of a checkpoint, the name of a function on a stack


@functools.cache
def private_members(kind):
    """Returns the private names that a class defines, and those that its methods set or read of `self`."""
    found = {name for name in vars(kind) if re.match(r"_[a-z]", name)}
    return found | set(re.findall(r"\bself\.(_[a-z]\w*)", inspect.getsource(kind)))


def inherited_from_lightning(modules):
    """Returns (module, class) -> private names of Lightning's classes that it, or a class made of it, derives from."""
    found = {}
    for module in modules:
        for kind in filter(inspect.isclass, vars(module).values()):
            theirs = [base for base in kind.__mro__ if base.__module__.startswith("lightning.")]
            names = set().union(*map(private_members, theirs))
            for base in kind.__mro__ if names else ():
                found.setdefault((base.__module__, base.__qualname__), set()).update(names)
    return found


def inherited_touches(path, module, inherited):
    """Yields (line, name) where a class overrides a private name that it inherits from Lightning, or touches its own."""
    for kind in nodes(path, ast.ClassDef):
        names = inherited.get((module, kind.name), ())
        for node in ast.walk(kind) if names else ():
            if isinstance(node, ast.FunctionDef) and node.name in names:
                yield node.lineno, f"def {node.name}"
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
                yield node.lineno, f"{node.id} ="
            elif isinstance(node, ast.Attribute) and node.attr in names:
                yield node.lineno, ast.unparse(node)


def test_touches_of_what_is_inherited_from_lightning_are_found(tmp_path, monkeypatch):
    (tmp_path / "inheriting.py").write_text(
        "from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy\n"
        "class Mixin:\n"
        "    def go(self): return self._stopped, self._mine, self._lightning_module\n"
        "class Own(Mixin, ParallelStrategy):\n"
        "    _checkpoint_io = None\n"
        "    def _configure_launcher(self): self._launcher = super()._accelerator\n"
        "    def _own(self): self._of_its_own = 1\n"
        "class Other(DDPStrategy):\n"
        "    @classmethod\n"
        "    def _get_process_group_backend(cls): return cls._setup_model\n"
        "class Plain:\n"
        "    def _configure_launcher(self): self._launcher = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    inherited = inherited_from_lightning([importlib.import_module("inheriting")])
    found = sorted(inherited_touches(tmp_path / "inheriting.py", "inheriting", inherited))
    assert found == [
        (3, "self._lightning_module"),
        (5, "_checkpoint_io ="),
        (6, "def _configure_launcher"),
        (6, "self._launcher"),
        (6, "super()._accelerator"),
        (10, "cls._setup_model"),
        (10, "def _get_process_group_backend"),
    ]
    (tmp_path / "strings.py").write_text("KEY = '_batches_that_stepped'\nx['_optimizer'], '_nobodys_name'\n")
    assert [line for line, _ in private_touches(tmp_path / "strings.py")] == [1, 2]


@pytest.mark.ci
def test_no_class_touches_what_is_private_in_the_class_of_lightning_that_it_derives_from():
    files = {module_of(path): path for path in source_files() if path.name != "__main__.py"}
    inherited = inherited_from_lightning(map(importlib.import_module, files))
    assert "_launcher" in inherited["plugins.strategies.mesh_strategy", "MeshStrategy"]
    found = {
        f"{path.relative_to(HOUSE)}:{line}": name
        for module, path in files.items()
        if path != COMPAT
        for line, name in inherited_touches(path, module, inherited)
    }
    assert not found, "use a public property or method, or put it into core/lightning_compat.py"


def test_private_names_of_lightning_are_in_one_file():
    assert {name for _, name in private_touches(COMPAT)} > {
        "_collect_rng_states",
        "trainer._signal_connector",
    }
    files = [path for package in ROOMS for path in sorted((HOUSE / package).rglob("*.py"))]
    found = {
        f"{path.relative_to(HOUSE)}:{line}": name
        for path in files
        if path != COMPAT
        for line, name in private_touches(path)
    }
    assert not found, "put it into core/lightning_compat.py, with why there is no public way"


def names_in_code(path):
    """Yields (line, word) for each word of the code and of its texts, docstrings and comments aside."""
    tree = tree_of(path)
    prose = {
        id(part.value)
        for node in ast.walk(tree)
        for part in (node.body if isinstance(getattr(node, "body", 0), list) else ())
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from ((node.lineno, word) for word in re.findall(r"[A-Za-z_]\w*", node.value))
        elif isinstance(node, ast.Name | ast.Attribute):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.alias):
            yield 0, node.name.rpartition(".")[2]


def test_core_and_the_command_line_name_no_technique():
    """What they must know of one, it declares, and they read it through the catalogue."""
    lightnings = {"BatchSizeFinder", "SGD", "AdamW"}  # classes of Lightning and torch have these names, too
    ours = {name for kind, name, _ in registered() if kind != "commands"} - lightnings
    own = {value.rpartition(":")[2] for _, _, value in registered() if value.startswith("core.")}
    files = [path for room in ("core", "plugins/cli") for path in sorted((HOUSE / room).rglob("*.py"))]
    found = {
        (str(path.relative_to(HOUSE)), word)
        for path in files
        for _, word in names_in_code(path)
        if word in ours - own
    }
    advice = {
        ("core/data/token_datamodule.py", "MixtureDataModule"),
        ("core/training/scheduling.py", "BestFit"),
    }
    assert found <= advice, "only messages advise a technique by name"


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
    made_by_ours = {
        "plugins.strategies.deepspeed_engine.EngineOptimizer",
        "plugins.cli.runs.run_record.RunRecord",
        "datamodules.preparation.readers.file_reader.SingleTaskReader",
    }
    assert fulfilling - paths == made_by_ours  # nobody names them


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
        path.parent for name in ROOMS for path in (HOUSE / name).rglob("*.py")
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
    return len(text_of(path).splitlines())


def test_no_source_file_is_longer_than_450_lines():
    """A file is as long as its one idea; the limit only finds files that hold several."""
    files = [path for package in ROOMS for path in (HOUSE / package).rglob("*.py")]
    assert files
    assert not {path.name: lines_of(path) for path in files if lines_of(path) > 450}
