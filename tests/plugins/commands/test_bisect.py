"""`bisect`: planted causes, runs that are the same, runs without records; the 50 of the benchmark take minutes."""

import json
from pathlib import Path

import pytest
import yaml

from conformance import runs
from core.errors import ConfigError
from plugins.commands.bisect import find
from plugins.commands.bisect_runs import Recorded, Replays, read_chains, read_run
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
def test_runs_of_two_ranks_are_replayed_on_two_ranks(tmp_path):
    values = config()
    values["trainer"] |= {"max_steps": 12, "devices": 2, "strategy": {"class_path": "FSDP"}}
    for name, decay in (("a", 0.1), ("b", 0.2)):
        values["model"]["optimizer"]["init_args"]["weight_decay"] = decay
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        words = ["fit", "--config", str(path), f"--trainer.default_root_dir={tmp_path / name}"]
        runs.run(words, tmp_path / name, ranks=2).succeeded(name)

    def launch(side, words, environment):
        runs.run(["fit", *words], tmp_path, ranks=2).succeeded("a replay")

    a, b = read_run(str(tmp_path / "a")), read_run(str(tmp_path / "b"))
    verdict = find(a, b, tmp_path, launch)
    assert (verdict.cause, verdict.step, verdict.stage) == ("setting", 1, "after"), verdict.as_text()
    assert "weight_decay is 0.1 in A and 0.2 in B" in verdict.text
    assert "as rank 0 has it" in verdict.evidence[0]


def test_runs_that_cannot_be_replayed_here_are_refused(tmp_path):
    def record(folder, ranks):
        for rank in range(ranks):
            (folder / "hash_chain").mkdir(parents=True, exist_ok=True)
            head = {"environment": {"ranks": ranks}, "groups": [], "every_n_steps": 1}
            (folder / "hash_chain" / f"rank{rank}.jsonl").write_text(json.dumps(head) + "\n")

    record(tmp_path / "run", 2)
    run = Recorded(tmp_path / "run", {"trainer": {"callbacks": []}}, read_chains(tmp_path / "run"))
    replays = Replays(tmp_path, lambda side, words, environment: record(tmp_path / f"1-{side}", 1))
    with pytest.raises(ConfigError, match="run ran on 2 ranks, and its replay on 1"):
        replays.run("a", run.config, run, 0, 3)
    with pytest.raises(
        ConfigError, match="run ran on 4 machines, and bisect makes steps again on this one alone"
    ):
        replays.run("a", {"trainer": {"num_nodes": 4}}, run, 0, 3)


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
    assert "There is no run folder runs/tinny. Did you mean runs/tiny?" in done.err
    for given, said in (
        ("runs", "runs is no run, it holds 1: name one, such as runs/tiny."),
        ("runs/tiny/config.yaml", "runs/tiny/config.yaml is a file, not a run folder."),
    ):
        done = core("bisect", "runs/tiny", given)
        assert (done.code, said in done.err) == (2, True), done.err
    Path("runs/tiny/config.yaml").unlink()
    assert (
        "runs/tiny is no run folder: it has no config.yaml." in core("bisect", "runs/tiny", "runs/tiny").err
    )
