"""Every optimizer steps spread weights as one process steps whole ones."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.case import Case
from conformance.runs import free_port, on_ranks
from core import catalog
from core.training.shards import full_tensor
from plugins.cli.configuration.config_files import merge
from plugins.optimizers.adafactor import Adafactor
from plugins.optimizers.adamw8bit import AdamW8bit
from plugins.optimizers.lion8bit import Lion8bit
from plugins.optimizers.muon import Muon
from plugins.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from plugins.optimizers.soap import SOAP
from plugins.optimizers.torchao_adamw8bit import (
    BLOCK,
    MOMENTS,
    TorchaoAdamW8bit,
    get_qmap_signed,
    get_qmap_unsigned,
)
from plugins.strategies.tensors import gather, parts
from tests.support.combinations import LLAMA
from tests.support.same_run import TOLERANCE, fit, one_process, same_bits, weights_apart

HYBRID = {"class_path": "HybridParallel", "init_args": {"data_shard": 2, "tensor": 2}}
STRATEGIES = {"FSDP": (2, {"class_path": "FSDP"}), "data_shard 2, tensor 2": (4, HYBRID)}
OPTIMIZERS = sorted(e.name for e in catalog.entries() if e.kind == "optimizers" and e.package == "leyden")
CI = {("SGD", "FSDP"), ("TorchaoAdamW8bit", "FSDP")}
LOSSES = {"SOAP": 1e-3}
"""Of losses. Of its first eigenbases those of a null space are a matter of rounding, and Adam steps differently in each: weights
may be far apart. From the same gradients it makes the same steps, see below."""
EIGHT_BITS = dict.fromkeys(("AdamW8bit", "Lion8bit", "PagedAdamW8bit", "TorchaoAdamW8bit"), 1e-2)
BOUNDS = {"Muon": 2.0**-8, "SOAP": 1.0, **EIGHT_BITS}
"""Of weights. Moments of 8 bits: in float32 where columns are cut, and where rounding falls to the next code, a moment is 2% off. Muon rounds to bfloat16: a gradient's 1e-7 makes that 2^-9 for some numbers, which five iterations make up
to 480 times larger where singular values are small; it steps from the same numbers to the same bits, see below."""


def overlay(name):
    """Three steps without weights whose gradients are 0 but for rounding, which Adam makes steps of."""
    values = merge({"trainer": {"max_steps": 3}}, deepcopy(LLAMA))
    if name == "SOAP":
        merge(values, {"trainer": {"precision": "64-true"}})
    if "8bit" in name:  # whose smaller tensors are not quantised
        merge(values, {"model": {"network": {"init_args": {"n_embd": 128, "n_layer": 1}}}})
    merge(values, deepcopy(Case(name, kind="optimizers").overlay))
    if name in ("AdamW", "AdEMAMix"):  # one number in 10,000 has a gradient of its epsilon's size
        merge(values, {"model": {"optimizer": {"init_args": {"eps": 1e-6}}}})
    return values


def how_often(name, strategy):
    """Returns the marks of a run: each takes 2 to 4 CPU seconds."""
    return [pytest.mark.ci if (name, strategy) in CI else pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=how_often(name, strategy))
        for name in OPTIMIZERS
        for strategy in STRATEGIES
    ],
)
def test_steps_are_those_of_one_process(name, strategy):
    ranks, chosen = STRATEGIES[strategy]
    alone = overlay(name)
    found = fit(alone | {"trainer": alone["trainer"] | {"strategy": chosen}}, ranks)
    expected = one_process(alone)
    assert found.code == 0, found.error_text
    assert found.record["figures"].keys() == expected.record["figures"].keys() == {"1", "2", "3"}
    for step, figures in expected.record["figures"].items():
        assert found.record["figures"][step]["train/loss"] == pytest.approx(
            figures["train/loss"], rel=LOSSES.get(name, TOLERANCE)
        )
    assert weights_apart(found, expected) < BOUNDS.get(name, TOLERANCE)


def _stepped(kind, place, shapes, state=None, steps=range(3)):
    """Returns an optimizer and its parameters after some steps; `place` makes parts of tensors."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(place(torch.randn(shape, generator=generator))) for shape in shapes]
    optimizer = kind(parameters, lr=0.1)
    if state is not None:
        optimizer.load_state_dict(state(parameters))
    for step in steps:
        generator.manual_seed(step + 1)
        for parameter in parameters:
            parameter.grad = place(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    return optimizer, [full_tensor(parameter.detach()) for parameter in parameters]


def _rank(rank, port, folder, case):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = case(init_device_mesh("cpu", (2,)))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


def on_two_ranks(folder, case):
    """Returns what a function returns on rank 0."""
    on_ranks(_rank, 2, free_port(), folder, case)
    return torch.load(folder / "found.pt", weights_only=True)


MATRICES = [(5, 8), (1, 7), (8, 3)]
"""More than ranks, so that one of them has none to compute at the end."""


def _muon(mesh):
    return [
        _stepped(Muon, lambda tensor, dim=dim: distribute_tensor(tensor, mesh, [Shard(dim)]), MATRICES)[1]
        for dim in (0, 1)
    ]


@pytest.mark.ci
def test_muon_steps_a_spread_matrix_to_the_same_bits(tmp_path):
    expected = _stepped(Muon, lambda tensor: tensor, MATRICES)[1]
    assert same_bits(on_two_ranks(tmp_path, _muon), [expected, expected])


EVEN, UNEVEN = [(96, 128), (7,)], [(97, 256)]


STEPPED = {
    Adafactor: [(5, 8), (8, 8), (7,), (3, 4, 6)],
    SOAP: [(5, 8), (8, 8), (7,)],
    ScheduleFreeAdamW: [(5, 8), (7,), (1, 30)],
    AdamW8bit: [(96, 128), (97, 256), (7,), (1, 30)],
    Lion8bit: [(96, 128), (97, 256), (7,), (1, 30)],
}
"""Optimizer -> shapes: with uneven shards, of which one rank has none, and a matrix whose factors have its shape."""
WHOLE_BLOCKS = {(kind, 0, 0) for kind in (AdamW8bit, Lion8bit)}
"""Optimizer, sharded dimension, parameter: where shards are whole blocks of 256 elements, whose moments have 8 bits."""


def _of_each(mesh):
    found = {}
    for kind, shapes in STEPPED.items():
        alone = _stepped(kind, lambda tensor: tensor, shapes)[0].state_dict()
        for dim in (0, 1):

            def place(tensor, dim=dim):
                return distribute_tensor(tensor, mesh, [Shard(min(dim, tensor.ndim - 1))])

            def again(state, place=place, kind=kind, shapes=shapes):
                def cut(parameters):
                    return {**state, "state": {n: parts(s, parameters[n]) for n, s in state["state"].items()}}

                return gather(_stepped(kind, place, shapes, cut, range(0))[0].state_dict(), keep=True)

            optimizer, weights = _stepped(kind, place, shapes)
            state = gather(optimizer.state_dict(), keep=True)
            found[f"{kind.__name__}-{dim}"] = [weights, state, again(state), again(alone)]
    return found


@pytest.mark.ci
def test_shards_are_stepped_and_restored_as_whole_parameters(tmp_path):
    found = on_two_ranks(tmp_path, _of_each)
    for kind, shapes in STEPPED.items():
        optimizer, expected = _stepped(kind, lambda tensor: tensor, shapes)
        alone = optimizer.state_dict()
        for dim in (0, 1):
            weights, state, again, restored = found[f"{kind.__name__}-{dim}"]
            assert same_bits(again, state)
            for number, own in alone["state"].items():
                case = f"{kind.__name__}, shards of dimension {dim}, parameter {number}"
                if "absmax1" in own and (kind, dim, number) not in WHOLE_BLOCKS:
                    values = own["qmap1"][own["state1"].int()].flatten()
                    scales = own["absmax1"].repeat_interleave(BLOCK)
                    moment = (values * scales).view_as(own["state1"])
                    assert torch.equal(restored["state"][number]["state1"], moment), case
                    assert state["state"][number]["state1"].dtype == torch.float32, case
                    continue
                assert same_bits(restored["state"][number], own), case
                torch.testing.assert_close(  # norms and products of another order of sums
                    weights[number], expected[number].detach(), rtol=2e-6, atol=2e-6, msg=case
                )
                if "absmax1" in own:
                    assert same_bits(state["state"][number], own), case


def _torchao(mesh):
    def place(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    found = {}
    for name, shapes in {"even": EVEN, "uneven": UNEVEN}.items():
        optimizer, weights = _stepped(TorchaoAdamW8bit, place, shapes)
        state = gather(optimizer.state_dict(), keep=True)

        def parted(parameters, state=state):
            return {**state, "state": {n: parts(own, parameters[n]) for n, own in state["state"].items()}}

        again = _stepped(TorchaoAdamW8bit, place, shapes, parted, range(0))[0]
        found[name] = [weights, state, gather(again.state_dict(), keep=True)]
    alone = _stepped(TorchaoAdamW8bit, lambda tensor: tensor, UNEVEN)[0].state_dict()["state"]

    def cut(parameters):
        return {**optimizer.state_dict(), "state": {n: parts(own, parameters[n]) for n, own in alone.items()}}

    found["cut"] = {}
    for dim in (0, 1):
        placed = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(dim)])
        taken = _stepped(TorchaoAdamW8bit, placed, UNEVEN, cut, range(0))[0]
        found["cut"][dim] = gather(taken.state_dict(), keep=True)["state"][0]
    return found


