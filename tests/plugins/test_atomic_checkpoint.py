"""AtomicCheckpoint: whole or absent, also on a full disk; loading runs no code."""

import json
import os
import random
import signal
import time
from contextlib import contextmanager

import pytest
import torch

from conformance.runs import run
from core.errors import ConfigError
from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.checkpoints.checkpoint import defect
from plugins.checkpoints.sharded_checkpoint import ShardedCheckpoint
from plugins.checkpoints.shared_check import content_of, note_of
from tests.conftest import Malicious
from tests.support import full_disk
from tests.support.full_disk import signalled
from tests.support.launched_ranks import write

SMALL = {"state_dict": {"w": torch.arange(10.0)}}
LARGE = {"state_dict": {f"w{i}": torch.full((50_000,), float(i)) for i in range(20)}}  # 4 MB
LIMIT = 1_000_000


@contextmanager
def file_size_limit(folder):
    with full_disk.file_size_limit(LIMIT):
        yield folder, "File too large"


@contextmanager
def small_disk(folder):
    with full_disk.small_disk(folder, LIMIT):
        yield folder, "No space left on device"


@pytest.mark.parametrize("disk", [file_size_limit, small_disk])
@pytest.mark.parametrize("before", [True, False], ids=["with an earlier one", "without"])
def test_a_full_disk_is_reported_and_leaves_the_earlier_checkpoint_alone(disk, before, tmp_path):
    io = AtomicCheckpoint()
    with disk(tmp_path) as (folder, reason):
        earlier = folder / "checkpoints" / "step-1.ckpt"
        if before:
            io.save_checkpoint(SMALL, earlier)
        with signalled(), pytest.raises(ConfigError) as error:
            io.save_checkpoint(LARGE, earlier.with_name("step-2.ckpt"))
        lines = str(error.value).splitlines()
        left = sorted(earlier.parent.iterdir())
        assert left == ([earlier] if before else [])
        assert not before or torch.equal(io.load_checkpoint(earlier)["state_dict"]["w"], torch.arange(10.0))
    assert f"step-2.ckpt could not be written: {reason} (" in lines[0]
    assert lines[1] == (f"The last good one is {earlier}." if before else "There is no earlier one.")
    assert (f"resume with --ckpt_path {earlier}." in lines[2]) == before
    assert ("start the run again as you did" in lines[2]) == (not before)


@pytest.mark.parametrize(
    "before", [True, pytest.param(False, marks=pytest.mark.ci)], ids=["with an earlier one", "the first"]
)
def test_a_checkpoint_waits_in_memory_until_there_is_room(before, tmp_path, capsys):
    io, path = AtomicCheckpoint(), tmp_path / "step-2.ckpt"
    if before:
        io.save_checkpoint(SMALL, tmp_path / "step-1.ckpt")
    with full_disk.file_size_limit(LIMIT), full_disk.room_once_it_waits():
        io.save_checkpoint(LARGE, path)
    assert defect(path) is None
    assert len(list(tmp_path.iterdir())) == 1 + before
    message = capsys.readouterr().err.splitlines()
    assert "step-2.ckpt could not be written: File too large" in message[0]
    assert "The run waits, and keeps it in memory" in message[1]
    assert message[-1] == "There is room again: the checkpoint is written."


