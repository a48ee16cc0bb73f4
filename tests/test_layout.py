"""Where the tests' files are: helpers in tests/support, and no test module that imports another."""

import ast
import re

import pytest

from tests.conftest import HOUSE

TESTS = HOUSE / "tests"
ELSEWHERE = ("support", "benchmarks", "faults", "third_party", "conformance/broken")
"""Folders that hold other modules than tests."""

MODULES = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse((TESTS / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", MODULES)
def test_no_module_imports_a_test_module(path):
    found = {name for name in imported(path) if name.startswith("tests.")}
    assert not {name for name in found if any(part.startswith("test_") for part in name.split("."))}


def test_helpers_are_in_support():
    found = [path for path in MODULES if not path.startswith(tuple(f"{folder}/" for folder in ELSEWHERE))]
    names = {path: path.rpartition("/")[2] for path in found}
    helpers = [path for path, name in names.items() if not name.startswith(("test_", "conftest", "__init__"))]
    assert helpers == ["conformance/compatibility.py"]  # a command, too: docs and configs name it


PROMISES = re.findall(
    r"(?m)^\| .+ \| (\S+)::(\w+) \| (default|ci) \|$", (TESTS / "PROMISES.md").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(("file", "name", "often"), PROMISES, ids=[name for _, name, _ in PROMISES])
def test_a_promise_has_its_test(file, name, often):
    body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    [test] = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    marks = {ast.unparse(mark) for mark in test.decorator_list}
    # what is left to CI as a whole says so; a test that runs by default may leave some of its values to CI
    assert "pytest.mark.slow" not in marks
    assert often == "ci" or "pytest.mark.ci" not in marks


EXPRESSIONS = {
    "not ci and not slow and not gpu": {"default"},  # pytest's, by pyproject.toml
    "not slow and not gpu": {"default", "ci"},  # .ci/run's
}


def test_what_is_promised_is_among_the_tests_of_this_run(request):
    """Also of tests whose marks are those of their parameters; of the files and folders that this run was given."""
    asked = request.config.option
    if (
        asked.markexpr not in EXPRESSIONS
        or asked.keyword
        or any("::" in word for word in request.config.args)
    ):
        pytest.skip("a part of the tests was asked for by name")
    items = {(item.path, getattr(item, "originalname", item.name)) for item in request.session.items}
    given = [request.config.rootpath / word for word in request.config.args]
    missing = [
        f"{file}::{name}"
        for file, name, often in PROMISES
        if often in EXPRESSIONS[asked.markexpr]
        and any((TESTS / file).is_relative_to(root) for root in given)
        and (TESTS / file, name) not in items
    ]
    assert not missing


def test_promises_are_listed():
    assert (
        len(PROMISES) == (TESTS / "PROMISES.md").read_text(encoding="utf-8").count("::test_") - 1
    )  # the text's
    assert len(set(PROMISES)) == len(PROMISES) > 20
