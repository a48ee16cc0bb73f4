"""However a run of two ranks ends, its sharded checkpoints are whole or not there."""

import os
import shutil

import pytest

from core.__main__ import main
from core.checkpoints import sharded
from core.checkpoints.checkpoint import defect, newest, read
from core.testing.workshop import workshop
from tests.distributed.same_run import fit, same_bits


def ended(how, name=None):
    name = name or f"ends with {how}"
    arguments = {"every_n_steps": 2, "dirpath": "${run_folder}/periodic"}
    callbacks = [
        {"class_path": "PeriodicCheckpoint", "init_args": arguments},
        {"class_path": "tests.distributed.endings.Ends", "init_args": {"step": 3, "how": how}},
    ]
    trainer = {"strategy": "FSDP", "plugins": ["ShardedCheckpoint"], "callbacks": callbacks}
    done = fit({"trainer": trainer}, 2, name=name)
    folder = workshop() / name / "periodic"
    return done, folder


@pytest.mark.parametrize(("how", "code", "steps"), [("exception", 1, {2}), ("sigterm", 143, {2, 4})])
def test_what_is_being_written_is_waited_for(how, code, steps):
    done, folder = ended(how)
    assert done.code == code, done.complaint
    assert {path.name for path in folder.iterdir()} == {f"step-{step:08d}.ckpt" for step in steps}
    assert all(defect(path) is None for path in folder.iterdir())
    assert "Checkpoints held training up for " in done.printed


def test_a_full_disk_of_one_rank_is_told_by_all_and_the_checkpoint_before_is_left():
    done, folder = ended("full")
    assert done.code == 2
    assert "step-00000004.ckpt could not be written: File too large" in done.complaint
    assert f"The last good one is {folder / 'step-00000002.ckpt'}." in done.complaint
    assert [path.name for path in folder.iterdir()] == ["step-00000002.ckpt"]
    assert newest(folder).name == "step-00000002.ckpt"


def test_a_run_folder_is_consolidated(tmp_path):
    _, folder = ended("sigterm")
    newest_one, output = newest(folder), tmp_path / "whole.ckpt"
    assert main(["consolidate", str(folder), str(output)]) == 0
    assert same_bits(read(output), read(newest_one))
    assert next(iter(read(output)["state_dict"])) == "network.embed_tokens.weight"


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_reads_is_told_by_all(rank):
    _, folder = ended("exception", f"to be damaged {rank}")
    before, damaged = folder / "step-00000000.ckpt", folder / "step-00000002.ckpt"
    shutil.copytree(damaged, before)
    os.utime(before, (0, 0))
    part = damaged / f"__{rank}_0.distcp"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    trainer = {"strategy": "FSDP", "plugins": ["ShardedCheckpoint"]}
    done = fit({"trainer": trainer}, 2, f"--ckpt_path={damaged}", name=f"damaged {rank}")
    assert done.codes == (2, 2)
    assert (
        f"{damaged}: {part.name} is damaged.\nGo on from the one before: --ckpt_path {before}"
        in done.complaint
    )
    # a launcher that starts the job again finds it noted, and goes on from the one before
    looked = sharded.defect(damaged, sharded.NONE), sharded.defect(before, sharded.NONE)
    assert looked == (f"{part.name} is damaged", None)
    again = fit({"trainer": trainer}, 2, f"--ckpt_path={damaged}", name=f"damaged again {rank}")
    assert f"{damaged}: {part.name} is damaged" in again.complaint
