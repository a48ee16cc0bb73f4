"""ShardedCheckpoint: whole or absent, of the step it was asked at, read without running code."""

import json
import os
import pickle
import re
import resource
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from core.errors import ConfigError
from plugins.checkpoints import sharded
from plugins.checkpoints.checkpoint import defect, read_checkpoint
from plugins.checkpoints.consolidate import consolidate
from plugins.checkpoints.finding import newest, resolve
from plugins.checkpoints.sharded_checkpoint import ShardedCheckpoint
from tests.conftest import Malicious
from tests.support.full_disk import room_once_it_waits, signalled
from tests.support.same_run import same_bits
from tests.support.signed_checkpoints import sign, write_former

LIMIT = 1_000_000


def content(number=0.0):
    weights = {
        "w": torch.arange(300.0) + number,
        "b.c": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.empty(0),
    }
    states = {11: {"exp_avg": torch.full((300,), number), "step": torch.tensor(number)}, 2: {"count": 3}}
    return {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": weights,
        "optimizer_states": [{"state": states, "param_groups": [{"lr": 0.1, "params": [2, 11]}]}],
        "callbacks": {"x": [1.5, None, (2, "y")]},
        "leyden": {"config": "a: 1\n", "ranks": 1},
    }


@pytest.fixture
def save(tmp_path):
    """Writes a checkpoint, to the end."""

    def write(name="step-1.ckpt", number=0.0):
        io = ShardedCheckpoint()
        io.save_checkpoint(content(number), tmp_path / name)
        io.teardown()
        return tmp_path / name

    return write


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@contextmanager
def file_size_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_comes_back_as_it_was(save):
    found = read_checkpoint(save())
    found["optimizer_states"][0]["state"] = dict(
        sorted(found["optimizer_states"][0]["state"].items(), reverse=True)
    )
    assert same_bits(found, content())
    assert list(found["state_dict"]) == ["w", "b.c", "none"]


def test_a_checkpoint_of_earlier_versions_is_read(save, tmp_path):
    former = write_former(tmp_path / "step-2.ckpt", content())
    assert (former / ".metadata").exists()
    assert same_bits(read_checkpoint(former), read_checkpoint(save()))
    assert newest(tmp_path) == former


def test_consolidate_writes_what_one_process_would_have_written(save, tmp_path, capsys):
    assert consolidate([str(save()), str(tmp_path / "whole.ckpt")]) == 0
    assert same_bits(torch.load(tmp_path / "whole.ckpt", weights_only=True), content())
    assert defect(tmp_path / "whole.ckpt") is None
    assert "whole.ckpt" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists already"):
        consolidate([str(tmp_path / "step-1.ckpt"), str(tmp_path / "whole.ckpt")])


def test_the_snapshot_is_of_the_step_it_was_asked_at_though_training_goes_on(tmp_path):
    """The writer is held up until ten more steps are done."""
    model, io, gate = nn.Linear(50, 50), ShardedCheckpoint(), threading.Event()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 50)).square().mean().backward()
        optimizer.step()

    def state():
        return {
            "state_dict": model.state_dict(),
            "optimizer_states": [optimizer.state_dict()],
            "counts": counts,
        }

    counts = {"steps": [1]}
    step()
    torch.save(state(), tmp_path / "expected.pt")
    io._background._thread = ThreadPoolExecutor(1)
    io._background._thread.submit(gate.wait)
    io.save_checkpoint(state(), tmp_path / "step-1.ckpt")
    for _ in range(10):
        step()
        counts["steps"].append(1)
    assert not (tmp_path / "step-1.ckpt").exists()
    gate.set()
    io.wait()
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert same_bits(read_checkpoint(tmp_path / "step-1.ckpt"), expected)
    assert not same_bits(model.state_dict(), expected["state_dict"])
    io.save_checkpoint(state(), tmp_path / "step-11.ckpt")  # in the memory of the first
    io._stager.close()  # as torch 2.11 does behind each
    io.save_checkpoint(state(), tmp_path / "step-12.ckpt")
    io.teardown()
    for step in (11, 12):
        assert same_bits(read_checkpoint(tmp_path / f"step-{step}.ckpt")["state_dict"], model.state_dict())


def test_saving_a_step_again_replaces_it(save):
    save(number=1.0)
    assert read_checkpoint(save(number=2.0))["state_dict"]["w"][0] == 2.0


def test_the_old_one_is_deleted_when_the_new_one_has_its_name(save, monkeypatch):
    """Deleting a large one takes seconds, in which a run may be killed."""
    path, there, delete = save(), [], shutil.rmtree

    def noted(folder, *words, **options):
        there.extend([resolve("last", path.parent)] if ".removed." in str(folder) else [])
        delete(folder, *words, **options)

    monkeypatch.setattr(shutil, "rmtree", noted)
    save(number=1.0)
    assert there
    assert set(there) == {path}


