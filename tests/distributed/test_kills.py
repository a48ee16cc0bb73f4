"""kill -9 of one rank at random moments, also in the middle of a checkpoint: nothing that was saved is lost, no bit changes.

The job is started again as a launcher would, on as many ranks as before, and finds its last checkpoint by itself.
"""

import random
import time
from itertools import groupby

import pytest

from conformance.runs import GRACE_SECONDS
from conformance.workshop import workshop
from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.checkpoints.finding import of_folder
from tests.support.killed_jobs import ASYNCHRONOUS, DDP, EVERY, FSDP, TENSOR, WAITED_FOR, fit
from tests.support.killing import Moment, killer, steps_done
from tests.support.same_run import same_bits

FOLDER = ("", "__0_0.distcp", "__0.parts", "state.pt", "tensors.json", "manifest.json")
"""What a checkpoint that is a folder has as it is being written, in this order; "" is the folder itself."""
FILE = ("",)


def moments(ranks, kills, writes, names, seed):
    """Draws so many moments, so many of them within the writing of a checkpoint, every second of those of rank 0."""
    chance = random.Random(seed)
    drawn = []
    for number in range(kills):
        writing = number < writes
        rank = chance.randrange(
            1 if writing and number % 2 else 0, 1 if writing and number % 2 == 0 else ranks
        )
        name = chance.choice(names) if writing else None
        drawn.append(Moment(rank, chance.randint(2, 9), chance.uniform(0.0, 0.03), name))
    chance.shuffle(drawn)
    return drawn


def killed_again_and_again(ranks, strategy, plugin, drawn, steps):
    """Kills a rank at each of the moments, and lets the job go on to its end; returns the last run of it."""
    name = f"killed-{ranks}-{strategy['class_path']}-{plugin}-{len(drawn)}"
    folder, saved, cut_off = workshop() / name, 0, 0
    folder.mkdir()
    behind = EVERY if plugin == ASYNCHRONOUS else 0  # what is written in the background may be cut off
    for moment in drawn:
        with killer(folder, moment) as killed:
            done = fit(name, ranks, strategy, plugin, steps)
        assert killed, f"the run was over before {moment}: {done.error_text}"
        assert done.codes[moment.rank] == -9
        assert 0 not in done.codes
        assert None not in done.codes, f"a rank hangs {GRACE_SECONDS} s after {moment}"
        print(f"{moment}: codes {done.codes}, all over after {time.monotonic() - killed[0]:.2f} s")
        steps_seen = steps_done(folder, moment.rank)
        assert steps_seen[0] == saved
        assert last_step(folder) >= max(saved, steps_seen[-1] // EVERY * EVERY - behind)
        saved = last_step(folder)
        cut_off += any((folder / "checkpoints").glob(".*.ckpt.tmp"))
    done = fit(name, ranks, strategy, plugin, steps)
    assert done.code == 0, done.error_text
    assert cut_off, "no kill was within the writing of a checkpoint"
    return done


def last_step(folder):
    found = of_folder(folder)
    return int(found.stem.removeprefix("step-")) if found else 0


def assert_same(found, expected):
    assert expected.code == 0, expected.error_text
    assert found.record["losses"] == expected.record["losses"]
    assert found.record["figures"] == expected.record["figures"]
    one, other = (
        read_checkpoint(run.folder / "checkpoints" / f"step-{run.record['steps']:08d}.ckpt")
        for run in (found, expected)
    )
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert same_bits(one[part], other[part]), part


@pytest.mark.ci
def test_three_kills_change_no_bit():
    whole = fit("whole", 2, FSDP, ASYNCHRONOUS, 24)
    drawn = [*moments(2, 2, 1, FOLDER, seed=0), Moment(0, 3, 0.0, "__0_0.distcp")]
    assert_same(killed_again_and_again(2, FSDP, ASYNCHRONOUS, drawn, 24), whole)


@pytest.mark.ci
def test_a_job_that_ended_with_an_error_of_ours_goes_on_in_its_own_folder():
    """Its peer's death may reach a rank as a checkpoint in the background that could not be written."""
    name = "an error"
    fails = {
        "class_path": "tests.support.killing.FailsOnce",
        "init_args": {"folder": str(workshop() / name), "step": 5},
    }
    first = fit(name, 2, DDP, WAITED_FOR, 8, fails)
    assert (first.code, last_step(workshop() / name)) == (2, 4), first.error_text
    second = fit(name, 2, DDP, WAITED_FOR, 8, fails)
    assert second.code == 0, second.error_text
    steps = [step for step, _ in groupby(steps_done(workshop() / name, 0))]  # of several micro-batches each
    assert steps == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert not (workshop() / f"{name}-2").exists()


@pytest.mark.ci
def test_a_job_is_over_when_all_its_ranks_are():
    """Its launcher starts all ranks again, also the one that had done its part: it has to find its folder."""
    name = "died at the end"
    dies = {
        "class_path": "tests.support.killing.DiesAtTheEndOnce",
        "init_args": {"folder": str(workshop() / name)},
    }
    first = fit(name, 2, DDP, WAITED_FOR, 4, dies)
    assert first.codes[1] == -9, first.error_text
    assert first.codes[0] is not None, f"rank 0 hangs {GRACE_SECONDS} s after its peer has died"
    assert first.codes[0] != 0, "rank 0 took the job for done"
    second = fit(name, 2, DDP, WAITED_FOR, 4, dies)
    assert second.code == 0, second.error_text
    assert "step-00000004.ckpt" in second.stdout
    assert not (workshop() / f"{name}-2").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "strategy", "plugin", "names"),
    [
        (2, FSDP, ASYNCHRONOUS, FOLDER),
        (2, DDP, WAITED_FOR, FILE),
        (4, TENSOR, ASYNCHRONOUS, FOLDER),
        (4, FSDP, WAITED_FOR, FILE),
    ],
    ids=["2 ranks, folders", "2 ranks, files", "4 ranks, folders", "4 ranks, files"],
)
def test_ten_kills_change_no_bit(ranks, strategy, plugin, names):
    whole = fit(f"whole {ranks} {plugin}", ranks, strategy, plugin, 80)
    drawn = moments(ranks, 10, 5, names, seed=ranks)
    assert_same(killed_again_and_again(ranks, strategy, plugin, drawn, 80), whole)
