"""`plugins new`: writes a package with a technique that works, to be changed into another."""

from __future__ import annotations

import ast
import builtins
import keyword
import os
import re
from pathlib import Path

from core import API_VERSION, __version__, catalog
from core.errors import ConfigError, nearest
from plugins.cli.configuration.docstrings import sections
from plugins.commands.plugins_into import Package, all_or_none

FOLDER = Path(__file__).parent / "templates"
"""A folder for each template: its module and its test; `project/` has what goes around them. They are text, never run."""

PROJECT = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".github/workflows/test.yml": "test.yml",
    "leyden_technique_name/__init__.py": "__init__.py",
}
"""Path in a new project -> its file in `templates/project`."""

CONTRACTS: dict[str, tuple[str, ...]] = {"data": ("DocumentSource", "Transform")}
"""Kind -> the contracts that it has templates for, where there are several; the first is usual."""
TEMPLATES = (*catalog.KINDS, *(f"{kind}-{name}" for kind, names in CONTRACTS.items() for name in names[1:]))

_CLASS = re.compile(r"[A-Z][A-Za-z0-9]*")
_WORD = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def new(
    name: str, kind: str, output: str | None, into: str | None = None, contract: str | None = None
) -> int:
    """Writes the project of a new technique, or adds it to one that is there, and says what to type next.

    Args:
        name: The technique's.
        kind: Its kind.
        output: The folder of a new project; None: after the name.
        into: The folder of a project that is there.
        contract: Which of its kind's contracts it keeps; None: the usual one.

    Raises:
        ConfigError: If the name or contract cannot be used, a file is in the way, or the folder cannot be written.
    """
    if output and into:
        raise ConfigError("--output makes a new package, --into adds to one that is there: give one of them.")
    template = _template(kind, contract)
    word = _checked(name, kind, template)
    if into:
        package = Package(into)
        source, test = (_filled(text, name, word, kind, package.module) for text in _texts(template))
        written = package.add(kind, name, _attribute(name, kind), word, (source, test))
        _print_next_steps([*map(str, written)], name, into, package.name)
        return 0
    files = project(name, word, kind, template)
    folder = Path(output or f"leyden-{word.replace('_', '-')}")
    with all_or_none({folder / path: text for path, text in files.items()}):
        pass
    shown = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    print(f"{len(files)} files in {shown}; {name} is a small technique that works. Next:\n")
    print(f"  cd {shown}\n  pip install -e '.[test]'\n  python -m pytest\n")
    print(f"Then change leyden_{word}/{word}.py and tests/test_{word}.py into yours.")
    return 0


def _print_next_steps(written: list[str], name: str, folder: str, package: str) -> None:
    source, test, metadata = written
    print(f"{source}, {test} and a line in {metadata}; {name} is a small technique that works. Next:\n")
    print(f"  cd {folder}\n  pip install -e .\n  python -m pytest --leyden-package {package}\n")
    print("Then change the first two into yours.")


def _template(kind: str, contract: str | None) -> str:
    """Returns the key of a template."""
    known = CONTRACTS.get(kind, ())
    if contract is not None and contract not in known:
        others = (
            f"It has templates for {', '.join(known)}."
            if known
            else "It has one contract only: leave it out."
        )
        raise ConfigError(f"--contract {contract} is none of {kind}.{nearest(contract, set(known))} {others}")
    return kind if contract is None or contract == known[0] else f"{kind}-{contract}"


def _texts(template: str) -> tuple[str, str]:
    """Returns the module and the test of a template."""
    return _text(f"{template}/technique_name.py"), _text(f"{template}/test_technique_name.py")


def _text(name: str) -> str:
    return (FOLDER / f"{name}.template").read_text(encoding="utf-8")


def project(name: str, word: str, kind: str, template: str | None = None) -> dict[str, str]:
    """Returns path -> content of a project.

    Args:
        name: The technique's name.
        word: The same in lower case with underscores.
        kind: Its kind.
        template: One of `TEMPLATES`; None: the usual one of its kind.
    """
    source, test = _texts(template or kind)
    files = {path: _text(f"project/{name}") for path, name in PROJECT.items()}
    files |= {"leyden_technique_name/technique_name.py": source, "tests/test_technique_name.py": test}
    files["README.md"] = _readme(files["README.md"], source)
    module = f"leyden_{word}"
    return {
        _filled(path, name, word, kind, module): _filled(text, name, word, kind, module)
        for path, text in sorted(files.items())
    }


def _filled(text: str, name: str, word: str, kind: str, module: str) -> str:
    """Puts names into a template; `module` is the Python package."""
    api = f">={API_VERSION},<{int(API_VERSION.split('.')[0]) + 1}"
    names = {
        "leyden_technique_name": module,
        "TechniqueName": _attribute(name, kind),
        "ENTRY_NAME": name,
        "technique_name": word,
        "technique-name": word.replace("_", "-"),
        "CORE_VERSION": __version__,
        "API_RANGE": api,
        "leyden.KIND": f"leyden.{kind}",
    }
    return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], text)


def _attribute(name: str, kind: str) -> str:
    """Returns the name of the class, or of a command's function."""
    return name.replace("-", "_") if kind == "commands" else name


def _readme(readme: str, source: str) -> str:
    """Fills in what the technique's docstring says."""
    docstring = next(
        docstring
        for docstring in map(sections, re.findall(r'"""(.*?)"""', source, re.DOTALL))
        if "Example" in docstring
    )
    usage = f"```{'yaml' if 'class_path' in source else 'sh'}\n{docstring['Example']}\n```"
    return readme.replace("SUMMARY", docstring[""].splitlines()[0]).replace("USAGE", usage)


def _checked(name: str, kind: str, template: str) -> str:
    """Returns the name in lower case with underscores, once it is one that can be used."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    words = [part for part in re.split(r"[^A-Za-z0-9]+", spaced) if part]
    word = "_".join(part.lower() for part in words)
    form, what = (_WORD, "a word like count-tokens") if kind == "commands" else (_CLASS, "like SpikeGuard")
    if not form.fullmatch(name):
        better = "".join(part[0].upper() + part[1:] for part in words)
        better = word.replace("_", "-") if kind == "commands" else better
        hint = f" Did you mean {better}?" if form.fullmatch(better) else ""
        raise ConfigError(f"{name!r} cannot be a name of {kind}: write it {what}.{hint}")
    if len(name) > 60:
        raise ConfigError(f"{name[:20]}... cannot be a name: it has {len(name)} characters, 60 are the most.")
    if keyword.iskeyword(word) or keyword.iskeyword(name) or hasattr(builtins, name):
        raise ConfigError(f"{name!r} cannot be a name: it is a word of Python's own. Choose another.")
    if _attribute(name, kind) in _bound(_texts(template)[0]):
        raise ConfigError(f"{name!r} would hide what the template imports under this name. Choose another.")
    rivals = [entry for entry in catalog.entries() if (entry.kind == "commands") == (kind == "commands")]
    taken = [entry.origin for entry in rivals if entry.name == name]
    if taken:
        raise ConfigError(
            f"The name {name} is taken by {taken[0]}: with two of one name, YAML needs the full path.\n"
            "Choose another, or uninstall that package first."
        )
    return word


def _bound(source: str) -> set[str]:
    """Returns the names that a module's imports and classes bind."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
    return found
