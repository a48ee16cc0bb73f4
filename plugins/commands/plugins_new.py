"""`plugins new`: writes a package with a technique that works, to be changed into another."""

from __future__ import annotations

import ast
import builtins
import keyword
import os
import re
from pathlib import Path

from core import API_VERSION, __version__, catalog
from core.configuration.docstrings import sections
from core.errors import ConfigError
from plugins.commands import (
    plugins_template_data,
    plugins_template_model,
    plugins_template_run,
    plugins_template_steps,
)
from plugins.commands.plugins_template_project import FILES

TEMPLATES = {
    **plugins_template_data.TEMPLATES,
    **plugins_template_model.TEMPLATES,
    **plugins_template_run.TEMPLATES,
    **plugins_template_steps.TEMPLATES,
}
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]*")
_FUNCTION = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def new(name: str, kind: str, output: str | None) -> int:
    """Writes the project of a new technique and says what to type next.

    Raises:
        ConfigError: If there is no template of this kind, the name cannot be used, a file is in the way,
            or the folder cannot be written.
    """
    if kind not in TEMPLATES:
        raise ConfigError(
            f"There is no template for {kind}: too much of one depends on what it wraps. Look at those that "
            f"are there with `python -m core plugins list --kind {kind}`.\n"
            f"There are templates for {', '.join(sorted(TEMPLATES))}."
        )
    word = _checked(name, kind)
    files = project(name, word, kind)
    folder = Path(output or f"leyden-{word.replace('_', '-')}")
    _write(folder, files)
    shown = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    print(f"{len(files)} files in {shown}; {name} is a small technique that works. Next:\n")
    print(f"  cd {shown}\n  pip install -e '.[test]'\n  python -m pytest\n")
    print(f"Then change leyden_{word}/{word}.py and tests/test_{word}.py into yours.")
    return 0


def project(name: str, word: str, kind: str) -> dict[str, str]:
    """Returns path -> content of a project.

    Args:
        name: The technique's name.
        word: The same in lower case with underscores.
        kind: One of `TEMPLATES`.
    """
    source, *tests = TEMPLATES[kind]
    files = {**FILES, "leyden_technique_name/technique_name.py": source}
    files |= zip(("tests/test_technique_name.py", "tests/conftest.py"), tests, strict=False)
    files["README.md"] = _readme(files["README.md"], source)

    api = f">={API_VERSION},<{int(API_VERSION.split('.')[0]) + 1}"

    def filled(text: str) -> str:
        text = text.replace("TechniqueName", name).replace("technique_name", word)
        text = text.replace("technique-name", word.replace("_", "-"))
        text = text.replace("CORE_VERSION", __version__).replace("API_RANGE", api)
        return text.replace("leyden.KIND", f"leyden.{kind}")

    return {filled(path): filled(text).lstrip("\n") for path, text in sorted(files.items())}


def _readme(readme: str, source: str) -> str:
    """Fills in what the technique's docstring says."""
    told = next(
        told for told in map(sections, re.findall(r'"""(.*?)"""', source, re.DOTALL)) if "Example" in told
    )
    usage = f"```{'yaml' if 'class_path' in source else 'sh'}\n{told['Example']}\n```"
    return readme.replace("SUMMARY", told[""].splitlines()[0]).replace("USAGE", usage)


def _checked(name: str, kind: str) -> str:
    """Returns the name in lower case with underscores, once it is one that can be used."""
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    words = [part for part in re.split(r"[^A-Za-z0-9]+|_", word) if part]
    word = "_".join(part.lower() for part in words)
    form, what = (
        (_FUNCTION, "a word like count_tokens") if kind == "commands" else (_CLASS, "like SpikeGuard")
    )
    if not form.fullmatch(name):
        better = word if kind == "commands" else "".join(part[0].upper() + part[1:] for part in words)
        hint = f" Did you mean {better}?" if form.fullmatch(better) else ""
        raise ConfigError(f"{name!r} cannot be a name of {kind}: write it {what}.{hint}")
    if keyword.iskeyword(word) or keyword.iskeyword(name) or hasattr(builtins, name):
        raise ConfigError(f"{name!r} cannot be a name: it is a word of Python's own. Choose another.")
    if name in _bound(TEMPLATES[kind][0]):
        raise ConfigError(f"{name!r} would hide what the template imports under this name. Choose another.")
    rivals = [entry for entry in catalog.entries() if (entry.kind == "commands") == (kind == "commands")]
    taken = [entry.origin for entry in rivals if entry.name == name]
    if taken:
        raise ConfigError(
            f"{name} is a name of {taken[0]} already: with two of them, YAML would have to say the full path.\n"
            "Choose another, or take that package out first."
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


def _write(folder: Path, files: dict[str, str]) -> None:
    """Writes all files, or none if one is there already."""
    there = [path for path in files if os.path.lexists(folder / path)]
    if there:
        raise ConfigError(
            f"{folder} holds {', '.join(there[:3])}{' and more' if len(there) > 3 else ''} already: nothing "
            "was written.\nGive another folder with --output, or move that one away."
        )
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with open(folder / path, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}. Choose another folder with --output."
        ) from error
