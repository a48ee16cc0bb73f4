"""`plugins new --into`: a module, a test and one line in a package that is there; all of it, or nothing."""

import os
import subprocess
import sys
import tomllib

import pytest

from core import catalog
from core.__main__ import main

BASE = """\
# my package
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "acme-lab"
version = "3"   # the third
{project}
[tool.setuptools]
packages = ["acme"]
{end}"""

TABLE = """
[project.entry-points."leyden.callbacks"]
# ours
Old = "acme.old:Old"   # since 2

# Older = "acme.older:Older"

"""


@pytest.fixture
def package(tmp_path):
    """Writes a package; returns its folder."""

    def write(project="", end="", folder="acme", name="pyproject.toml", newline="\n"):
        home = tmp_path / "lab"
        (home / folder).mkdir(parents=True)
        (home / folder / "__init__.py").write_text("")
        text = BASE.format(project=project, end=end).replace("\n", newline)
        (home / name).write_bytes(text.encode())
        return home

    return write


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def add(folder, name="Guard", kind="callbacks", *words):
    return main(["plugins", "new", name, "--kind", kind, "--into", str(folder), *words])


def test_a_line_comes_into_the_table_that_is_there(package, capsys):
    home = package(project=TABLE, newline="\r\n")
    home.joinpath("pyproject.toml").chmod(0o600)
    before = home.joinpath("pyproject.toml").read_bytes().decode()
    assert add(home) == 0
    after = home.joinpath("pyproject.toml").read_bytes().decode()
    old = 'Old = "acme.old:Old"   # since 2\r\n'
    assert after == before.replace(old, old + 'Guard = "acme.guard:Guard"\r\n')
    assert home.joinpath("pyproject.toml").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in home.rglob("*.py")) == ["__init__.py", "guard.py", "test_guard.py"]
    assert "from acme.guard import Guard\n" in (home / "tests" / "test_guard.py").read_text()
    assert "--leyden-package acme-lab" in capsys.readouterr().out


def test_a_table_comes_behind_all_others(package):
    home = package(end='\n[tool.pytest.ini_options]\ntestpaths = ["checks"]')
    before = home.joinpath("pyproject.toml").read_text()
    assert add(home, "list-runs", "commands") == 0
    assert home.joinpath("pyproject.toml").read_text() == (
        f'{before}\n\n[project.entry-points."leyden.commands"]\nlist-runs = "acme.list_runs:list_runs"\n'
    )
    assert (home / "checks" / "test_list_runs.py").is_file()


@pytest.mark.parametrize(
    "project",
    [
        'entry-points."leyden.callbacks".Old = "acme.old:Old"',  # dotted keys cannot be added to by a table
        'entry-points = {"leyden.callbacks" = {Old = "acme.old:Old"}}',
        'dynamic = ["entry-points"]',
        "entry-points = 5",
    ],
)
def test_what_cannot_be_added_to_stays_as_it_is(project, package, capsys):
    home = package(project=project)
    before = contents(home)
    assert add(home) == 2
    assert "cannot be added to. Nothing was written" in capsys.readouterr().err
    assert contents(home) == before


def test_the_python_package_is_found(package, tmp_path, capsys):
    home = package(project=TABLE, folder="src/acme")
    (home / "other").mkdir()
    (home / "other" / "__init__.py").write_text("")
    assert add(home) == 0
    assert (home / "src" / "acme" / "guard.py").is_file()
    (home / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert add(home, "Second") == 2
    assert "there is several packages (acme, other)" in capsys.readouterr().err
    (home / "x").mkdir()
    (home / "x" / "__init__.py").write_text("")
    assert add(home, "Second") == 0
    assert (home / "x" / "second.py").is_file()


def test_what_is_there_is_not_touched(package, capsys):
    home = package(project=TABLE)
    (home / "acme" / "guard.py").write_text("mine")
    before = contents(home)
    assert add(home) == 2
    assert "guard.py already: nothing was written" in capsys.readouterr().err
    assert add(home, "Old") == 2
    assert "Old is there already" in capsys.readouterr().err
    assert contents(home) == before


def test_a_write_that_fails_leaves_nothing(package, capsys, monkeypatch):
    home = package(project=TABLE)
    before = contents(home)

    def full(*paths):
        raise OSError(28, "No space left on device", str(home / "pyproject.toml"))

    monkeypatch.setattr(os, "replace", full)
    assert add(home) == 2
    assert "No space left on device. Nothing was written." in capsys.readouterr().err
    assert contents(home) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\xff", "can't decode byte"),
        (b"[project", "Expected"),
        (b"project = 3", "has no [project] with a name"),
        (b"[project]\nname = 3", "has no [project] with a name"),
        (b'[project]\nname = "x"', "there is no package with an __init__.py"),
    ],
)
def test_what_is_no_package_is_refused(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "pyproject.toml").write_bytes(content)
    before = contents(tmp_path)
    assert add(tmp_path) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) <= 10
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--into", "a", "--output", "b"], "give one of them"),
        (["--contract", "Transform"], "It has one contract only"),
        (["--into", "a\0b"], "has a NUL character"),
        (["--into", "a" * 300], "name too long"),
        (["--output", "a" * 300], "name too long"),
        (["--output", "a\0b"], "has a NUL character"),
    ],
)
def test_options_that_cannot_be(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "Guard", "--kind", "callbacks", *words]) == 2
    assert message in capsys.readouterr().err.replace("File", "file")
    assert list(tmp_path.iterdir()) == []


def test_contracts_have_names(capsys):
    assert main(["plugins", "new", "Guard", "--kind", "data", "--contract", "Transfrom"]) == 2
    assert (
        "Did you mean Transform? It has templates for DocumentSource, Transform." in capsys.readouterr().err
    )


@pytest.mark.slow  # what CI tests of `plugins new` holds for each kind
def test_what_was_added_is_installed_checked_and_passes_its_test(tmp_path, monkeypatch, capsys):
    assert main(["plugins", "new", "Guard", "--kind", "callbacks", "--output", str(tmp_path / "lab")]) == 0
    for name, kind, *words in (("list-runs", "commands"), ("Short", "data", "--contract", "Transform")):
        assert add(tmp_path / "lab", name, kind, *words) == 0
    groups = tomllib.loads((tmp_path / "lab" / "pyproject.toml").read_text())["project"]["entry-points"]
    assert list(groups) == ["leyden.callbacks", "leyden.commands", "leyden.data"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    done = subprocess.run([*install, tmp_path / "site", tmp_path / "lab"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "site"))
        catalog.entries.cache_clear()
        try:
            assert main(["plugins", "check", "leyden-guard"]) == 0, capsys.readouterr().out
        finally:
            catalog.entries.cache_clear()
            for name in [name for name in sys.modules if name.startswith("leyden_guard")]:
                del sys.modules[name]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-o", "addopts="]
    done = subprocess.run(words, cwd=tmp_path / "lab", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
