"""Changes one thing of a source file at a time, and says which tests notice: those that no other test can replace.

    python -m tests.support.mutants callbacks/gradient_clip.py tests/callbacks/test_gradient_clip.py --count 20

It works on a copy of the repository. Each mutant is tried in a process that is forked from one that has imported torch
and Lightning. Tests that a mark leaves out by default are left out here, too; `-m` chooses others.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

IMPORTED = ("torch", "lightning.pytorch", "jsonargparse", "torch._inductor.compile_fx", "transformers")
SECONDS = 240
"""After so long a mutant counts as noticed by no test in particular: it hangs."""

FLIPPED = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what may stand in place of a node of a function's body."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in FLIPPED:
        other.ops[0] = FLIPPED[type(other.ops[0])]()  # type: ignore[abstract]
        yield other
    elif isinstance(other, ast.BoolOp | ast.BinOp) and type(other.op) in FLIPPED:
        other.op = FLIPPED[type(other.op)]()  # type: ignore[abstract, assignment]
        yield other
    elif isinstance(other, ast.Constant) and isinstance(other.value, bool | int | float):
        other.value = not other.value if isinstance(other.value, bool) else other.value + 1
        yield other
    elif isinstance(other, ast.Return) and ast.unparse(other) not in ("return", "return None"):
        other.value = ast.Constant(None)
        yield other
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not):
        yield other.operand
    elif isinstance(other, ast.Assign | ast.AugAssign | ast.Raise) or (
        isinstance(other, ast.Expr) and not isinstance(other.value, ast.Constant | ast.Yield)
    ):
        yield ast.Pass()


class Replace(ast.NodeTransformer):
    """Puts another node in the place of one."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        """Looks at a node."""
        if node is self.old:
            return ast.fix_missing_locations(ast.copy_location(self.new, node))
        return super().generic_visit(node)


def mutants(text: str) -> list[tuple[str, str]]:
    """Returns each mutant of a module: its line with what was and what is there, and its source."""
    count = len([node for node, _ in _candidates(ast.parse(text))])
    found = []
    for index in range(count):
        tree = ast.parse(text)
        node, new = list(_candidates(tree))[index]
        label = f"{node.lineno}: {ast.unparse(node)[:60]} -> {ast.unparse(new)[:60]}"
        found.append((label.replace("\n", " "), ast.unparse(Replace(node, new).visit(tree))))
    return found


def _candidates(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, ast.AST]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    yield from ((node, new) for new in changes(node))  # type: ignore[misc]


class Failed:
    """Notes which tests failed."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.all: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a test."""
        self.all.add(report.nodeid)
        if report.failed:
            self.names.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes a file that cannot be collected."""
        if report.failed:
            self.names.add(report.nodeid)


def noticed(words: list[str]) -> tuple[set[str], set[str]] | None:
    """Runs tests in a forked process; returns those that failed, and all; None if they hang."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        process = os.fork()
        if not process:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            found = Failed()
            with suppress(BaseException):
                pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "--tb=no", *words], plugins=[found])
            answer.write_text(json.dumps([sorted(found.names), sorted(found.all)]))
            os._exit(0)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and not os.waitpid(process, os.WNOHANG)[0]:
            time.sleep(0.05)
        with suppress(
            ProcessLookupError, ChildProcessError
        ):  # it is over, though its own children may not be
            os.killpg(process, 9)
            os.waitpid(process, 0)
        if not answer.exists():
            return None
        failed, every = json.loads(answer.read_text())
        return set(failed), set(every)


def copied(folder: Path) -> None:
    """Copies what git knows, and the metadata of the installed package, into a folder; goes there."""
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, folder / name)
    for info in Path().glob("*.egg-info"):
        shutil.copytree(info, folder / info)
    os.chdir(folder)
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", os.environ.get("PWD")))]
    os.environ["PYTHONPATH"] = str(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]


def main() -> None:
    """Tries mutants of a file, and prints who notices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("tests", nargs="+", help="tests, and further arguments of pytest")
    parser.add_argument("--count", type=int, default=20)
    options, more = parser.parse_known_args()
    words = [*options.tests, *more]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copied(Path(folder))
        path, text = Path(options.file), Path(options.file).read_text(encoding="utf-8")
        usual = noticed(words)
        assert usual is not None
        for name in sorted(usual[0]):  # it may depend on where the repository lies
            print(f"{name} is left out: it fails without a change")
        working = usual[1] - usual[0]
        assert working, f"no test of {' '.join(words)} passes without a change"
        noticing: list[set[str]] = []
        every = mutants(text)
        for label, source in random.Random(0).sample(every, min(options.count, len(every))):
            path.write_text(source, encoding="utf-8")
            found = noticed(words)
            failed = found[0] & working if found else set()
            noticing.append(failed)
            who = f"{len(failed)} tests" if len(failed) != 1 else next(iter(failed))
            said = (
                who
                if failed
                else "all, as none starts"
                if found and found[0]
                else "NOBODY"
                if found
                else "a hang"
            )
            print(f"{options.file}:{label}: {said}", flush=True)
    print("\ntest | mutants noticed | alone | needed beside the others")
    needed = cover(noticing)
    for name in sorted(working, key=lambda name: (name in needed, name)):
        alone = sum(failed == {name} for failed in noticing)
        print(f"{name} | {sum(name in failed for failed in noticing)} | {alone} | {name in needed}")


def cover(noticing: list[set[str]]) -> set[str]:
    """Returns few tests that notice all that any notices: each time the one that notices most of what is left."""
    left, needed = [failed for failed in noticing if failed], set[str]()
    while left:
        best = max(sorted(set().union(*left)), key=lambda name: sum(name in failed for failed in left))
        needed.add(best)
        left = [failed for failed in left if best not in failed]
    return needed


if __name__ == "__main__":
    main()
