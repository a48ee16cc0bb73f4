"""Ranks divide the matrices whose steps need them whole: each is computed once, and the bits are those of one process."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.case import Case
from conformance.runs import free_port, on_ranks
from core.training.shards import full_tensor
from plugins.cli.configuration.config_files import merge
from plugins.optimizers.muon import Muon
from plugins.optimizers.soap import SOAP
from plugins.strategies.tensors import gather
from tests.support.combinations import LLAMA
from tests.support.same_run import fit, same_bits

SHAPES = [(5, 8), (1, 7), (8, 3), (6, 6), (7, 12), (16, 4), (3, 3), (8, 5), (4, 4)]
"""With shards of uneven lengths, and empty ones; one more than a multiple of the ranks."""
STEPS = 3
PRODUCTS = {Muon: (torch.ops.aten.addmm,), SOAP: (torch.ops.aten.linalg_qr,)}
"""What is counted: of Muon ten a matrix and step, of SOAP two behind the first step, which makes the basis."""
A_MATRIX = {Muon: 10 * STEPS, SOAP: 2 * (STEPS - 1)}
OPTIONS = {Muon: {}, SOAP: {"precondition_frequency": 1}}
PLACES = {
    "shards": (2, (2,), [Shard(0)]),
    "copies": (2, (2,), [Replicate()]),
    "two-way": (4, (2, 2), [Shard(0), Shard(1)]),
    "two-way, one dimension": (4, (2, 2), [Shard(0), Shard(0)]),
    "copies of shards": (4, (2, 2), [Replicate(), Shard(0)]),
    "a dimension of one rank": (4, (1, 4), [Shard(0), Shard(1)]),
}


class Products(TorchDispatchMode):
    """Counts operators."""

    def __init__(self, operators):
        super().__init__()
        self.operators, self.count = operators, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Counts those on tensors that are whole, or shards."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        self.count += func.overloadpacket in self.operators
        return func(*args, **(kwargs or {}))


def stepped(kind, parameters, place):
    """Returns weights, states, and how many products this process computed."""
    optimizer = kind(parameters, lr=0.1, **OPTIONS[kind])
    with Products(PRODUCTS[kind]) as products:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step + 1)
            for parameter in parameters:
                parameter.grad = place(torch.randn(parameter.shape, generator=generator), parameter)
            optimizer.step()
            _row_by_row(optimizer)
    weights = [full_tensor(parameter.detach()) for parameter in parameters]
    return [weights, gather(optimizer.state_dict(), keep=True)], products.count


def _row_by_row(optimizer):
    """Lays out the bases of a single process as those are that come from ranks: products round by the layout."""
    for state in optimizer.state.values():
        if "Q" in state:
            state["Q"] = [one.contiguous() if isinstance(one, torch.Tensor) else one for one in state["Q"]]


def starts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def of_rank(rank, ranks, port, folder, case):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    found = case()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def on_each(ranks, folder, case):
    """Returns what a function returned on each rank."""
    on_ranks(of_rank, ranks, ranks, free_port(), folder, case)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def placed(kind, shape, placements):
    mesh = init_device_mesh("cpu", shape)

    def place(tensor, _=None):
        return distribute_tensor(tensor, mesh, placements)

    return stepped(kind, [nn.Parameter(place(start)) for start in starts()], place)


def how_often(name, kind):
    """Returns the mark of a place: CI tries one dimension and two, and copies."""
    often = kind is Muon and name in ("shards", "copies", "two-way")
    return pytest.mark.ci if often else pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(name, kind, marks=how_often(name, kind)) for kind in (Muon, SOAP) for name in PLACES],
)
def test_each_matrix_is_computed_once_to_the_bits_of_one_process(name, kind, tmp_path):
    ranks, shape, placements = PLACES[name]
    expected, alone = stepped(kind, [nn.Parameter(start) for start in starts()], lambda tensor, _: tensor)
    found = on_each(ranks, tmp_path, partial(placed, kind, shape, placements))
    assert all(same_bits(values, expected) for values, _ in found)
    assert alone == len(SHAPES) * A_MATRIX[kind]
    counts = [count // A_MATRIX[kind] for _, count in found]
    assert sum(counts) == len(SHAPES)
    assert max(counts) == -(-len(SHAPES) // ranks)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False))


def fsdp_over_tensor_parallel(kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    network = two_layers()
    parallelize_module(network, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(network, mesh=mesh["data"])
    parameters = list(network.parameters())
    assert type(parameters[0].placements[0]) is not Shard  # torch's strided one

    def place(tensor, parameter):
        return distribute_tensor(tensor, mesh, parameter.placements, src_data_rank=None)

    return stepped(kind, parameters, place)


@pytest.mark.parametrize(
    "kind", [pytest.param(Muon, marks=pytest.mark.slow), pytest.param(SOAP, marks=pytest.mark.ci)]
)
def test_matrices_that_fsdp_shards_over_tensor_parallelism_are_divided(kind, tmp_path):
    expected, _ = stepped(kind, list(two_layers().parameters()), lambda tensor, _: tensor)
    found = on_each(4, tmp_path, partial(fsdp_over_tensor_parallel, kind))
    assert all(same_bits(values, expected) for values, _ in found)
    assert sum(count for _, count in found) == 2 * A_MATRIX[kind]


TWO_WAY = {"class_path": "HybridParallel", "init_args": {"data_shard": 2, "tensor": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "strategy"), [("SOAP", 2, {"class_path": "FSDP"}), ("Muon", 4, TWO_WAY)]
)
def test_a_killed_run_goes_on_bitwise(name, ranks, strategy):
    values = merge(deepcopy(LLAMA), deepcopy(Case(name, kind="optimizers").overlay))
    values = merge(values, {"trainer": {"strategy": strategy}})
    expected = fit(values, ranks, name=f"divided-{name}-whole")
    assert expected.code == 0, expected.error_text
    assert fit(values, ranks, kill_at=3, name=f"divided-{name}").code != 0
    found = fit(values, ranks, "--ckpt_path=last", name=f"divided-{name}")
    assert found.code == 0, found.error_text
    one, other = found.checkpoint(), expected.checkpoint()
    for key in ("state_dict", "optimizer_states", "global_step"):
        assert same_bits(one[key], other[key]), key
