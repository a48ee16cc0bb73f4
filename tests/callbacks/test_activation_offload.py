"""ActivationOffload: the same bits, and the bytes on the other side; on a device that is only imagined without a GPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from callbacks import activation_offload
from callbacks.activation_checkpointing import ActivationCheckpointing
from callbacks.activation_offload import ActivationOffload, _Lane, offload_blocks
from core.errors import ConfigError
from tests.benchmarks.activation_memory import bytes_on_imagined_gpu
from tests.support.tiny_training import fit, module, tiny_gpt, uneven_batches

ROTARY_TABLE = 256 * 32 * 4
"""Bytes of the rotary angles, which every block saves, and which stay on the device for the next."""


@pytest.mark.parametrize("others", [[], [ActivationCheckpointing()]])
def test_weights_are_bitwise_those_of_a_run_without(others, tmp_path):
    weights = []
    for callbacks in ([], [*others, ActivationOffload(0)]):
        trained = module(lambda: tiny_gpt(dropout=0.2))
        fit(tmp_path, trained, uneven_batches(4), callbacks, max_epochs=1)
        weights.append(trained.state_dict())
    one, other = weights
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_activations_of_the_blocks_move_to_the_host():
    device, host = bytes_on_imagined_gpu()
    assert host == 0
    offloaded, moved = bytes_on_imagined_gpu(ActivationOffload(0))
    assert offloaded < 0.3 * device
    # those of the last of 4 blocks are on both sides until backward; no tensor is copied twice
    assert moved - ROTARY_TABLE == pytest.approx((device - offloaded) * 4 / 3, rel=0.05)


def test_small_tensors_stay():
    assert bytes_on_imagined_gpu(ActivationOffload(1 << 30))[1] == 0


def test_beside_checkpointing_the_inputs_of_the_blocks_move():
    kept, _ = bytes_on_imagined_gpu(ActivationCheckpointing())
    offloaded, moved = bytes_on_imagined_gpu(ActivationCheckpointing(), ActivationOffload(0))
    assert moved - ROTARY_TABLE == (kept - offloaded) * 4 / 3 > 0


class Said:
    """What leaves, comes back and is computed, in order. Tensors of the CPU move, too: from host memory to host memory."""

    def __init__(self, monkeypatch, *blocks):
        self.said, self.left, self.memory = [], {}, set()
        monkeypatch.setattr(
            activation_offload, "_moves", lambda tensor, least: tensor.numel() >= max(least, 1)
        )
        plain = _Lane.copy

        def copy(lane, source, target, after):
            self.copied(source, target)
            return plain(lane, source, target, after)

        monkeypatch.setattr(_Lane, "copy", copy)
        for number, block in enumerate(blocks):
            block.register_full_backward_hook(lambda *_, number=number: self.said.append(f"done {number}"))
            block.register_forward_hook(lambda *_, number=number: self.said.append(f"forward {number}"))

    def copied(self, source, target):
        number = self.left.get(source.data_ptr())
        if number is None:
            self.left[target.data_ptr()] = len(self.left)
            self.memory.add(target.data_ptr())
            self.said.append(f"out {len(self.left) - 1}")
        else:
            self.said.append(f"back {number}")


class Squared(nn.Module):
    """Saves its input twice."""

    def forward(self, x):
        return x * x


def test_a_block_leaves_during_the_next_one_and_comes_back_during_the_backward_of_the_one_behind_it(
    monkeypatch,
):
    blocks = [nn.Sequential(Squared(), nn.Tanh()) for _ in range(3)]
    said = Said(monkeypatch, *blocks)
    offload_blocks(blocks)
    x = torch.linspace(-1, 1, 40, requires_grad=True)
    y = x
    for block in blocks:
        y = block(y)
    # the input of a block is what the last operation of the one before saved: it leaves once
    assert said.said == ["out 0", "out 1", "forward 0", "out 2", "forward 1", "out 3", "forward 2"]
    said.said.clear()
    y.sum().backward()
    # 3 and 2 of the last block never left the device
    assert said.said == ["back 1", "done 2", "back 0", "done 1", "done 0"]
    assert torch.equal(x.grad, _gradient_without(x))


def test_the_last_block_leaves_where_another_forward_follows(monkeypatch):
    blocks = [nn.Tanh() for _ in range(2)]
    said, found = Said(monkeypatch), []
    offload_blocks(blocks)
    x = torch.linspace(-1, 1, 40, requires_grad=True)
    for _ in range(2):  # two micro-batches of a pipeline
        found.append(blocks[1](blocks[0](x * 1)))
    said.said.clear()
    for y in reversed(found):
        y.sum().backward()
    assert said.said == ["back 2", "back 1", "back 0"]


def _gradient_without(x):
    one = x.detach().requires_grad_()
    y = one
    for _ in range(3):
        y = (y * y).tanh()
    y.sum().backward()
    return one.grad


def test_pinned_memory_is_used_again_also_for_other_lengths(monkeypatch):
    blocks = [nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8), nn.Tanh()) for _ in range(4)]
    said, found = Said(monkeypatch), []
    offload_blocks(blocks)
    for length in (20, 20, 20, 10, 30, 30, 20):
        said.left.clear()
        said.memory.clear()
        x = torch.randn(2, length, 8)
        y = nn.Sequential(*blocks)(x)
        y.sum().backward()
        del y
        found.append(set(said.memory))
    assert found[0] == found[1] == found[2]
    assert found[3] <= found[0]
    assert found[4] == found[5] >= found[6]


@pytest.mark.parametrize("frozen", [False, True])
def test_casts_of_weights_stay_where_they_are(frozen, monkeypatch):
    block = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)).requires_grad_(not frozen)
    sizes = []
    said = Said(monkeypatch)
    said.copied = lambda source, target: sizes.append(tuple(source.shape))
    offload_blocks([block])
    x = torch.randn(2, 20, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    y.sum().backward()
    assert sizes
    assert all(20 in shape or 40 in shape for shape in sizes), sizes


@pytest.mark.parametrize("biased", [False, True])
def test_activations_with_the_shape_of_a_weight_leave(biased, monkeypatch):
    """Products flatten (B, T, C): with B T = 24 or 8 that is the shape of a weight here, as 4,096 tokens are in Llama 2 7B."""
    block, moved = nn.Sequential(nn.Linear(8, 24, biased), nn.GELU(), nn.Linear(24, 8, biased)), []
    said = Said(monkeypatch)
    said.copied = lambda source, target: moved.append(tuple(source.shape))
    offload_blocks([block])
    counts = []
    for tokens in (25, 24, 8):
        moved.clear()
        block(torch.randn(1, tokens, 8, requires_grad=True) + 1)
        counts.append(len(moved))
    assert counts == [counts[0]] * 3


def test_a_graph_may_be_used_twice_and_left_unused(monkeypatch):
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    Said(monkeypatch)
    found = []
    for offloaded in (False, True):
        if offloaded:
            offload_blocks(blocks)
            nn.Sequential(*blocks)(torch.randn(4, 8))  # no backward
        x = torch.ones(4, 8, requires_grad=True)
        y = nn.Sequential(*blocks)(x).sum()
        found.append([torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)])
    assert all(torch.equal(one, found[0][0]) for one in [*found[0], *found[1]])


def test_shards_of_activations_leave_and_come_back(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        said, block = Said(monkeypatch), nn.Tanh()
        offload_blocks([block, Squared()])
        x = distribute_tensor(torch.linspace(-1, 1, 12).view(3, 4), mesh, [Shard(0)]).requires_grad_()
        block(x).sum().backward()
        assert torch.allclose(x.grad.full_tensor(), 1 - x.detach().full_tensor().tanh() ** 2)
        assert said.said == ["out 0"]
    finally:
        dist.destroy_process_group()


def test_a_negative_size_is_refused():
    with pytest.raises(ConfigError, match="min_bytes >= 0, not -1"):
        ActivationOffload(-1)


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_bitwise_the_same_and_the_host_waits_for_nothing():
    def blocks():
        torch.manual_seed(0)
        found = [
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512), nn.Tanh())
            for _ in range(8)
        ]
        return nn.Sequential(*found).cuda()

    gradients, memory = [], []
    for offloaded in (False, True):
        network = blocks()
        if offloaded:
            offload_blocks(list(network))
        x = torch.randn(4096, 512, device="cuda", requires_grad=True)
        for step in range(4):
            network.zero_grad()
            x.grad = None
            torch.manual_seed(1)
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode(
                "error" if step else "default"
            )  # pinned memory is there after a step
            try:
                network(x).square().sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        memory.append(torch.cuda.max_memory_allocated())
        gradients.append([x.grad, *(p.grad for p in network.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert memory[1] < 0.6 * memory[0]
