"""What a rank finds that makes collectives by itself: the shapes of all ranks, the values of its own."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.lone_ranks import WithoutOthers

RANKS = 4

gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # which warns where it has another name
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.fixture(autouse=True)
def one_of_four():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield
    dist.destroy_process_group()


def test_each_collective_has_the_shape_of_all_ranks_and_the_values_of_this_one():
    own = torch.arange(4.0)
    whole, part, exchanged = torch.zeros(16), torch.zeros(1), torch.zeros(6)
    listed = [torch.zeros(4) for _ in range(RANKS)]
    with WithoutOthers():
        gather(whole, own, async_op=True).wait()
        dist.all_gather(listed, own)
        scatter(part, own)
        dist.all_to_all_single(exchanged, own, [3, 1, 1, 1], [1] * RANKS)
        dist.all_reduce(summed := own.clone())
        dist.broadcast(sent := own.clone(), 0)
        dist.barrier()
    assert torch.equal(whole, own.repeat(RANKS))
    assert torch.equal(torch.stack(listed), own.repeat(RANKS, 1))
    assert part.tolist() == [0.0]
    assert exchanged.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 0.0]
    assert torch.equal(summed, own)
    assert torch.equal(sent, own)


class Sent(TorchDispatchMode):
    """Notes the operators that get this far."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_after_the_first_ones_collectives_are_made_with_the_others():
    own, whole = torch.arange(4.0), torch.zeros(16)
    with Sent() as sent, WithoutOthers(2):
        dist.all_reduce(own)
        dist.all_gather_into_tensor(whole, own)
        assert not sent.names
        dist.reduce_scatter_tensor(torch.zeros(1), own)
        dist.all_reduce(own)
    assert torch.equal(whole, own.repeat(RANKS))
    assert sent.names == ["_reduce_scatter_base_", "allreduce_"]


def test_an_input_that_lies_in_its_output_is_kept():
    whole = torch.arange(16.0)
    with WithoutOthers():
        gather(whole, whole[4:8])
    assert torch.equal(whole, torch.arange(4.0, 8.0).repeat(RANKS))


def test_tensors_on_a_mesh_are_gathered_and_reduced():
    mesh = init_device_mesh("cpu", (RANKS,))
    shards = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)], src_data_rank=None)
    with WithoutOthers():
        assert shards.full_tensor().shape == (8, 3)
        assert shards.sum().full_tensor().item() == 6.0  # of the two rows that it has
        assert shards.redistribute(placements=[Shard(1)]).to_local().shape == (8, 1)
        assert shards.redistribute(placements=[Replicate()]).to_local().shape == (8, 3)


def test_a_collective_that_is_not_known_is_refused_before_anything_is_sent():
    with WithoutOthers(), pytest.raises(NotImplementedError, match="send"):
        dist.send(torch.zeros(1), 0)