@pytest.mark.slow
def test_torchao_keeps_what_one_process_would_on_any_number_of_ranks(tmp_path):
    found = on_two_ranks(tmp_path, _torchao)
    alone, weights = _stepped(TorchaoAdamW8bit, lambda tensor: tensor, EVEN)
    state = alone.state_dict()
    assert state["state"][0]["exp_avg_codes"].dtype == torch.uint8
    assert same_bits(found["even"], [weights, state, state])
    # a row more on one rank than on the other: whole moments there, of which one process makes 8 bits again
    spread, again = found["uneven"][1:]
    assert spread["state"][0]["exp_avg"].dtype == torch.float32
    assert same_bits(again, spread)
    alone = _stepped(TorchaoAdamW8bit, lambda tensor: tensor, UNEVEN)[0].state_dict()
    taken = _stepped(TorchaoAdamW8bit, lambda tensor: tensor, UNEVEN, lambda _: spread, range(0))[
        0
    ].state_dict()
    for name in MOMENTS:
        own, theirs = (_moment(state["state"][0], name) for state in (alone, taken))
        torch.testing.assert_close(own, theirs, rtol=0.2, atol=float(own.abs().max()) / 50)
        for dim in (0, 1):
            torch.testing.assert_close(found["cut"][dim][name], own, rtol=1e-6, atol=0)


def _moment(state, name):
    values = torch.tensor(get_qmap_signed() if name == "exp_avg" else get_qmap_unsigned())
    blocks = values[state[f"{name}_codes"].int()].view(-1, BLOCK) * state[f"{name}_scales"].view(-1, 1)
    return blocks.view_as(state[f"{name}_codes"])
