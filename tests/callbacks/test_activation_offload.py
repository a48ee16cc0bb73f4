"""ActivationOffload: the same bits, and the bytes on the other side; on a device that is only imagined without a GPU."""

import pytest
import torch
from torch import nn

from callbacks.activation_checkpointing import ActivationCheckpointing
from callbacks.activation_offload import ActivationOffload, offload_block
from core.errors import ConfigError
from tests.benchmarks.activation_memory import bytes_on_imagined_gpu
from tests.support.tiny_training import fit, module, tiny_gpt, uneven_batches

ROTARY_TABLES = 4 * 256 * 32 * 4
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
    assert offloaded < device / 10
    assert moved <= device - offloaded + ROTARY_TABLES  # no other tensor is copied twice
    assert moved > 0.9 * (device - offloaded)


def test_small_tensors_stay():
    assert bytes_on_imagined_gpu(ActivationOffload(1 << 30))[1] == 0


def test_beside_checkpointing_the_inputs_of_the_blocks_move():
    kept, _ = bytes_on_imagined_gpu(ActivationCheckpointing())
    offloaded, moved = bytes_on_imagined_gpu(ActivationCheckpointing(), ActivationOffload(0))
    assert 0 < moved <= kept - offloaded + ROTARY_TABLES


def test_a_negative_size_is_refused():
    with pytest.raises(ConfigError, match="min_bytes >= 0, not -1"):
        ActivationOffload(-1)


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_bitwise_the_same():
    gradients = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)).cuda()
        if offloaded:
            offload_block(block)
        x = torch.randn(512, 64, device="cuda", requires_grad=True)
        block(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in block.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
