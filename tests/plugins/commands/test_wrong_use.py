"""Commands on folders and files that are not what they are taken for: a few lines, exit code 2, and no waiting."""

import gzip
import json
import os

import pytest

from core.__main__ import main

TRACE = gzip.compress(json.dumps({"traceEvents": []}).encode())
HEAD = json.dumps({"environment": 3, "groups": ["a"], "every_n_steps": 1}) + "\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of run folders, each with one fault."""
    monkeypatch.chdir(tmp_path)
    contents = {
        "good": {
            "metrics.csv": "step,train/loss\n1,2.5\n2,2.4\n",
            "config.yaml": "trainer: {max_steps: 2}\n",
        },
        "head": {"metrics.csv": "step,train/loss\n"},
        "empty": {"metrics.csv": ""},
        "number": {"metrics.csv": "step,train/loss\n1,x\n"},
        "list": {"metrics.csv": "step,train/loss\n1,2.5\n", "config.yaml": "- 1\n"},
        "chain": {"config.yaml": "trainer: {}\n", "hash_chain/rank0.jsonl": HEAD},
    }
    for run, files in contents.items():
        for name, text in files.items():
            (tmp_path / run / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / run / name).write_text(text)
    for name in ("pipe/metrics.csv", "pipes/hash_chain/rank0.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / "pipes" / "config.yaml").write_text("trainer: {}\n")
    (tmp_path / "cut.json.gz").write_bytes(TRACE[:-6])
    (tmp_path / "whole.json.gz").write_bytes(TRACE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor", "head"], "has no figures"),
        (["doctor", "empty"], "has no figures"),
        (["doctor", "number"], "not as MetricsCSV writes it"),
        (["doctor", "list"], "no sections"),
        (["doctor", "pipe"], "no regular file"),
        (["doctor", "goodd"], "no run folder goodd. Did you mean good?"),
        (["doctor", "."], ". is no run, it holds 7: name one, such as chain."),
        (["compare-profiles", "cut.json.gz", "whole.json.gz"], "it is cut off"),
        (["compare-profiles", "whole.json.gz", "whole.json.gz"], "has no operators"),
        (["bisect", "chain", "chain"], "not as HashChain writes it: its environment is no object"),
        (["bisect", "pipes", "pipes"], "no regular file"),
        (["compare", "pipe", "good"], "pipe has no metrics.csv"),
        (["watch", "good", "gone"], "There is no folder gone"),
    ],
)
def test_it_is_said_in_few_lines(here, words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split())
    assert len(error.splitlines()) <= 10
