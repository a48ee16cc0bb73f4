"""Averages over ranks in few messages: how many there are, and what is averaged with which."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.sent import Sent
from toolkit.gradient_buckets import BUCKET_BYTES, average_in_buckets


@pytest.fixture
def two_ranks():
    """The other one sends nothing: sums are what this rank has."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("dtype", "messages"), [(None, "float32"), (torch.bfloat16, "bfloat16")])
def test_many_tensors_are_averaged_in_few_messages(two_ranks, dtype, messages):
    size = BUCKET_BYTES // 4 // 10
    given = [torch.randn(size).to(torch.bfloat16).float() for _ in range(25)]
    wide = torch.randn(8, 16, dtype=torch.float64)
    own = [tensor.clone() for tensor in given]
    double, empty = wide.clone(), torch.zeros(0)
    with Sent() as sent:
        average_in_buckets([*own[:10], double, empty, *own[10:]], dtype=dtype)
    assert sent.calls == {f"all_reduce {messages}": 3 + bool(dtype)} | (
        {} if dtype else {"all_reduce float64": 1}
    )
    for tensor, before in zip(own, given, strict=True):
        assert torch.equal(tensor, before / 2)
    torch.testing.assert_close(double, wide / 2, rtol=0 if dtype is None else 2**-8, atol=0)


def test_a_tensor_that_is_larger_than_a_message_is_one(two_ranks):
    large = torch.ones(BUCKET_BYTES // 4 + 1)
    with Sent() as sent:
        average_in_buckets([torch.ones(100), large, torch.ones(100)])
    assert sent.calls == {"all_reduce float32": 3}
    assert float(large[-1]) == 0.5
