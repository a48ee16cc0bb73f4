"""`pytest --leyden-package acme` in a folder of its own: what is collected, chosen, reported, and when nothing is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Packages

HOUSE = Path(__file__).resolve().parents[2]

ACME = '''
from lightning.pytorch import Callback
from core.errors import ConfigError
from core.technique import technique

@technique(paper="a blog post")
class Guard(Callback):
    """Guards.

    Args:
        window: Steps.

    Example:
        trainer:
          callbacks+:
            - class_path: Guard
              init_args: {window: 0}
    """
    def __init__(self, window: int = 0):
        if window < 1:
            raise ConfigError(f"Guard takes window >= 1, not {window}.")
'''

CONFTEST = """
from conformance import Case

def pytest_leyden_cases():
    return [Case("Guard", {"window": 1}), Case("Guard", {"window": 2}, exempt={"trains": "it is too good"})]
"""


@pytest.fixture
def run(tmp_path):
    """The function that runs pytest where `acme`, with a sound and a broken technique, is installed."""
    site, folder = tmp_path / "site", tmp_path / "folder"
    site.mkdir()
    folder.mkdir()
    entries = {"leyden.callbacks": {"Guard": "acme:Guard", "Gone": "acme.gone:Gone"}}
    Packages(site).add("acme", entries, ACME)

    def run_pytest(*words, **files):
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{HOUSE}"}
        environment.pop("PYTEST_ADDOPTS", None)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run_pytest


def ids(printed):
    return re.findall(r"^acme::\S+", printed, re.MULTILINE)


@pytest.mark.ci
def test_each_technique_and_promise_is_a_test_that_can_be_chosen(run):
    own = "def test_guard():\n    pass\n"
    words = ("--leyden-package", "Acme", "--co", "-q", "-k", "Guard and not resumes", "-m", "leyden")
    code, printed = run(*words, test_own=own)
    assert code == 0
    assert "test_guard" not in printed
    found = [name.partition("::")[2] for name in re.findall(r"^Acme::\S+", printed, re.MULTILINE)]
    assert "Guard::builds_from_yaml" in found
    assert "Guard::idle_costs_nothing" in found
    assert not [name for name in found if "resumes" in name or not name.startswith("Guard::")]
    assert len(found) == len(set(found)) > 10


@pytest.mark.slow  # a process that imports everything
def test_what_cannot_be_imported_fails_its_own_tests_and_no_others(run):
    own = "def test_own():\n    pass\n"
    words = ("--leyden-package=acme", "-rA", "-k", "test_own or imports or is_declared")
    code, printed = run(*words, test_own=own)
    assert code == 1
    assert "2 failed, 3 passed" in printed  # test_own among them
    assert "PASSED acme::Guard::is_declared" in printed
    assert "Gone of acme 1.2 breaks imports: Its module is imported without an error." in printed
    assert "Traceback" not in printed


@pytest.mark.slow  # the kit of our own catalogue has such cases
def test_cases_of_the_conftest_take_the_place_of_the_example(run):
    code, printed = run("--leyden-package=acme", "-rs", "-v", "-k", "Guard and trains", conftest=CONFTEST)
    assert code == 0, printed
    assert "acme::Guard::trains PASSED" in printed
    assert "acme::Guard-2::trains SKIPPED" in printed
    assert "exempt: it is too good" in printed


@pytest.mark.ci
def test_an_unknown_package_is_a_usage_error_that_names_those_there_are(run):
    code, printed = run("--leyden-package", "acm")
    assert code == 4
    assert (
        "ERROR: --leyden-package: No installed package named 'acm' registers a technique. Did you mean acme?"
        in (printed)
    )
    assert "These do: acme, leyden." in printed
    assert "Traceback" not in printed


@pytest.mark.ci
def test_without_the_option_nothing_is_collected_or_imported(run):
    own = "import sys\ndef test_own():\n    assert not {'torch', 'lightning', 'yaml', 'core.catalog'} & set(sys.modules)\n"
    code, printed = run(test_own=own)
    assert code == 0, printed
    assert "1 passed" in printed
    assert "acme" not in printed
