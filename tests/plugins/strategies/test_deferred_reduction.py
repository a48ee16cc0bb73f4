"""What ranks exchange under accumulation: counted in one of many ranks, and sums of many micro-batches."""

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.errors import ConfigError
from plugins.networks.gpt import GPT
from plugins.strategies.deferred_reduction import DeferredReduction
from plugins.strategies.fsdp import FSDP
from plugins.strategies.hybrid_parallel import HybridParallel
from tests.support.fake_ranks import shards
from tests.support.sent import Sent

BLOCKS, MICRO_BATCHES = 2, 4
GROUPS = BLOCKS + 1
"""What is gathered and reduced at a time: each block, and the rest of the network."""

PASSES = 2 * BLOCKS
"""Gathers of blocks in forward and backward."""


def network():
    return GPT(
        vocab_size=64,
        n_layer=BLOCKS,
        n_head=2,
        n_embd=16,
        max_sequence_length=16,
        position="rotary",
        bias=False,
    )


def exchanged(strategy, ranks, **options):
    """Returns kind -> calls of a step of four micro-batches, without what is smaller than a weight."""
    batch = {
        "input_ids": torch.zeros(2, 16, dtype=torch.int64),
        "labels": torch.ones(2, 16, dtype=torch.int64),
    }
    with (
        shards(network, strategy, 0, ranks, accumulate_grad_batches=MICRO_BATCHES, **options) as module,
        Sent() as sent,
    ):
        for number in range(MICRO_BATCHES):
            if number < MICRO_BATCHES - 1:
                with strategy.block_backward_sync():
                    _micro_batch(strategy, batch, number)
            else:
                _micro_batch(strategy, batch, number)
        for parameter in module.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype is torch.float32
    return dict(sent.calls)


def _micro_batch(strategy, batch, number):
    loss = strategy.training_step(batch, number)
    with strategy.step_context():
        loss.backward()


@pytest.mark.parametrize(
    ("strategy", "ranks", "gathers", "sums"),
    [
        (lambda: FSDP(), 2, MICRO_BATCHES * PASSES + 1, 0),
        (lambda: FSDP(stage=2), 2, GROUPS, 0),
        (lambda: FSDP(replicas=2), 4, MICRO_BATCHES * PASSES + 1, GROUPS),
        (lambda: HybridParallel(data_replicate=2, data_shard=2), 4, MICRO_BATCHES * PASSES + 1, GROUPS),
        (lambda: HybridParallel(data_replicate=4), 4, 0, GROUPS),
    ],
    ids=["FSDP", "stage 2", "replicas", "HybridParallel", "replicas alone"],
)
def test_replicas_reduce_once_a_step_and_weights_that_are_kept_are_gathered_once(
    strategy, ranks, gathers, sums
):
    scatters = MICRO_BATCHES * GROUPS if gathers else 0
    expected = {"all_gather": gathers, "all_reduce": sums, "reduce_scatter": scatters}
    for precision, dtype in {"32-true": "float32", "bf16-mixed": "bfloat16"}.items():
        found = exchanged(strategy(), ranks, precision=precision)
        assert found == {f"{kind} {dtype}": calls for kind, calls in expected.items() if calls}


@pytest.fixture
def replicated():
    """A layer whose replica is torch's fake process: what is reduced stays what this rank has."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    layer = nn.Linear(8, 8, bias=False)
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    layer.set_gradient_divide_factor(1.0)
    yield layer, DeferredReduction(layer, True, True), torch.randn(4, 8)
    dist.destroy_process_group()


def gradient(layer, deferred, x, count):
    for _ in range(count - 1):
        with deferred.accumulating():
            layer(x).sum().backward()
    layer(x).sum().backward()
    return layer.weight.grad.to_local()


def test_the_sum_of_many_micro_batches_is_rounded_once(replicated):
    """64 times a bf16 number is one, too; a sum in bf16 would round each of the 63 others."""
    layer, deferred, x = replicated
    one = gradient(layer, deferred, x, 1).clone()
    layer.weight.grad = None
    assert torch.equal(gradient(layer, deferred, x, 64), 64 * one)


class Skipping(GPT):
    """Leaves out its last block where all labels are ignored."""

    def _run(self, blocks, batch, *more):
        few = {0: blocks[0]} if (batch["labels"] < 0).all() else blocks
        return super()._run(few, batch, *more)


REDUCES_WHAT_IS_LEFT = Version(torch.__version__) >= Version("2.15.dev")


@pytest.mark.parametrize("last", [1, -100])
def test_a_block_that_the_last_micro_batch_leaves_out_is_an_error_or_reduced(last):
    """Its gradients of the others would be dropped before torch 2.15, which reduces them."""
    sizes = {"vocab_size": 64, "n_layer": BLOCKS, "n_head": 2, "n_embd": 16, "max_sequence_length": 16}
    ids = torch.zeros(2, 16, dtype=torch.int64)
    with shards(lambda: Skipping(**sizes), FSDP(replicas=2), 0, 2, accumulate_grad_batches=2) as module:
        strategy = module.trainer.strategy

        def micro_batch(number, label):
            batch = {"input_ids": ids, "labels": torch.full_like(ids, label)}
            strategy.backward(strategy.training_step(batch, number), None)

        with strategy.block_backward_sync():
            micro_batch(0, 1)
        if last == 1:
            micro_batch(1, 1)
        elif REDUCES_WHAT_IS_LEFT:
            micro_batch(1, last)  # its own gradients are zero
            found = [parameter.grad.to_local().clone() for parameter in module.parameters()]
            module.zero_grad()
            micro_batch(0, 1)
            for parameter, whole in zip(module.parameters(), found, strict=True):
                assert torch.equal(parameter.grad.to_local(), whole)
        else:
            with pytest.raises(ConfigError, match="none in its last one"):
                micro_batch(1, last)


def test_optimizers_that_are_built_again_drop_it_too():
    with shards(network, FSDP(replicas=2), 0, 2) as module:
        strategy = module.trainer.strategy
        strategy.setup_optimizers(module.trainer)
        batch = {"input_ids": torch.zeros(2, 16, dtype=torch.int64)}
        with strategy.block_backward_sync():
            _micro_batch(strategy, batch | {"labels": torch.ones(2, 16, dtype=torch.int64)}, 0)
        strategy.optimizers[0].zero_grad()
        _micro_batch(strategy, batch | {"labels": torch.full((2, 16), -100)}, 1)  # gradients of zero
        for parameter in module.parameters():
            assert not parameter.grad.to_local().any()


def test_zero_grad_drops_what_was_not_reduced_yet(replicated):
    layer, deferred, x = replicated
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    deferred.follow([optimizer])
    one = gradient(layer, deferred, x, 1).clone()
    optimizer.zero_grad()
    with deferred.accumulating():
        layer(x).sum().backward()
    assert layer.weight.grad is None
    optimizer.zero_grad()
    assert torch.equal(gradient(layer, deferred, x, 1), one)
