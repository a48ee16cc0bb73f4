"""kill -9 of one rank: whoever is left says which one died and how to go on, and blames no technique."""

import signal
import subprocess
import sys

import pytest

from conformance.workshop import workshop, write_config
from plugins.cli.runs.lost_ranks import error_line, explain_lost_rank
from tests.conftest import TINY
from tests.support.killed_jobs import DDP, FSDP, TENSOR, WAITED_FOR, fit
from tests.support.killing import Moment, killer


def output(rank):
    return (workshop() / f"output.{rank}.err").read_text(encoding="utf-8")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "ranks", "dead"),
    [
        (DDP, 3, 1),
        pytest.param(FSDP, 2, 1, marks=pytest.mark.slow),
        pytest.param(TENSOR, 2, 1, marks=pytest.mark.slow),
        (DDP, 2, 0),
    ],
    ids=["DDP", "FSDP", "tensor", "rank 0"],
)
def test_who_is_left_says_who_died(strategy, ranks, dead):
    name = f"lost {ranks} {dead} {strategy['class_path']}"
    folder = workshop() / name
    folder.mkdir()
    with killer(folder, Moment(dead, 5, 0.0, None)) as killed:
        done = fit(name, ranks, strategy, WAITED_FOR, 1_000_000)
    assert killed, done.error_text
    assert done.codes[dead] == -9
    for rank in set(range(ranks)) - {dead}:
        said = output(rank)
        gone = (
            f"rank {dead} gave no sign of life"
            if dead
            else "rank 0, through which ranks find each other, is gone"
        )
        assert f"Another rank died: {gone}" in said
        assert f"This is rank {rank} of {ranks}" in said
        assert "--ckpt_path=last" in said
        assert "failed with" not in said
        assert len(said[said.index("Another rank died") :].splitlines()) <= 10


@pytest.mark.ci
@pytest.mark.parametrize("strategy", [pytest.param(DDP, marks=pytest.mark.slow), FSDP], ids=["DDP", "FSDP"])
def test_who_waits_for_a_rank_that_waits_for_the_dead_one_says_so_too(strategy):
    """It sees no connection gone before that one has ended, and the store with it."""
    fails = {"class_path": "tests.support.killing.DiesBehindOthers"}
    done = fit(f"behind {strategy['class_path']}", 4, strategy, WAITED_FOR, 8, fails)
    assert done.codes[1] == -9
    for rank in (0, 2, 3):
        assert "Another rank died: rank 1 gave no sign of life." in output(rank), output(rank)


@pytest.mark.ci
def test_who_is_left_says_what_another_rank_failed_with():
    fails = {
        "class_path": "tests.support.killing.FailsOnce",
        "init_args": {"folder": str(workshop() / "failing"), "step": 5},
    }
    done = fit("failing", 2, DDP, WAITED_FOR, 8, fails)
    assert done.codes[0] == 2
    assert "Another rank died: rank 0 failed with" in output(1), output(1)


@pytest.mark.parametrize(
    "text", ["Failed in a stage", "Failed in a stage.", "\n  Failed in a stage.\nbecause"]
)
def test_of_an_error_its_first_line_with_words_is_told_without_a_stop(text):
    assert error_line(RuntimeError(text)) == "RuntimeError: Failed in a stage"


@pytest.mark.ci
def test_who_is_left_says_that_another_rank_called_exit():
    done = fit("exiting", 2, DDP, WAITED_FOR, 8, {"class_path": "tests.support.killing.Exits"})
    assert done.codes[1] == 3
    assert "Another rank died: rank 1 failed with SystemExit: 3." in output(0), output(0)


@pytest.mark.slow  # test_who_is_left_says_who_died has the same message
def test_lightnings_own_launcher_does_not_end_a_run_without_a_word(tmp_path):
    """It kills rank 0 as soon as it sees that another process is gone."""
    trainer = {
        **TINY["trainer"],
        "devices": 2,
        "strategy": DDP,
        "default_root_dir": str(tmp_path / "run"),
        "callbacks+": [{"class_path": "tests.support.killing.DiesWhileOthersWait"}],
    }
    config = write_config("dies", TINY | {"trainer": trainer})
    words = [sys.executable, "-m", "core", "fit", f"--config={config}", "--trust=tests"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "Another rank died: rank 1 was killed by SIGKILL." in done.stderr
    assert "--ckpt_path=last" in done.stderr


def test_alone_nobody_else_can_have_died():
    assert explain_lost_rank([RuntimeError("Connection closed by peer")]) is None
