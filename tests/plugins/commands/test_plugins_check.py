"""`plugins check`: each way in which a technique can be broken is found and said."""

import pytest

from core import catalog
from core.__main__ import main

SOUND = '''
from lightning.pytorch import Callback
from core.contracts import Network
from core.technique import technique

@technique(paper="a blog post")
class Guard(Callback):
    """Guards.

    Args:
        limit: The highest loss.

    Example:
        trainer:
          callbacks+:
            - class_path: Guard
    """
    def __init__(self, limit: float = 1.0): ...
'''


@pytest.fixture
def checked(packages, capsys):
    """Checks a package `acme` with one technique; returns the exit code and the lines about it."""

    def check(source=SOUND, name="Guard", kind="callbacks", value=None):
        packages.add("acme", {f"leyden.{kind}": {name: value or f"acme:{name}"}}, source)
        code = main(["plugins", "check", "acme"])
        return code, capsys.readouterr().out.splitlines()

    return check


def test_a_sound_technique_is_ok(checked):
    code, lines = checked()
    assert code == 0
    assert [line.split() for line in lines[:2]] == [
        ["kind", "name", "package", "result"],
        ["callbacks", "Guard", "acme", "1.2", "ok"],
    ]
    assert lines[-1] == "1 checked, 0 broken."


MISTAKES = {
    "raises": ("from lightning", "1 / 0\nfrom lightning", "cannot be imported: ZeroDivisionError"),
    "leaves": ("from lightning", "raise SystemExit\nfrom lightning", "cannot be imported: SystemExit"),
    "gone": ("class Guard", "class Other", "cannot be imported: AttributeError"),
    "undeclared": ('@technique(paper="a blog post")', "", "not declared"),
    "without paper": ("a blog post", "  ", "@technique(paper=...) is empty"),
    "conflict without reason": (
        "blog post",
        'blog post", conflicts={"SpikeGuard": " "}, maturity="stable',
        "has no reason",
    ),
    "needs without brackets": (
        'blog post"',
        'blog post", needs="acme"',
        "@technique(...) of acme.Guard: needs is 'acme', not a list",
    ),
    "judge without a judgement": (
        "    def __init__",
        "    @classmethod\n    def preflight(cls, run, own): ...\n    def __init__",
        "preflight returns None, where it has to yield a line for each problem",
    ),
    "without docstring": ('"""Guards.', '""; """', "no docstring"),
    "argument not described": ("limit: The", "other: The", "`Args:` does not describe limit"),
    "argument that is none": ("        limit:", "        other: X.\n        limit:", "no argument: other"),
    "without example": ("Example:", "See:", "no `Example:` section"),
    "example is no YAML": ("callbacks+:", "callbacks+: [", "the example:"),
    "example is of another": ("class_path: Guard", "class_path: Gard", "does not name Guard"),
    "another base": (
        "Guard(Callback)",
        "Guard(Network)",
        "not derive from lightning.pytorch.callbacks.Callback",
    ),
    "abstract": ("Guard(Callback)", "Guard(Network, Callback)", "cannot be built: blocks, flops_per_token"),
    "no class": ("class Guard(Callback):", "def Guard(limit):", "not a class but a function"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said(mistake, checked):
    old, new, message = MISTAKES[mistake]
    assert old in SOUND
    code, lines = checked(SOUND.replace(old, new))
    assert code == 1
    assert message in "\n".join(lines)
    assert lines[-1] == "1 checked, 1 broken."


def test_several_mistakes_are_all_said_below_each_other(checked):
    _, lines = checked(SOUND.replace("Example:", "See:").replace("limit: The", "The"))
    assert lines[1].endswith("`Args:` does not describe limit")
    assert lines[2].strip() == "the docstring has no `Example:` section"
    assert lines[1].index("`Args:`") == lines[2].index("the docstring")


def test_an_entry_of_another_name_than_its_class(checked):
    code, lines = checked(name="Guardian", value="acme:Guard")
    assert code == 1
    assert "the entry is named Guardian, what it leads to 'Guard'" in lines[1]


def test_a_group_that_is_misspelled(checked):
    code, lines = checked(kind="callback")
    assert code == 1
    assert "there is no group leyden.callback. Did you mean leyden.callbacks?" in lines[1]


def test_a_command_is_a_function_whose_example_calls_it(checked, packages, capsys):
    source = (
        "from core.technique import technique\n@technique(paper='x')\ndef greet(arguments):\n"
        '    """Greets.\n\n    Example:\n        python -m core greet\n    """\n'
    )
    assert checked(source, "greet", "commands")[0] == 0
    packages.add(
        "other", {"leyden.commands": {"hail": "other:hail"}}, source.replace("def greet", "def hail")
    )
    assert main(["plugins", "check", "other"]) == 1
    assert "the example does not call `python -m core hail`" in capsys.readouterr().out


def test_a_name_of_two_packages_is_said_for_both(packages, capsys):
    for package in ("acme", "zeta"):
        packages.add(package, {"leyden.callbacks": {"Guard": f"{package}:Guard"}}, SOUND)
    assert main(["plugins", "check", "Acme"]) == 1
    assert "registered 2 times (acme 1.2, zeta 1.2)" in capsys.readouterr().out


def test_all_packages_are_checked_and_one_broken_does_not_stop_the_rest(checked, packages, capsys):
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, "1 / 0")
    assert main(["plugins", "check"]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {row[1] for row in rows if len(row) > 3} >= {entry.name for entry in catalog.entries()}


def test_our_own_techniques_are_sound(capsys):
    main(["plugins", "check", "leyden"])
    rows = [line for line in capsys.readouterr().out.splitlines()[1:-2] if not line.endswith(" ok")]
    assert [row for row in rows if row.strip()] == []


def test_an_unknown_package_is_answered_with_the_nearest(capsys):
    assert main(["plugins", "check", "leydn"]) == 2
    assert "Did you mean leyden?" in capsys.readouterr().err
