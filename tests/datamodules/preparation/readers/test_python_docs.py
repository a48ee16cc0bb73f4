import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from datamodules.preparation.readers import python_docs
from datamodules.preparation.readers.python_docs import python_documents


@pytest.fixture(scope="module")
def documents():
    return python_documents()


@pytest.mark.slow  # the quickstart reads it too
def test_it_is_about_two_megabytes_in_hundreds_of_different_documents(documents):
    assert 1.5e6 < sum(len(text.encode()) for text in documents) < 5e6
    assert len(set(documents)) == len(documents) > 300


@pytest.mark.slow
def test_a_module_reads_like_a_page_of_reference(documents):
    (page,) = (text for text in documents if text.startswith("textwrap\n********\n"))
    assert "\n\nText wrapping and filling.\n\nclass TextWrapper\n\n   Object for wrapping" in page
    assert "\n\nTextWrapper.wrap(self, text)\n\n   wrap(text : string)" in page
    assert "\n\nindent(text, prefix, predicate)\n\n   Adds 'prefix' to the beginning" in page


@pytest.mark.ci
def test_all_docstrings_of_a_module_are_there_and_only_once(documents):
    (page,) = (text for text in documents if text.startswith("argparse\n"))
    tree = ast.parse(Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_text())
    strings = [
        ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]
    first_lines = {text.strip().splitlines()[0] for text in strings if text}
    assert len(first_lines) >= 15
    assert all(page.count(f"   {line}\n") == 1 for line in first_lines)


@pytest.mark.ci
def test_tests_and_installed_packages_are_left_out(documents):
    names = {text.split("\n")[0].split(".")[0] for text in documents}
    assert names >= {"json", "asyncio", "email"}
    assert not names & {"test", "idlelib", "lib2to3", "site-packages", "pip", "torch", "__hello__"}


CHECK = """
import hashlib, sys
before = set(sys.modules)
from datamodules.preparation.readers.python_docs import python_documents
print(hashlib.sha256("".join(python_documents()).encode()).hexdigest())
assert "this" not in sys.modules and "antigravity" not in sys.modules and "turtle" not in sys.modules
assert "torch" not in sys.modules
"""


@pytest.mark.ci
def test_another_process_collects_the_same_and_imports_nothing(documents):
    import hashlib

    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECK],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[4],
    )
    assert result.stdout.split() == [hashlib.sha256("".join(documents).encode()).hexdigest()]
    assert result.stderr == ""


def test_a_page_survives_odd_modules(tmp_path):
    path = tmp_path / "odd.py"
    path.write_bytes(
        b'# -*- coding: latin-1 -*-\n"""Caf\xe9 \\udc80."""\nif True:\n  class A:\n    """A."""\n'
        b'    async def f(self, /, x, *, y): """Runs."""\nelse:\n  def g(): """Runs."""\n  def h(): "Other."\n'
    )
    page = python_docs._page("odd", path, set())
    assert page.startswith("odd\n***\n\nCafé ")
    assert page.endswith("\n\nclass A\n\n   A.\n\nA.f(self, x)\n\n   Runs.\n\nh()\n\n   Other.\n")
    path.write_text("def broken(:\n")
    assert python_docs._page("odd", path, set()) == ""
    path.write_text("x = 1\n")
    assert python_docs._page("odd", path, set()) == ""
