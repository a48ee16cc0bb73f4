"""Every optimizer steps spread weights as one process steps whole ones, or preflight names another one."""

import re
import socket
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from core import catalog
from core.config_files import merge
from core.shards import whole
from core.testing.case import Case
from plugins.optimizers.muon import Muon
from tests.distributed.combinations import LLAMA
from tests.distributed.same_run import TOLERANCE, fit, one_process, weights_apart

HYBRID = {"class_path": "HybridParallel", "init_args": {"data_shard": 2, "tensor": 2}}
STRATEGIES = {"FSDP": (2, {"class_path": "FSDP"}), "data_shard 2, tensor 2": (4, HYBRID)}
OPTIMIZERS = sorted(e.name for e in catalog.entries() if e.kind == "optimizers" and e.package == "leyden")
DEFAULT = {("SGD", "FSDP"), ("Muon", "FSDP")}
BOUNDS = {"Muon": 2.0**-8}
"""Of weights. Muon rounds to bfloat16: a gradient's 1e-7 makes that 2^-9 for some numbers, which five iterations make up
to 480 times larger where singular values are small; it steps from the same numbers to the same bits, see below."""


def overlay(name):
    """Three steps without weights whose gradients are 0 but for rounding, which Adam makes steps of."""
    values = merge({"trainer": {"max_steps": 3}}, deepcopy(LLAMA))
    return merge(values, deepcopy(Case(name, kind="optimizers").overlay))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=[pytest.mark.slow] * ((name, strategy) not in DEFAULT))
        for name in OPTIMIZERS
        for strategy in STRATEGIES
    ],
)
def test_steps_are_those_of_one_process(name, strategy):
    ranks, chosen = STRATEGIES[strategy]
    alone = overlay(name)
    found = fit(alone | {"trainer": alone["trainer"] | {"strategy": chosen}}, ranks)
    if found.code == 2:
        instead = re.search(
            rf"{name} .* and .* exclude each other.*: take (.*) with sharded weights", found.complaint
        )
        assert set(instead[1].split(" or ")) <= set(OPTIMIZERS)
        return
    expected = one_process(alone)
    assert found.code == 0, found.complaint
    assert found.record["figures"].keys() == expected.record["figures"].keys() == {"1", "2", "3"}
    for step, figures in expected.record["figures"].items():
        assert found.record["figures"][step]["train/loss"] == pytest.approx(
            figures["train/loss"], rel=TOLERANCE
        )
    assert weights_apart(found, expected) < BOUNDS.get(name, TOLERANCE)


def _muon(place):
    generator = torch.Generator().manual_seed(0)
    first, *gradients = torch.randn(4, 5, 8, generator=generator)
    parameter = torch.nn.Parameter(place(first))
    parameter.hidden_matrix = True
    optimizer = Muon([parameter], lr=0.1)
    for gradient in gradients:
        parameter.grad = place(gradient)
        optimizer.step()
    return whole(parameter.detach())


def _rank(rank, port, folder):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found = [_muon(lambda tensor, dim=dim: distribute_tensor(tensor, mesh, [Shard(dim)])) for dim in (0, 1)]
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


def test_muon_steps_a_spread_matrix_to_the_same_bits(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (port, tmp_path), 2)
    expected = _muon(lambda tensor: tensor)
    for found in torch.load(tmp_path / "found.pt", weights_only=True):
        assert torch.equal(found, expected)
