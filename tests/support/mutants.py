"""Changes one thing of a source file at a time, and says which tests notice: those that no other test can replace.

    python -m tests.support.mutants callbacks/gradient_clip.py tests/callbacks/test_gradient_clip.py --count 20

It works on a copy of the repository. Tests are collected once; each mutant is tried in a process forked from there, in
which the functions of the file get the code of the mutant, so that a mutant costs what its tests cost. The file in the
copy is the mutant's as well, for processes that tests start. What a function did while modules were imported stays.
Tests that a mark leaves out by default are left out here, too; `-m` chooses others.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType

import pytest

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


def mutant(text: str, index: int) -> tuple[str, ast.Module]:
    """Returns one of the mutants of a module: its line with what was and what is there, and its tree."""
    tree = ast.parse(text)
    node, new = list(_candidates(tree))[index]
    label = f"{node.lineno}: {ast.unparse(node)[:60]} -> {ast.unparse(new)[:60]}"
    return label.replace("\n", " "), Replace(node, new).visit(tree)


def _candidates(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, ast.AST]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    yield from ((node, new) for new in changes(node))  # type: ignore[misc]


def exchange(path: Path, tree: ast.Module) -> bool:
    """Gives the functions of a file that is imported the code of a mutant; returns whether all could be given it."""
    codes, left = {}, [compile(tree, path, "exec")]
    while left:
        code = left.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
    gc.unfreeze()  # what was imported before the tests were collected is not looked at otherwise
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename == str(path):
            new = codes[each.__code__.co_qualname, each.__code__.co_firstlineno]
            if new.co_freevars != each.__code__.co_freevars:  # such as `super()`, left out
                return False
            each.__code__ = new
    return True


class Tries:
    """Runs the tests that were collected with each mutant, in place of running them once."""

    def __init__(self, file: str, count: int, seconds: float) -> None:
        self.file, self.count, self.seconds = file, count, seconds
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a test that failed."""
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Tries the mutants, and prints who notices."""
        path, end = Path(self.file).resolve(), time.monotonic() + self.seconds
        text = path.read_text(encoding="utf-8")
        failing, costs = noticed(session, self) or ([], {})
        for name in failing:  # it may depend on where the repository lies
            print(f"{name} is left out: it fails without a change")
        session.items = [
            item for item in session.items if item.nodeid in costs and item.nodeid not in failing
        ]
        assert session.items, "no test passes without a change"
        noticing: list[set[str]] = []
        every = len(list(_candidates(ast.parse(text))))
        for label, tree in (mutant(text, index) for index in random.Random(0).sample(range(every), every)):
            if len(noticing) == self.count or time.monotonic() > end:
                break
            path.write_text(ast.unparse(tree), encoding="utf-8")
            Path(importlib.util.cache_from_source(str(path))).unlink(
                missing_ok=True
            )  # perhaps the last mutant's
            found = noticed(session, self, lambda tree=tree: exchange(path, tree))  # type: ignore[misc]
            path.write_text(text, encoding="utf-8")
            if found and not found[1]:
                print(f"{self.file}:{label}: left out, as functions that are there cannot take its code")
                continue
            failed = set(found[0]) if found else set()
            noticing.append(failed)
            who = f"{len(failed)} tests" if len(failed) != 1 else next(iter(failed))
            print(f"{self.file}:{label}: {who if failed else 'NOBODY' if found else 'a hang'}", flush=True)
        print("\ntest | CPU seconds | mutants noticed | alone | needed beside the others")
        needed = cover(noticing)
        for name in sorted((item.nodeid for item in session.items), key=lambda name: (name in needed, name)):
            alone = sum(failed == {name} for failed in noticing)
            count = sum(name in failed for failed in noticing)
            print(f"{name} | {costs[name]:.2f} | {count} | {alone} | {name in needed}")
        return True


def noticed(
    session: pytest.Session, failed: Tries, change: Callable[[], bool] = lambda: True
) -> tuple[list[str], dict[str, float]] | None:
    """Runs tests in a forked process; returns those that failed, and the CPU seconds of each; None if they hang.

    Args:
        session: The tests.
        failed: Who is told of failed tests.
        change: What is done before; where it returns false, no test is run.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        sys.stdout.flush()
        process = os.fork()
        if not process:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            costs: dict[str, float] = {}
            with suppress(BaseException):
                for item, following in (
                    zip(session.items, [*session.items[1:], None], strict=True) if change() else ()
                ):
                    before = sum(os.times()[:4])
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                    costs[item.nodeid] = sum(os.times()[:4]) - before
            answer.write_text(json.dumps([sorted(failed.failed), costs]))
            os._exit(0)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and not os.waitpid(process, os.WNOHANG)[0]:
            time.sleep(0.05)
        with suppress(
            ProcessLookupError, ChildProcessError
        ):  # it is over, though its own children may not be
            os.killpg(process, 9)
            os.waitpid(process, 0)
        return json.loads(answer.read_text()) if answer.exists() else None


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
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then no further mutant is begun")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copied(Path(folder).resolve())
        words = ["-q", "-n0", "-p", "no:cacheprovider", "--capture=no", "--tb=no", *options.tests, *more]
        pytest.main(words, plugins=[Tries(options.file, options.count, options.seconds)])


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
