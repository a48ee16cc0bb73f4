"""What several ranks hold is written once, found again without asking all of them, and never written in part."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from core.errors import ConfigError
from plugins.checkpoints import sharded, shared_check
from plugins.checkpoints.sharded_checkpoint import ShardedCheckpoint
from tests.support.counted_files import CountedFiles
from tests.support.found_on_ranks import found_on_ranks

pytestmark = pytest.mark.ci

NAMES = [f"w{number}" for number in range(6)]


def full(name):
    return torch.arange(64 * 96.0).reshape(64, 96) + ord(name[-1])


def save(weights, path):
    io = ShardedCheckpoint()
    io.connect()
    io.save_parts({"state_dict": weights, "pytorch-lightning_version": "2.6.6"}, path)
    io.teardown()


def connected(rank, place, ranks):
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=ranks)


def two_replicas_of_two_shards(rank, place):
    connected(rank, place, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    kept, path = [Replicate(), Shard(0)], Path(place, "step-1.ckpt")
    weights = {name: distribute_tensor(full(name), mesh, kept) for name in NAMES}
    weights |= {
        "part": distribute_tensor(full("part"), mesh["shards"], [Shard(1)]),
        "step": torch.tensor(3.0),
    }
    save(weights, path)
    dist.barrier()
    found = {"bytes": (path / f"__{rank}_0.distcp").stat().st_size}
    for case, placements in {"same": kept, "other": [Shard(1), Shard(0)]}.items():
        stored = sharded.read_without_tensors(shared_check.check(path))["state_dict"]
        counted = CountedFiles(".ckpt")
        rooms = {name: distribute_tensor(torch.zeros(64, 96), mesh, placements) for name in NAMES}
        rooms["part"] = distribute_tensor(torch.zeros(64, 96), mesh["shards"], [Shard(1)])
        rooms["step"] = torch.zeros(())
        sharded.load_tensors([(stored[name], rooms[name]) for name in rooms])
        equal = [
            torch.equal(room.full_tensor(), full(name)) for name, room in rooms.items() if name != "step"
        ]
        found[case] = {
            "equal": all(equal) and rooms["step"].item() == 3.0,
            "tables": sorted(name for name in counted.names if name.endswith(".parts")),
        }
    return found


def test_replicas_share_the_writing_and_read_the_tables_of_each_other(tmp_path):
    (tmp_path / "results").mkdir()
    found = found_on_ranks(two_replicas_of_two_shards, 4, tmp_path / "results", str(tmp_path))
    sizes = [each["bytes"] for each in found]
    assert max(sizes) < 1.4 * min(sizes)
    for rank, each in enumerate(found):
        assert each["same"]["equal"]
        assert each["other"]["equal"]
        replicas = {0, rank, rank ^ 2}
        tables = {int(name.rpartition("__")[2].partition(".")[0]) for name in each["same"]["tables"]}
        assert tables <= replicas, each
    assert sum((path.stat().st_size) for path in tmp_path.glob("*.ckpt/*.distcp")) < 1.2 * 7 * 64 * 96 * 4


def halves_beside_a_whole(rank, place):
    connected(rank, place, 2)
    mesh = init_device_mesh("cpu", (2,))
    own = torch.zeros(8)
    if rank == 1:
        own = DTensor.from_local(torch.zeros(4), mesh, [Shard(0)], run_check=False)
    try:
        save({"w": own}, Path(place, "step-1.ckpt"))
    except ConfigError as error:
        return str(error)


def test_ranks_that_disagree_about_a_tensor_write_no_checkpoint(tmp_path):
    (tmp_path / "results").mkdir()
    found = found_on_ranks(halves_beside_a_whole, 2, tmp_path / "results", str(tmp_path))
    assert all("the ranks hold 12 elements of tensors that have 8" in said for said in found)
    assert not list(tmp_path.glob("*.ckpt"))
