"""What a rank does to the files of a checkpoint does not grow with the number of ranks."""

import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from plugins.checkpoints import sharded
from plugins.checkpoints.part_tables import Part, table, table_file, tensor_table
from tests.support.counted_files import CountedFiles, counted_run
from tests.support.found_on_ranks import found_on_ranks
from tests.support.launched_ranks import write
from tests.support.signed_checkpoints import sign

MANY = 4096


def ran(words, ranks, folder):
    found = counted_run(words, ranks, folder)
    assert [each["code"] for each in found] == [0] * ranks
    return [each["counts"] for each in found], [each["names"] for each in found]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "plugin"),
    [("FSDP", "ShardedCheckpoint"), pytest.param("ddp", "AtomicCheckpoint", marks=pytest.mark.slow)],
)
def test_a_rank_of_four_does_what_a_rank_of_two_does(strategy, plugin, tmp_path):
    saved, resumed = {}, {}
    for ranks in (2, 4):
        folder = tmp_path / str(ranks)
        words = ["fit", *write(folder), f"--trainer.devices={ranks}", "--trainer.gradient_clip_val=null"]
        words += [f"--trainer.strategy={strategy}", f"--trainer.plugins={plugin}"]
        words += [
            "--model.optimizer=torch.optim.AdamW"
        ]  # with a count of steps for each parameter, on every rank
        saved[ranks], _ = ran(words, ranks, folder / "saved")
        more = [f"--ckpt_path={folder / 'run'}", "--trainer.max_steps=7"]
        resumed[ranks], names = ran([*words, *more], ranks, folder / "resumed")
        for rank, own in enumerate(names):
            parts = {name for name in own if name.startswith("open __")}
            both = {number: {f"open __{number}_0.distcp", f"open __{number}.parts"} for number in (0, rank)}
            assert parts <= both[0] | both[rank]
            # what is checked and read; of the last step what is written, flushed and read for its checksum
            assert own.get(f"open __{rank}.parts", 0) <= 5
            assert own.get("open tensors.json", 0) <= (1 if rank else 4)
        if plugin == "AtomicCheckpoint":
            assert all(own == resumed[ranks][1] for own in resumed[ranks][1:])
    for found in (saved, resumed):
        for kind in ("open", "list", "stat"):
            most = {ranks: max(own.get(kind, 0) for own in counts[1:]) for ranks, counts in found.items()}
            assert most[4] <= most[2], (kind, most)


def many_parts(folder, former):
    """Writes the checkpoint of a vector of which each of 4,096 ranks has written one number."""
    folder.mkdir()
    places, chunks = {}, []
    for rank in range(MANY):
        with open(folder / f"__{rank}_0.distcp", "wb") as file:
            torch.save(torch.tensor([float(rank)]), file)
            size = file.tell()
        chunk = dcp.ChunkStorageMetadata(torch.Size([rank]), torch.Size([1]))
        chunks.append(chunk)
        index = dcp.MetadataIndex("state_dict.w", chunk.offsets, rank)
        places[index] = _StorageInfo(f"__{rank}_0.distcp", 0, size)
        if not former:
            own = Part("state_dict.w", [rank], [1], rank, 0, size)
            (folder / table_file(rank)).write_bytes(table([own]))
    if former:
        entry = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size([MANY]), chunks)
        metadata = dcp.Metadata({"state_dict.w": entry}, storage_data=places, storage_meta=dcp.StorageMeta())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        (folder / "tensors.json").write_bytes(tensor_table({"state_dict.w": ([MANY], torch.float32)}))
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, folder / "state.pt")
    sign(folder)


def share_of_one(_, place, rank, ranks):
    """Reads what one rank of many does: its share to check it, and its shard."""
    folder = Path(place)
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    counted = CountedFiles(".ckpt")
    assert sharded.defect(folder, sharded.NONE) is None  # before the ranks are connected
    source = sharded.opened(folder, slice(rank, None, ranks))
    source = source.changed_until(time.time_ns())  # the latest that all ranks have found
    checked = sum(counted.counts.values())
    stored = sharded.read_without_tensors(source)["state_dict"]["w"]
    room = DTensor.from_local(torch.full((MANY // ranks,), -1.0), mesh, [Shard(0)])
    sharded.load_tensors([(stored, room)])
    names = {name.rpartition(" ")[2] for name in counted.names}
    return {
        "counts": counted.counts,
        "checked": checked,
        "parts": sorted(names - {"many.ckpt", "state.pt", "manifest.json", "complete", "damaged"}),
        "values": room.to_local().tolist(),
    }


@pytest.mark.parametrize("former", [pytest.param(False, marks=pytest.mark.ci), True])
def test_one_of_4096_ranks_opens_its_own_parts_alone(former, tmp_path):
    folder, results = tmp_path / "many.ckpt", tmp_path / "results"
    many_parts(folder, former)
    results.mkdir()
    [found] = found_on_ranks(share_of_one, 1, results, str(folder), 1234, MANY)
    assert found["values"] == [1234.0]
    description = [".metadata"] if former else ["tensors.json", "__1234.parts"]
    assert found["parts"] == sorted(["__1234_0.distcp", *description])
    assert found["counts"].get("list", 0) == 0
    assert sum(found["counts"].values()) < 64, found["counts"]


def test_one_of_half_as_many_ranks_opens_the_tables_and_parts_of_two(tmp_path):
    folder, results = tmp_path / "many.ckpt", tmp_path / "results"
    many_parts(folder, former=False)
    results.mkdir()
    [found] = found_on_ranks(share_of_one, 1, results, str(folder), 617, MANY // 2)
    assert found["values"] == [1234.0, 1235.0]
    # 617 and 2665 are its share to check
    numbers = {int(name[2:].partition(".")[0]) for name in found["parts"] if name.endswith(".parts")}
    assert numbers == {617, 2665, 1234, 1235}
    assert sum(found["counts"].values()) - found["checked"] < 32, found["counts"]
