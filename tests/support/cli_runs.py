"""A trained run, and the command line in this process: fixtures."""

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

from conformance.runs import run
from core.__main__ import main
from tests.conftest import TINY

RUN = Path("runs/tiny")


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def core(tmp_path, monkeypatch, capsys):
    """Calls the command line in this process, in a folder that holds `tiny.yaml`."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # `main` changes it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so does Lightning this: restored afterwards

    def call(*arguments):
        try:
            code = main([str(word) for word in arguments])
        except SystemExit as exit:
            code = exit.code or 0
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A folder in which the tiny run has been trained, in a process of its own: not to be changed, but copied."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    done = run(["fit", "--config", "tiny"], folder, cwd=folder)
    assert (done.code, done.stderr) == (0, ""), done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


@pytest.fixture
def trained(finished, tmp_path, core):
    """A copy of it to go on from, with `core` called there."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return core


def checkpoint(step, run=RUN):
    return run / "checkpoints" / f"step-{step:08d}.ckpt"


def state(path):
    return torch.load(path, weights_only=True)
