"""What `plugins new` puts around a technique: metadata, README, CI, and a run small enough for a test."""

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
    python -m core plugins check leyden-technique-name
    ruff check .
    pytest

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
      - run: python -m core plugins check leyden-technique-name
      - run: pytest
"""

CONFTEST = '''
"""A run that takes a second: a GPT of one layer, four steps, text made up on the spot."""

import csv
import json

import pytest
from core.__main__ import main

TINY = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 4
  log_every_n_steps: 1
  num_sanity_val_steps: 0
  limit_val_batches: 0
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  use_distributed_sampler: false
  default_root_dir: run
  logger: [MetricsCSV]
model:
  network:
    class_path: GPT
    init_args: {vocab_size: 320, n_layer: 1, n_head: 2, n_embd: 16, max_sequence_length: 16}
  objective: CausalLM
  optimizer: {class_path: AdamW, init_args: {lr: 0.01}}
data:
  class_path: PretrainDataModule
  init_args:
    source: text.jsonl
    cache_dir: cache
    reader: TextDocuments
    tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 300}}
    writer: TokenShards
    sequence_length: 16
    batch_size: 4
"""


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Trains under an overlay, given as YAML; returns the rows of `metrics.csv`, one for each step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    texts = (f"{n} and {n + 1} make {2 * n + 1}. " * 5 for n in range(60))
    (tmp_path / "text.jsonl").write_text("\\n".join(json.dumps({"text": text}) for text in texts))

    def run(overlay):
        (tmp_path / "overlay.yaml").write_text(overlay)
        assert main(["fit", "--config", "tiny.yaml", "--config", "overlay.yaml"]) == 0
        with open(tmp_path / "run" / "metrics.csv") as file:
            return list(csv.DictReader(file))

    return run
'''

FILES = {
    "pyproject.toml": PYPROJECT,
    "README.md": README,
    ".github/workflows/test.yml": CI,
    "leyden_technique_name/__init__.py": PACKAGE,
}
"""Path -> content, for every kind; the technique's module and its tests come on top."""
