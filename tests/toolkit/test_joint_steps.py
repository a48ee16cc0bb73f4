"""What ranks tell each other about a step, and how many collectives a rank has made of it."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.runs import on_ranks
from toolkit.joint_steps import collectives_made, highest_failed, within_collective

RANKS = 3
"""No power of two: the last messages go around."""


def of_rank(rank, folder):
    """Tries each set of ranks that fail."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    for failed in product((False, True), repeat=RANKS):
        expected = max((each for each in range(RANKS) if failed[each]), default=None)
        assert highest_failed(failed[rank], dist.group.WORLD) == expected
    dist.destroy_process_group()


class _Fails(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise torch.OutOfMemoryError("as if")


@pytest.mark.parametrize("make", [dist.all_reduce, dist.barrier, torch.sin])
def test_an_error_within_a_collective_is_known(make):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        arguments = () if make is dist.barrier else (torch.zeros(1),)
        with _Fails(), pytest.raises(torch.OutOfMemoryError) as caught:
            make(*arguments)
    finally:
        dist.destroy_process_group()
    assert within_collective(caught.value) == (make is not torch.sin)


@pytest.mark.ci
def test_each_rank_learns_which_has_failed(tmp_path):
    on_ranks(of_rank, RANKS, tmp_path)


@pytest.mark.gpu
def test_each_collective_counts_once_on_a_gpu(tmp_path):
    """NCCL counts what was begun, when it was begun."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    own = torch.ones(4, device="cuda")
    try:
        for make in (
            lambda: dist.all_gather_into_tensor(torch.empty_like(own), own),
            lambda: dist.reduce_scatter_tensor(torch.empty_like(own), own),
            lambda: dist.all_reduce(own),
        ):
            before = collectives_made([dist.group.WORLD])
            make()
            assert collectives_made([dist.group.WORLD]) == before + 1
    finally:
        dist.destroy_process_group()
