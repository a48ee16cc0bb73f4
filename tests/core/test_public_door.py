"""There is one door: a technique of ours uses what CONTRIBUTING.md lists as public, as one of anybody else's does."""

import ast
import re
from functools import cache

import pytest

from core import contracts
from tests.support.parsed import forget, nodes, text_of
from tests.support.public_contracts import HOUSE, not_public

FOLDERS = ("plugins", "callbacks", "datamodules")
NOT_TECHNIQUES = (HOUSE / "plugins" / "cli", HOUSE / "plugins" / "commands")
"""What runs techniques; it may use all of core."""


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    """The files are parsed for this module alone."""
    yield
    forget()


def techniques():
    """Returns every file of a technique, and those beside it."""
    files = [path for folder in FOLDERS for path in sorted((HOUSE / folder).rglob("*.py"))]
    return [path for path in files if not any(other in path.parents for other in NOT_TECHNIQUES)]


def test_techniques_take_only_public_names_from_core_and_toolkit():
    found = {str(path.relative_to(HOUSE)): not_public(path) for path in techniques()}
    assert len(found) > 100
    assert not {path: names for path, names in found.items() if names}, (
        "a third party could not write it: list the name in CONTRIBUTING.md, `Public contracts`, and in the module's "
        "__all__, or use another"
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from core.training.shards import gradients, _own", ["1: core.training.shards._own"]),
        ("def f():\n    from core import durable\n    durable._x()", ["2: core.durable._x"]),
        ("from core import durable\ndurable.write(1, 2)", []),
        ("import core.errors", ["1: core.errors.*"]),
        (
            "from core import API_VERSION, lightning_compat as l\nl._keywords",
            ["1: core.lightning_compat._keywords"],
        ),
        ("from toolkit.trials import trial, _steps", ["1: toolkit.trials._steps"]),
    ],
)
def test_names_that_are_not_public_are_found(text, names, tmp_path):
    (tmp_path / "x.py").write_text(text)
    assert not_public(tmp_path / "x.py") == names


@cache
def private_names(path):
    """Returns the private attributes, methods and names that a file defines."""
    pattern = r"(?:\b(?:self|cls|found|other)\.|\bdef |^\s*)(_[a-z]\w*)(?=\s*[:=(,])"
    return set(re.findall(pattern, text_of(path), re.MULTILINE))


TORCHS = {"tensor._base", "scaler._device", "optimizer._step_supports_amp_scaling", "mesh[names]._flatten"}
"""Private names of torch that some file of ours has, too."""


PUBLIC = {"_asdict", "_fields", "_replace"}
"""Documented methods of named tuples, whose underscore only keeps them apart from fields."""


def touched(path, ours):
    """Yields "line: owner.name" where a file uses a private name of ours of another object, defined in another file."""
    others = ours - private_names(path)
    for node in nodes(path, ast.Attribute, ast.ImportFrom):
        if isinstance(node, ast.Attribute):
            if node.attr not in others:
                continue
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()") and f"{owner}.{node.attr}" not in TORCHS:
                yield f"{node.lineno}: {owner}.{node.attr}"
        elif str(node.module).partition(".")[0] in (*FOLDERS, "core", "toolkit"):
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if alias.name.startswith("_"))


def test_techniques_touch_no_private_name_of_another_object_of_ours():
    files = [
        path for folder in (*FOLDERS, "core", "toolkit") for path in sorted((HOUSE / folder).rglob("*.py"))
    ]
    ours = set().union(*map(private_names, files)) - PUBLIC
    assert {"_loader", "_set_rates"} <= ours
    users = [*techniques(), *sorted((HOUSE / "toolkit").glob("*.py"))]
    found = {str(path.relative_to(HOUSE)): list(touched(path, ours)) for path in users}
    assert not {path: names for path, names in found.items() if names}


def test_optional_hooks_are_asked_by_their_protocol_and_not_by_name():
    hooks = {
        name
        for protocol in vars(contracts.offers).values()
        if getattr(protocol, "_is_protocol", False)
        for name in {**vars(protocol), **getattr(protocol, "__annotations__", {})}
        if not name.startswith("_")
    }
    hooks |= {name for name in vars(contracts.Schedule) if not name.startswith("_")}
    assert {
        "loss_group",
        "change_network",
        "pause_clock",
        "stall_s",
        "skip_batches",
        "bind",
        "begin_step",
    } <= hooks
    files = [
        path for folder in ("core", "toolkit", *FOLDERS) for path in sorted((HOUSE / folder).rglob("*.py"))
    ]
    asked = [
        f"{path.relative_to(HOUSE)}:{node.lineno}: {node.args[1].value}"
        for path in files
        for node in nodes(path, ast.Call)
        if getattr(node.func, "id", "") in ("getattr", "hasattr")
        and getattr(node.args[1], "value", None) in hooks
    ]
    assert not asked, "ask with isinstance and the Protocol of core.contracts"