def test_ctrl_c_ends_the_wait(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        with full_disk.file_size_limit(LIMIT), signalled(signal.SIGINT), pytest.raises(KeyboardInterrupt):
            AtomicCheckpoint().save_checkpoint(LARGE, tmp_path / "step-2.ckpt")
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_does_not_destroy_the_checkpoint_that_was_to_be_replaced(tmp_path):
    io, path = AtomicCheckpoint(), tmp_path / "last.ckpt"
    io.save_checkpoint(SMALL, path)
    with file_size_limit(tmp_path), signalled(), pytest.raises(ConfigError):
        io.save_checkpoint(LARGE, path)
    assert torch.equal(io.load_checkpoint(path)["state_dict"]["w"], torch.arange(10.0))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_reported(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        AtomicCheckpoint().save_checkpoint(SMALL, tmp_path / "a.ckpt")


def test_a_file_where_a_folder_should_be_is_reported(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(ConfigError, match="could not be written: File exists"):
        AtomicCheckpoint().save_checkpoint(SMALL, tmp_path / "checkpoints" / "a.ckpt")


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    io, path = AtomicCheckpoint(), tmp_path / "new" / "a.ckpt"
    content = {
        "state_dict": {"w": torch.randn(3), "b": torch.ones(2, dtype=torch.bfloat16)},
        "step": 7,
        "x": [1.5, None],
    }
    io.save_checkpoint(content, path)
    loaded = io.load_checkpoint(path)
    assert loaded["step"] == 7
    assert loaded["x"] == [1.5, None]
    assert all(
        torch.equal(loaded["state_dict"][name], weight) for name, weight in content["state_dict"].items()
    )
    assert [file.name for file in path.parent.iterdir()] == ["a.ckpt"]


def test_what_was_left_by_a_killed_run_is_removed(tmp_path):
    leftover = tmp_path / ".step-1.ckpt.tmp"
    leftover.write_bytes(b"half a checkpoint")
    kept = [tmp_path / "notes.tmp", tmp_path / ".config.yaml.123.tmp", tmp_path / "step-1.ckpt"]
    for path in kept:
        path.write_bytes(b"")
    AtomicCheckpoint().save_checkpoint(SMALL, tmp_path / "step-2.ckpt")
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "step-2.ckpt"])


def test_nothing_is_seen_under_the_final_name_before_all_is_written(tmp_path, monkeypatch):
    """At the moment of the rename the temporary file is whole and the old one still there."""
    io, path, seen = AtomicCheckpoint(), tmp_path / "a.ckpt", []
    io.save_checkpoint(SMALL, path)
    replace = os.replace

    def spy(source, target):
        seen.append((defect(source), torch.load(target)["state_dict"].keys() == {"w"}))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    io.save_checkpoint(LARGE, path)
    assert seen == [(None, True)]
    assert defect(path) is None


def interrupt_saves_at_random_moments(folder, times):
    """Interrupts so many saves; each leaves a whole checkpoint and nothing else."""
    io, content = AtomicCheckpoint(), {"state_dict": {f"w{i}": torch.ones(50) for i in range(60)}}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    took, chance, interrupted = 0.0, random.Random(0), 0
    while interrupted < times:
        start = time.perf_counter()
        try:
            if took:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + chance.random() * took)
            io.save_checkpoint(content, folder / "a.ckpt")
            signal.setitimer(signal.ITIMER_REAL, 0)
            took = time.perf_counter() - start
        except KeyboardInterrupt:
            interrupted += 1
        assert defect(folder / "a.ckpt") is None
        assert os.listdir(folder) == ["a.ckpt"]


def test_an_interrupt_while_saving_ends_neither_the_process_nor_the_file(tmp_path):
    """In a process of its own: torch's writer aborts it where an interrupt gets through."""
    child = os.fork()
    if child == 0:
        try:
            interrupt_saves_at_random_moments(tmp_path, 120)
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_file_is_refused_by_name(damage, tmp_path):
    io, path = AtomicCheckpoint(), tmp_path / "a.ckpt"
    io.save_checkpoint(LARGE, path)
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.ckpt: .*--ckpt_path last"):
        io.load_checkpoint(path)


def test_launched_ranks_that_resume_leave_the_tensors_to_the_first_one(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    path = tmp_path / "step-1.ckpt"
    AtomicCheckpoint().save_checkpoint(LARGE, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert defect(path).endswith("is damaged")  # of weights to start from
    assert defect(path, resumes=True) is None
    note_of(path).write_text(json.dumps([content_of(path), "as rank 0 found"]))
    assert defect(path, resumes=True) == "as rank 0 found"
    data[data.index(b"state_dict")] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(0, 1))  # another file than the noted one
    assert defect(path, resumes=True) == "member archive/data.pkl is damaged"
    AtomicCheckpoint().remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked", [None, False])
def test_code_in_a_checkpoint_is_refused_whatever_is_asked_for(asked, tmp_path):
    torch.save({"state_dict": {}, "evil": Malicious(tmp_path / "executed")}, tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match=r"a\.ckpt: .*tensors and plain values"):
        AtomicCheckpoint().load_checkpoint(tmp_path / "a.ckpt", weights_only=asked)
    assert not (tmp_path / "executed").exists()


def test_removing_is_calm_about_what_is_gone(tmp_path):
    io, path = AtomicCheckpoint(), tmp_path / "a.ckpt"
    io.save_checkpoint(SMALL, path)
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    assert not path.exists()


@pytest.mark.parametrize("plugin", [AtomicCheckpoint, ShardedCheckpoint])
def test_nothing_is_written_to_a_folder_that_is_named_like_a_url(plugin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no storage for ftp://"):
        plugin().save_checkpoint(SMALL, "ftp://bucket/step-1.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_callback_that_would_write_to_a_url_is_refused_before_the_run(tmp_path):
    callback = "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"
    words = ["fit", *write(tmp_path), callback, "--trainer.callbacks.dirpath=s3://bucket/run"]
    done = run(words, tmp_path, cwd=tmp_path)
    assert done.code == 2
    assert "ModelCheckpoint: dirpath is s3://bucket/run: runs write to folders" in done.stderr
    assert "where the bucket is mounted" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml"}
