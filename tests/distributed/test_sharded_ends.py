"""However a run of two ranks ends, its sharded checkpoints are whole or not there."""

import os
import shutil
from functools import cache

import pytest

from conformance.workshop import workshop
from core.__main__ import main
from plugins.checkpoints import sharded
from plugins.checkpoints.checkpoint import defect, read_checkpoint
from plugins.checkpoints.finding import newest
from tests.support.same_run import fit, same_bits


@cache
def ended(how, name=None):
    """Returns a run that ended in this way, and the folder of its checkpoints."""
    name = name or f"ends with {how}"
    arguments = {"every_n_steps": 2, "dirpath": "${run_folder}/periodic"}
    callbacks = [
        {"class_path": "PeriodicCheckpoint", "init_args": arguments},
        {"class_path": "tests.support.endings.Ends", "init_args": {"step": 3, "how": how}},
    ]
    trainer = {"strategy": "FSDP", "plugins": ["ShardedCheckpoint"], "callbacks": callbacks, "max_steps": 6}
    done = fit({"trainer": trainer}, 2, name=name)  # the other checkpoint is written before it ends
    folder = workshop() / name / "periodic"
    return done, folder


ENDS = [("exception", 1, {2}), pytest.param("sigterm", 143, {2, 4}, marks=pytest.mark.ci)]


@pytest.mark.parametrize(("how", "code", "steps"), ENDS)
def test_what_is_being_written_is_waited_for(how, code, steps):
    done, folder = ended(how)
    assert done.code == code, done.error_text
    assert {path.name for path in folder.iterdir()} == {f"step-{step:08d}.ckpt" for step in steps}
    assert all(defect(path) is None for path in folder.iterdir())
    assert "Checkpoints interrupted training for " in done.stdout


@pytest.mark.ci
def test_all_ranks_wait_for_room_on_the_disk_of_one():
    done, folder = ended("full")
    assert done.code == 0, done.error_text
    assert "step-00000004.ckpt could not be written: File too large" in done.stderr
    assert "There is room again" in done.stderr
    assert all(defect(path) is None for path in folder.iterdir())


@pytest.mark.ci
def test_the_checkpoint_before_is_left_where_there_never_is_room():
    done, folder = ended("full for good")
    assert 0 not in done.codes
    assert newest(folder).name == "step-00000002.ckpt"
    assert {path.name for path in folder.glob("*.ckpt")} == {"step-00000002.ckpt"}


def test_a_run_folder_is_consolidated(tmp_path):
    _, folder = ended("exception")
    newest_one, output = newest(folder), tmp_path / "whole.ckpt"
    assert main(["consolidate", str(folder), str(output)]) == 0
    assert same_bits(read_checkpoint(output), read_checkpoint(newest_one))
    assert next(iter(read_checkpoint(output)["state_dict"])) == "network.embed_tokens.weight"


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    ["__1.parts", *(pytest.param(name, marks=pytest.mark.slow) for name in ("__0_0.distcp", "__1_0.distcp"))],
)
def test_damage_that_one_rank_reads_is_told_by_all(name):
    _, folder = ended("exception", f"to be damaged {name}")
    before, damaged = folder / "step-00000000.ckpt", folder / "step-00000002.ckpt"
    shutil.copytree(damaged, before)
    os.utime(before, (0, 0))
    part = damaged / name
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    trainer = {"strategy": "FSDP", "plugins": ["ShardedCheckpoint"]}
    done = fit({"trainer": trainer}, 2, f"--ckpt_path={damaged}", name=f"damaged {name}")
    assert done.codes == (2, 2)
    assert (
        f"{damaged}: {part.name} is damaged.\nResume from the one before: --ckpt_path {before}"
        in done.error_text
    )
    # a launcher that starts the job again finds it noted, and goes on from the one before
    looked = sharded.defect(damaged, sharded.NONE), sharded.defect(before, sharded.NONE)
    assert looked == (f"{part.name} is damaged", None)
    again = fit({"trainer": trainer}, 2, f"--ckpt_path={damaged}", name=f"damaged again {name}")
    assert f"{damaged}: {part.name} is damaged" in again.error_text


@pytest.mark.ci
def test_damage_of_a_single_file_is_told_by_all_and_the_next_start_takes_the_one_before():
    """The first rank alone reads its tensors; the others learn of it once they are connected."""
    periodic = {"every_n_steps": 2, "dirpath": "${run_folder}/periodic"}
    trainer = {
        "strategy": "DDP",
        "plugins": ["AtomicCheckpoint"],
        "callbacks": [{"class_path": "PeriodicCheckpoint", "init_args": periodic}],
        "max_steps": 4,
    }
    assert fit({"trainer": trainer}, 2, name="a damaged file").code == 0
    folder = workshop() / "a damaged file" / "periodic"
    before, damaged = folder / "step-00000002.ckpt", folder / "step-00000004.ckpt"
    weight = read_checkpoint(damaged)["state_dict"]["network.embed_tokens.weight"]
    content = bytearray(damaged.read_bytes())
    content[content.index(weight.numpy().tobytes())] ^= 1
    damaged.write_bytes(content)
    (folder / "last.ckpt").symlink_to("step-00000006.ckpt")  # which is gone
    done = fit({"trainer": trainer}, 2, f"--ckpt_path={damaged}", name="damaged file")
    assert done.codes == (2, 2)
    told = f"{damaged}: member archive/data/"
    assert done.error_text.count(told) == 2
    assert f" is damaged.\nResume from the one before: --ckpt_path {before}" in done.error_text
    again = fit({"trainer": trainer}, 2, f"--ckpt_path={folder}", name="damaged file again")
    assert again.codes == (0, 0)
    assert told.replace(": ", " is skipped: ") in again.stderr
    assert f"From checkpoint: {before}" in again.stdout
