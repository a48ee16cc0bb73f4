"""What `plugins new` puts around a technique: metadata, README, CI."""

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "leyden-technique-name"
version = "0.1.0"
description = "TechniqueName for leyden."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["leyden>=CORE_VERSION"]

[project.optional-dependencies]
test = ["pytest>=8", "ruff>=0.14"]

# What makes it a technique: the name is what YAML says.
[project.entry-points."leyden.KIND"]
TechniqueName = "leyden_technique_name.technique_name:TechniqueName"

[tool.setuptools]
packages = ["leyden_technique_name"]

[tool.ruff]
line-length = 110

[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = "--leyden-package leyden-technique-name"  # runs the conformance kit, too
"""

PACKAGE = '''
"""TechniqueName for leyden."""
'''

README = """
# leyden-technique-name

SUMMARY

    pip install leyden-technique-name

USAGE

`python -m core plugins show TechniqueName` lists its arguments.

## Working on it

    pip install -e '.[test]'
    ruff check .
    python -m pytest

`python -m pytest` runs the tests in `tests/` and leyden's conformance kit, which tries the technique in small runs.
The class is in `leyden_technique_name/technique_name.py`. After a change to the entry point in
`pyproject.toml`, install again.
"""

CI = """
name: test
on: [push, pull_request]
permissions:
  contents: read
jobs:
  test:
    runs-on: ubuntu-latest
    strategy:
      matrix:
        python: ["3.11", "3.13"]
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: ${{ matrix.python }}
      - run: pip install -e '.[test]'
      - run: ruff check .
      - run: python -m pytest
"""

FILES = {
    "pyproject.toml": PYPROJECT,
    "README.md": README,
    ".github/workflows/test.yml": CI,
    "leyden_technique_name/__init__.py": PACKAGE,
}
"""Path -> content, for every kind; the technique's module and its tests come on top."""
