"""CONTRIBUTING.md: its commands work, and the public contracts that it lists are those of the modules."""

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path
from typing import TypeVar

import pytest

from core import catalog
from core.__main__ import main
from tests.support.public_contracts import listed_names, section


def public_names(module):
    """Returns what a module defines, or exports if it says so, and does not mark as its own affair."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {
        name for name in found if not name.startswith("_") and not isinstance(getattr(module, name), TypeVar)
    }


@pytest.mark.parametrize("name", listed_names())
def test_the_listed_contracts_are_what_the_module_offers(name):
    names = listed_names()[name]
    assert names == sorted(names, key=str.casefold)
    assert set(names) == public_names(importlib.import_module(name))


def test_what_else_is_listed_exists():
    paths = set(re.findall(r"`((?:core|conformance)\.[\w.]+)`", section("Public contracts"))) - set(
        listed_names()
    )
    assert {"core.API_VERSION", "conformance.KIT_VERSION"} <= paths
    for path in paths:
        assert pkgutil.resolve_name(path) is not None


def test_the_listed_groups_are_all_there_are():
    assert set(re.findall(r"`leyden\.(\w+)`", section("Public contracts"))) == set(catalog.KINDS)


def commands():
    """Returns the indented commands of the page that shows how to write a technique, in their order."""
    text = re.sub(r"^```.*?^```$", "", section("Write a technique"), flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"(?:^ {4}\S.*\n)+", text, re.MULTILINE)
    return "".join(blocks).replace("\n    ", "\n").strip()


def test_a_command_builds_a_reader_by_name(packages, tmp_path, capsys):
    """The page's own lines, in a package of somebody else's, called as a command."""
    [block] = re.findall(
        r"^  ```python\n(.*?)^  ```$", section("Write a technique"), re.MULTILINE | re.DOTALL
    )
    command = (
        "\n\ndef list_texts(arguments):\n"
        "    for text in reader(*arguments).documents():\n"
        "        print(text)\n"
    )
    entries = {"leyden.commands": {"list-texts": "lister:list_texts"}}
    packages.add("lister", entries, textwrap.dedent(block) + command)
    (tmp_path / "notes.txt").write_text("a text")
    assert main(["list-texts", "TextDocuments", str(tmp_path / "notes.txt")]) == 0
    assert capsys.readouterr().out == "a text\n"
    for name, said in (
        ("TextDocument", "Did you mean TextDocuments?"),
        ("Concatenate", "does not read documents"),
    ):
        assert main(["list-texts", name, str(tmp_path / "notes.txt")]) == 2
        assert said in capsys.readouterr().err


@pytest.fixture
def environment(tmp_path):
    """Makes an environment that sees what is installed here, installs into itself, and looks nothing up."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    pip = folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m pip "$@"\n')
    pip.chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **os.environ,
        "PATH": path,
        "PIP_NO_BUILD_ISOLATION": "false",  # which means: none
        "PIP_NO_INDEX": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.ci
def test_from_plugins_new_to_a_passing_kit_every_command_works(environment, tmp_path):
    script = commands()
    assert script.startswith("python -m core plugins new SpikeGuard")
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ran = [line.removeprefix("+ ") for line in done.stderr.splitlines() if line.startswith("+ ")]
    assert len(ran) == len(script.splitlines())
    assert "resumes_bitwise" in done.stdout
