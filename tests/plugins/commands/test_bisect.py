"""`bisect`: planted causes, runs that are the same, runs without records; the 50 of the benchmark take minutes."""

import json
from pathlib import Path

import pytest
import yaml

from tests.benchmarks.bisect_causes import causes, config, judge, right, run
from tests.conftest import TINY
from tests.support.cli_runs import core  # noqa: F401

CHOSEN = {"weight": 11, "token": 17, "setting": 28, "reduction order": 41, "not reproducible": 9}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A run without a cause."""
    folder = tmp_path_factory.mktemp("clean") / "a"
    run(config(), folder, {})
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("kind", CHOSEN)
def test_step_place_and_cause_are_those_that_were_planted(kind, clean, tmp_path):
    cause = list(causes())[CHOSEN[kind]]
    assert cause.kind == kind
    verdict = judge(cause, tmp_path / "runs", clean)
    assert right(cause, verdict), verdict.as_text()
    assert verdict.replays <= 2 or kind == "setting"


@pytest.mark.slow
def test_without_records_checkpoints_tell_between_which_steps(core):  # noqa: F811
    for rate in ("0.01", "0.02"):
        assert core("fit", "--config", "tiny.yaml", f"--model.optimizer.lr={rate}").code == 0
    done = core("bisect", "runs/tiny", "runs/tiny-2", "--json")
    found = json.loads(done.out)
    assert (found["cause"], found["step"], found["stage"]) == ("setting", 1, "after"), done
    assert "model.optimizer.lr is 0.01 in A and 0.02 in B" in found["text"]


def test_runs_that_are_the_same(core):  # noqa: F811
    values = yaml.safe_load(Path("tiny.yaml").read_text())
    assert values == TINY
    for _ in range(2):
        assert core("fit", "--config", "tiny.yaml", "--trainer.callbacks+=HashChain").code == 0
    done = core("bisect", "runs/tiny", "runs/tiny-2")
    assert (done.code, done.out) == (0, "There is no difference in the 6 steps that both runs recorded.\n")


def test_a_run_that_recorded_nothing(core):  # noqa: F811
    assert (
        core(
            "fit",
            "--config",
            "tiny.yaml",
            "--callbacks.-PeriodicCheckpoint",
            "--trainer.enable_checkpointing=false",
        ).code
        == 0
    )
    done = core("bisect", "runs/tiny", "runs/tiny")
    assert done.code == 2
    assert "--config techniques/hash_chain" in done.err
    done = core("bisect", "runs/tiny", "runs/tinny")
    assert done.code == 2
    assert "runs/tinny is no run folder" in done.err
