"""The scaler of sharded gradients where weights are kept on the CPU and losses are computed on a GPU (a fake one)."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from plugins.strategies.fsdp import FSDP
from plugins.strategies.shared_scaler import SharedScaler
from tests.support.copied_flags import EarlyCopies

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def optimizer_on_the_cpu():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer._step_supports_amp_scaling = True  # as FP16Mixed says of fused ones
    return optimizer


def test_weights_on_the_cpu_wait_for_what_the_ranks_found(two_ranks):
    with FakeTensorMode():
        optimizer = optimizer_on_the_cpu()
        scaler = SharedScaler(torch.amp.GradScaler("cpu", 4.0), CPU, GPU)
        with EarlyCopies() as copies:
            assert scaler.scale(torch.ones((), device=GPU)).device == GPU
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert copies.shapes == []


def test_the_norm_of_gradients_on_the_cpu_is_on_the_device():
    strategy = FSDP(offload=True)
    strategy.parallel_devices = [GPU]
    with FakeTensorMode():
        assert strategy.gradient_norm(optimizer_on_the_cpu()).device == GPU


@pytest.mark.gpu
def test_an_overflow_drops_the_step_of_weights_on_the_cpu(two_ranks):
    optimizer = optimizer_on_the_cpu()
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad[0] = torch.inf
    scaler = SharedScaler(torch.amp.GradScaler("cpu", 4.0), CPU, GPU)
    torch.cuda._sleep(1 << 30)  # what the GPU still has to do before it copies anything
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert scaler.get_scale() == 2.0
