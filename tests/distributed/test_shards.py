"""What is computed over sharded weights on two real gloo ranks is what one process computes over whole ones."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from callbacks.exponential_moving_average import ExponentialMovingAverage
from callbacks.gradient_clip import GradientClip
from conformance.runs import free_port, on_ranks
from core.training import shards
from plugins.optimizers.adamw import AdamW
from plugins.strategies.mesh_strategy import MeshStrategy
from toolkit import updates

RANKS = 2
REDUCED = {"sum": [3.0, 10.0], "mean": [1.5, 5.0], "max": [2.0, 5.0], "min": [1.0, 5.0]}
"""What (1, 5) and (2, 5) come to."""


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def backward(net, factor):
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    (factor * net(rows).square().sum()).backward()  # the same rows on each rank: the mean is that of one


class Module(nn.Module):
    """What a callback needs of the module."""

    device = torch.device("cpu")

    def __init__(self, net):
        super().__init__()
        self.network = net

    def gradient_norm(self, optimizer):
        return shards.total_norm(shards.gradients(optimizer))


class Trainer:
    """What a callback needs of the trainer."""

    global_step, log_every_n_steps, strategy = 0, 10, None
    global_rank, world_size, lightning_module = 0, 1, SimpleNamespace(loss_ranks=None)


def computed(net, method):
    """Clips, averages and drops updates over three steps; returns everything, whole."""
    optimizer, module, trainer = AdamW(net.parameters(), lr=0.1), Module(net), Trainer()
    clip, average = GradientClip(method, 0.3, alpha=0.5, z=0.5, warmup_steps=2), ExponentialMovingAverage(0.5)
    average.on_train_start(trainer, module)
    norms = []
    for step, factor in enumerate((1.0, 1.1, 30.0, 1.0)):
        optimizer.zero_grad()
        backward(net, factor)
        norms.append(module.gradient_norm(optimizer))
        clip.on_before_optimizer_step(trainer, module, optimizer)
        if step == 1:
            updates.drop_update(optimizer, torch.tensor(True))
        optimizer.step()
        trainer.global_step += 1
        average.on_train_batch_end(trainer, module, None, None, step)
    moments = [shards.full_tensor(optimizer.state[p]["exp_avg"]) for p in net.parameters()]
    weights = [shards.full_tensor(p.detach()) for p in net.parameters()]
    state = average.state_dict()
    again = ExponentialMovingAverage(0.5)
    again.load_state_dict(state)
    again.on_train_start(trainer, module)
    averages, restored = (
        [shards.full_tensor(value) for value in one["averages"].values()]
        for one in (state, again.state_dict())
    )
    same = all(torch.equal(a, b) for a, b in zip(restored, averages, strict=True))
    return {"norms": norms, "weights": weights, "moments": moments, "averages": averages,
            "restored": [torch.tensor(same)]}  # fmt: skip


class Parts:
    """A checkpoint format to which each rank hands its shards."""

    def save_parts(self, checkpoint, path):
        raise NotImplementedError


def sent_by_saves(rank):
    """Returns how many collectives the start of an average and each of its saves takes; stages have other names."""
    net = network()
    fully_shard(net)
    counts = {}
    for form, io in {"file": None, "shards": Parts()}.items():
        average, trainer, count = ExponentialMovingAverage(), Trainer(), []
        trainer.strategy, trainer.global_rank = SimpleNamespace(checkpoint_io=io), rank
        for module in (Module(net), Module(nn.ModuleDict({f"stage{rank}": net}))):
            with CommDebugMode() as start:
                average.on_train_start(trainer, module)
            count.append(start.get_total_counts())
            for _ in range(2):
                checkpoint = {"callbacks": {average.state_key: average.state_dict()}}
                with CommDebugMode() as save:
                    average.on_save_checkpoint(trainer, module, checkpoint)
                count.append(save.get_total_counts())
        counts[form] = count
    return counts


def of_rank(rank, port, folder):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
    }
    dist.init_process_group("gloo")
    try:
        found = {}
        for method in ("norm", "value", "adaptive"):
            net = network()
            fully_shard(net[0])
            fully_shard(net)
            assert isinstance(net[0].weight, DTensor)
            found[method] = computed(net, method)
        found["reduced"] = {
            name: MeshStrategy.reduce(None, torch.tensor([1.0 + rank, 5.0]), reduce_op=name)
            for name in REDUCED
        }
        found["sent"] = sent_by_saves(rank)
        torch.save(found, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(of_rank, RANKS, free_port(), folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_strategies_reduce_as_they_are_told(found):
    for rank in found:
        assert {name: value.tolist() for name, value in rank["reduced"].items()} == REDUCED


@pytest.mark.parametrize("method", ["norm", "value", "adaptive"])
def test_clipping_averages_and_dropped_updates_on_shards(found, method):
    expected = computed(network(), method)
    for rank in found:
        for name, values in expected.items():
            for one, other in zip(rank[method][name], values, strict=True):
                # sums of float32 in another order, through Adam's division
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=f"{name}: {one} and {other}")
        assert bool(rank[method]["restored"][0])


def test_an_average_asks_the_ranks_once_and_sends_no_shard_that_each_rank_writes(found):
    # start, save, save, of one network on all ranks; then of a stage on each. An exchange of objects is two collectives.
    weights, objects = len(list(network().parameters())), 2
    file = [objects, weights, weights, objects, weights + objects, weights + objects]
    for rank in found:
        assert rank["sent"] == {"file": file, "shards": [objects, 0, 0, objects, 0, 0]}