@pytest.mark.parametrize(
    "name", ["complete", "manifest.json", "state.pt", "tensors.json", "__0.parts", "__0_0.distcp"]
)
@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_folder_that_is_not_whole_is_named_and_the_one_before_is_used(name, damage, save, tmp_path, capsys):
    earlier, later = save("step-1.ckpt"), save("step-2.ckpt")
    assert newest(tmp_path) == resolve(str(tmp_path), tmp_path) == later
    (later / name).unlink() if damage == "gone" else flip(later / name)
    assert newest(tmp_path) == earlier
    assert f"{later} is skipped: " in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"step-2\.ckpt: .*last"):
        ShardedCheckpoint().load_checkpoint(later)
    with pytest.raises(ConfigError, match=r"step-2\.ckpt: .*last"):
        resolve(str(later), tmp_path)


def test_what_a_killed_run_left_is_never_loaded_and_removed_by_the_next(save, tmp_path):
    left = tmp_path / ".step-9.ckpt.tmp"
    save().rename(left)
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        newest(tmp_path)
    save("step-2.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["step-2.ckpt"]


@pytest.mark.parametrize("name", ["state.pt", ".metadata", "__0_0.distcp", "bytes"])
def test_code_in_a_folder_is_not_run_even_where_the_checksums_are_right(name, save, tmp_path):
    former, evil = name in (".metadata", "bytes"), Malicious(tmp_path / "executed")
    folder = write_former(tmp_path / "step-1.ckpt", content()) if former else save()
    if name == "state.pt":
        torch.save({**sharded.state(folder), "evil": evil}, folder / name)
    elif name == ".metadata":
        (folder / name).write_bytes(pickle.dumps(evil))
    elif name == "__0_0.distcp":
        (folder / name).write_bytes(pickle.dumps(evil) + (folder / name).read_bytes())
    else:  # DCP would unpickle an entry that says it is no tensor
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.state_dict_metadata["state_dict.w"] = (
            torch.distributed.checkpoint.metadata.BytesStorageMetadata()
        )
        place = next(value for key, value in metadata.storage_data.items() if key.fqn == "state_dict.w")
        place.offset, place.length = 0, len(pickle.dumps(evil))
        (folder / place.relative_path).write_bytes(pickle.dumps(evil))
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(folder)
    with pytest.raises(Exception, match=r"code|Unsupported|Weights only|not a zip|failed|Invalid"):
        read_checkpoint(folder)
    assert not (tmp_path / "executed").exists()


def test_a_marker_without_end_is_not_read_to_its_end(save):
    folder = save()
    with open(folder / "complete", "r+b") as file:
        file.truncate(1 << 40)
    assert defect(folder) == "manifest.json is damaged"


def test_tensors_that_claim_more_than_their_files_hold_are_refused(save, tmp_path):
    folder, former = save(), write_former(tmp_path / "former.ckpt", content())
    tensors = json.loads((folder / "tensors.json").read_text())
    tensors["state_dict.w"] = ["float32", [10**6, 10**6]]
    (folder / "tensors.json").write_text(json.dumps(tensors))
    metadata = pickle.loads((former / ".metadata").read_bytes())
    metadata.state_dict_metadata["state_dict.w"].size = torch.Size([10**6, 10**6])
    (former / ".metadata").write_bytes(pickle.dumps(metadata))
    for path in (folder, former):
        sign(path)
    assert "tensors.json claims 4,000,0" in defect(folder)
    assert ".metadata claims 4,000,0" in defect(former)


@pytest.mark.parametrize(
    "change",
    [{"epoch": "x"}, {"optimizer_states": [3]}, {"state_dict": 3}, {"state_dict_order": 3}, {"leyden": []}],
    ids=str,
)
def test_fields_of_another_type_are_refused(change, save, tmp_path):
    folder = save()
    torch.save({**sharded.state(folder), **change}, folder / "state.pt")
    sign(folder)
    with pytest.raises(ConfigError):
        resolve(str(folder), tmp_path)
    with pytest.raises(ConfigError):
        read_checkpoint(folder)
    with pytest.raises(ConfigError):
        sharded.read_without_tensors(sharded.opened(folder))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_reported_and_leaves_the_earlier_checkpoint_alone(asynchronous, save, tmp_path):
    earlier, io = save(), ShardedCheckpoint(asynchronous)
    large = {"state_dict": {"w": torch.zeros(LIMIT)}, "pytorch-lightning_version": "2.6.6"}

    def fails():
        io.save_checkpoint(large, tmp_path / "step-2.ckpt")
        io.wait()

    with file_size_limit(), signalled(), pytest.raises(ConfigError) as error:
        fails()
    io.teardown()
    lines = str(error.value).splitlines()
    assert "step-2.ckpt could not be written: File too large (" in lines[0]
    assert lines[1] == f"The last good one is {earlier}."
    assert [path.name for path in tmp_path.iterdir()] == ["step-1.ckpt"]
    io.save_checkpoint(content(), tmp_path / "step-3.ckpt")  # there is room again
    io.teardown()
    assert newest(tmp_path).name == "step-3.ckpt"


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_a_checkpoint_waits_in_memory_until_there_is_room(asynchronous, tmp_path, capsys):
    io = ShardedCheckpoint(asynchronous)
    large = {"state_dict": {"w": torch.zeros(LIMIT)}, "pytorch-lightning_version": "2.6.6"}
    with file_size_limit(), room_once_it_waits():
        io.save_checkpoint(large, tmp_path / "step-2.ckpt")
        io.teardown()
    assert newest(tmp_path).name == "step-2.ckpt"
    assert capsys.readouterr().err.count("The run waits, and keeps it in memory") == 1


def test_an_error_in_the_background_is_raised_by_the_next_save_and_at_the_end(tmp_path):
    (tmp_path / "file").write_text("in the way")
    io = ShardedCheckpoint()
    io.save_checkpoint(content(), tmp_path / "file" / "step-1.ckpt")
    with pytest.raises(ConfigError, match="could not be written"):
        io.save_checkpoint(content(), tmp_path / "step-2.ckpt")
    io.save_checkpoint(content(), tmp_path / "file" / "step-3.ckpt")
    with pytest.raises(ConfigError, match="could not be written"):
        io.teardown()


def test_the_end_says_how_long_checkpoints_held_the_run_up(save, capsys):
    save()
    printed = capsys.readouterr().out
    assert re.search(
        r"interrupted training for \d+\.\d ms at most, \d+\.\d ms in all \(1 written\)", printed
    ), printed


def test_a_rank_looks_at_its_share_of_the_files_alone(save):
    folder = save()
    flip(folder / "__0_0.distcp")
    assert defect(folder) == "__0_0.distcp is damaged"
    assert sharded.defect(folder, slice(0, None, 2)) == "__0_0.distcp is damaged"
    assert sharded.defect(folder, slice(1, None, 2)) is None
    (folder / "__0_0.distcp").unlink()
    assert sharded.defect(folder, slice(0, None, 2)) == "__0_0.distcp is missing"


def test_a_file_that_changed_since_it_was_checked_is_not_read(save):
    """Another rank may have checked it: that one saw its time."""
    source = sharded.opened(save())
    content = sharded.read_without_tensors(source)
    part = source.folder / "__0_0.distcp"
    os.utime(part, ns=(0, source.newest_ns + 1))
    with pytest.raises(ConfigError, match=r"__0_0\.distcp has changed since it was checked"):
        sharded.load_tensor(content["state_dict"]["w"])
    os.utime(part, ns=(0, source.newest_ns))
    assert torch.equal(sharded.load_tensor(content["state_dict"]["w"]), torch.arange(300.0))
    with open(part, "ab") as file:
        file.write(b"more")
    os.utime(part, ns=(0, source.newest_ns))
    with pytest.raises(ConfigError, match=r"__0_0\.distcp has changed since it was checked"):
        sharded.load_tensor(content["state_dict"]["w"])


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs names of open files")
@pytest.mark.parametrize("name", ["__0_0.distcp", "__0.parts", "state.pt", "tensors.json"])
def test_what_the_disk_changes_as_it_is_written_is_damage(name, save, tmp_path, monkeypatch):
    """A checksum of the file would take over what the disk made of it."""
    sync, changed = os.fsync, []

    def changing(number):
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if path.name == name:
            flip(path)
            changed.append(path)
        sync(number)

    monkeypatch.setattr(os, "fsync", changing)
    path = save()
    assert changed
    assert defect(path) == f"{name} is damaged"


def test_removing_is_calm_about_what_is_gone(save, tmp_path):
    path = save()
    ShardedCheckpoint().remove_checkpoint(path)
    ShardedCheckpoint().remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_written_of_another_device_than_the_first_is_whole(tmp_path, asynchronous):
    """torch copies to the host without waiting, and synchronises the device of its thread."""
    with torch.cuda.device(1):
        values = torch.arange(1 << 26, dtype=torch.float32, device="cuda").cos()
        plugin = ShardedCheckpoint(asynchronous=asynchronous)
        plugin.save_checkpoint({"state_dict": {"weight": values}}, tmp_path / "x.ckpt")
        plugin.teardown()
    assert torch.equal(read_checkpoint(tmp_path / "x.ckpt")["state_dict"]["weight"], values.cpu())
