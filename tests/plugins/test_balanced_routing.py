"""Routing losses against transformers and closed forms; balancing without a loss; statistics."""

import csv
import math

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from callbacks.bias_balancing import BiasBalancing
from callbacks.routing_monitor import figures
from core.errors import ConfigError
from plugins.networks.gpt import GPT
from plugins.networks.mixtral import Mixtral
from plugins.networks.parts.moe import Router
from plugins.objectives.balanced_routing import BalancedRouting, routing_sums
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.multi_token_prediction import MultiTokenPrediction
from tests.support.reference_models import lively, tokens
from tests.support.same_run import fit
from toolkit.routing import recorded

SMALL = {
    "vocab_size": 61,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 32,
    "intermediate_size": 48,
    "n_experts": 6,
    "n_kv_head": 2,
    "experts_per_token": 2,
    "max_sequence_length": 64,
}


def batch_of(rows=4, length=50):
    """Returns rows with very different numbers of labels."""
    ids = tokens(rows, length)
    labels = ids.roll(-1, 1)
    for row in range(rows):
        labels[row, 10 * row + 5 :] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("per_row", [False, True])
def test_the_balancing_loss_is_that_of_transformers(per_row):
    network, batch = lively(Mixtral(**SMALL)), batch_of()
    with recorded(network) as routings:
        network(batch)
    seen = batch["labels"] != -100
    balance, squares = routing_sums(routings, seen, per_row)
    expected = torch.zeros(())
    rows = [slice(0, 200)] if not per_row else [slice(50 * row, 50 * row + 50) for row in range(4)]
    for routing in routings:
        for part in rows:
            mask = seen.flatten()[part]
            loss = load_balancing_loss_func((routing.logits[part],), 6, 2, mask[None].long())
            expected = expected + loss * mask.sum() / 3
    assert balance.item() == pytest.approx(expected.item(), rel=1e-6)
    [gradient] = torch.autograd.grad(balance, network.routers[0].weight, retain_graph=True)
    [theirs] = torch.autograd.grad(expected, network.routers[0].weight, retain_graph=True)
    assert (gradient - theirs).abs().max() < 1e-6 * theirs.abs().max()
    log_z = torch.stack([routing.logits.exp().sum(-1).log() for routing in routings])
    assert squares.item() == pytest.approx((log_z**2 * seen.flatten()).sum().item() / 3, rel=1e-5)


def test_a_balanced_router_costs_k():
    router = Router(6, 6, 2)
    torch.nn.init.eye_(router.weight)
    routing = router(
        100 * (torch.eye(6) + torch.eye(6).roll(1, 1))
    )  # each expert is the choice of two tokens
    balance, _ = routing_sums([routing], torch.ones(1, 6, dtype=torch.bool), False)
    assert balance.item() / 6 == pytest.approx(2.0)


def gradients(objective, network, batches):
    """Returns gradients of the loss of all batches over their label tokens."""
    network.zero_grad()
    sums = [objective.loss(network, batch) for batch in batches]
    weight = sum(loss.weight for loss, _ in sums)
    (sum(loss.total for loss, _ in sums) / weight).backward()
    means = {
        name: sum(found[name].total for _, found in sums) / sum(found[name].weight for _, found in sums)
        for name in sums[0][1]
    }
    return [parameter.grad.clone() for parameter in network.parameters()], means


def test_over_sequences_accumulation_changes_nothing_and_over_batches_it_does():
    network, batch = lively(Mixtral(**SMALL)).double(), batch_of()
    network.train()
    parts = [{name: value[rows] for name, value in batch.items()} for rows in ([0], [1, 2], [3])]
    apart = {}
    for over in ("sequence", "batch"):
        objective = BalancedRouting(CausalLM(), load_balancing=0.5, z_loss=0.1, over=over)
        whole, figures_of_all = gradients(objective, network, [batch])
        cut, figures_of_parts = gradients(objective, network, parts)
        apart[over] = max(
            float((one - other).abs().max() / one.abs().max()) for one, other in zip(whole, cut, strict=True)
        )
        assert figures_of_all["router_z_loss"].item() == pytest.approx(
            figures_of_parts["router_z_loss"].item()
        )
    # loads are counted in float32
    assert apart["sequence"] < 1e-6
    assert apart["batch"] > 1e-3


def test_the_loss_is_the_objective_plus_the_weighted_means_and_in_validation_the_objective():
    network, batch = lively(Mixtral(**SMALL)).train(), batch_of()
    objective = BalancedRouting(CausalLM(), load_balancing=0.3, z_loss=0.2)
    loss, found = objective.loss(network, batch)
    alone, _ = CausalLM().loss(network, batch)
    extra = 0.3 * found["load_balancing"].mean + 0.2 * found["router_z_loss"].mean
    assert loss.mean.item() == pytest.approx((alone.mean + extra).item(), rel=1e-6)
    assert found["task_loss"].mean.item() == pytest.approx(alone.mean.item())
    assert objective.eval().loss(network, batch)[0].total.item() == alone.total.item()


def test_what_has_no_experts_or_a_wrong_coefficient_is_refused():
    with pytest.raises(ConfigError, match="GPT has no experts"):
        BalancedRouting(CausalLM()).loss(
            GPT(n_layer=1, n_head=1, n_embd=8, vocab_size=61, max_sequence_length=64), batch_of()
        )
    network, around = Mixtral(**SMALL), MultiTokenPrediction(BalancedRouting(CausalLM()))
    around.change_network(network)
    with pytest.raises(ConfigError, match="Put MultiTokenPrediction within BalancedRouting"):
        around.loss(network, batch_of())
    with pytest.raises(ConfigError, match="z_loss from 0 upwards"):
        BalancedRouting(CausalLM(), z_loss=-1.0)
    with pytest.raises(ConfigError, match="rate is 0"):
        BiasBalancing(rate=0.0)


def test_figures_of_known_loads():
    loads = torch.tensor([[5.0, 5.0, 5.0, 5.0], [16.0, 4.0, 0.0, 0.0]])
    found = figures(loads, torch.tensor([0.0, 10.0]))
    assert found["routing/max_load"] == pytest.approx(3.2)
    assert found["routing/min_load"] == 0.0
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2)) / math.log(4)
    assert found["routing/entropy"] == pytest.approx((1 + entropy) / 2)
    assert found["routing/dropped"] == 0.25


NETWORK = {
    "class_path": "Dots1",
    "init_args": {
        "vocab_size": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_kv_head": 2,
        "n_embd": 16,
        "intermediate_size": 32,
        "n_experts": 4,
        "experts_per_token": 2,
        "expert_size": 8,
        "dense_layers": 1,
        "max_sequence_length": 16,
        "init_std": {"*.router": 1.0},
    },
}


def logged(done):
    """Returns what MetricsCSV wrote of routing: one mapping for each step."""
    [path] = done.folder.rglob("metrics.csv")
    with path.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("routing/max_load")]
    return [{key: float(value) for key, value in row.items() if key.startswith("routing/")} for row in rows]


def dots(callbacks, **trainer):
    return {
        "trainer": {"callbacks": callbacks, "logger": [{"class_path": "MetricsCSV"}], **trainer},
        "model": {"network": NETWORK, "optimizer": {"init_args": {"lr": 0.0, "momentum": 0.0}}},
    }


@pytest.mark.ci
def test_biases_follow_the_load_of_whole_steps_and_even_it_out():
    skewed = {"n_experts": 8, "experts_per_token": 1}
    balancing = {"class_path": "BiasBalancing", "init_args": {"rate": 0.015625}}
    loads = {}
    for name, callbacks in {
        "left alone": ["RoutingMonitor"],
        "balanced": [balancing, "RoutingMonitor"],
    }.items():
        overlay = dots(callbacks, max_steps=30)  # the learning rate is 0: only the biases change
        overlay["model"]["network"] = {**NETWORK, "init_args": NETWORK["init_args"] | skewed}
        done = fit(overlay, 1)
        assert done.code == 0, done.error_text
        found = logged(done)
        assert len(found) == 30
        loads[name] = sum(one["routing/max_load"] for one in found[-10:]) / 10
    assert loads["balanced"] < loads["left alone"] - 0.15, loads
    bias = done.checkpoint()["state_dict"]["network.layers.1.mlp.router.e_score_correction_bias"]
    assert torch.equal(64 * bias, (64 * bias).round())  # whole steps, one for each optimizer step
    assert bias.abs().max() > 0


def test_loads_are_of_all_micro_batches_and_ranks():
    callbacks = [{"class_path": "BiasBalancing", "init_args": {"rate": 0.125}}, "RoutingMonitor"]
    ahead = {"class_path": "MultiTokenPrediction", "init_args": {"objective": {"class_path": "CausalLM"}}}
    # In an odd number of steps a bias that goes up and down is not 0 again.
    overlays = [dots(callbacks, max_steps=5), dots(callbacks, max_steps=5, strategy={"class_path": "DDP"})]
    for overlay in overlays:
        overlay["model"]["objective"] = ahead  # its router is the second
    alone, ranks = fit(overlays[0], 1), fit(overlays[1], 2)
    assert (alone.code, ranks.code) == (0, 0), ranks.error_text
    one, other = alone.checkpoint()["state_dict"], ranks.checkpoint()["state_dict"]
    names = [name for name in one if name.endswith("router.e_score_correction_bias")]
    assert sorted(names) == [
        f"{part}.mlp.router.e_score_correction_bias"
        for part in ("network.layers.1", "objective.ahead.0.block")
    ]
    assert all(torch.equal(one[name], other[name]) and one[name].any() for name in names)
    assert len(logged(alone)) == 5
    assert logged(ranks) == logged(alone)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layers", "schedule"),
    [
        pytest.param({"n_layer": 4}, "Interleaved1F1B", id="blocks in turn"),
        pytest.param(
            {"n_layer": 3, "dense_layers": 2}, "1F1B", id="a stage without experts", marks=pytest.mark.slow
        ),
    ],
)
def test_loads_of_all_stages_of_a_pipeline_are_those_of_one_process(layers, schedule):
    """The pipeline's first stage runs once more for the shapes of its messages, which must not count."""
    callbacks = [{"class_path": "BiasBalancing", "init_args": {"rate": 0.125}}, "RoutingMonitor"]
    sizes = {"pipeline": 2, "schedule": schedule}
    overlays = [
        dots(callbacks, max_steps=3),
        dots(callbacks, max_steps=3, strategy={"class_path": "HybridParallel", "init_args": sizes}),
    ]
    for overlay in overlays:
        overlay["model"]["network"] = {**NETWORK, "init_args": NETWORK["init_args"] | layers}
    alone, stages = fit(overlays[0], 1), fit(overlays[1], 2)
    assert (alone.code, stages.code) == (0, 0), stages.error_text
    assert len(logged(alone)) == 3
    assert logged(stages) == logged(alone)
    one, other = alone.checkpoint()["state_dict"], stages.checkpoint()["state_dict"]
    names = [name for name in one if name.endswith("router.e_score_correction_bias")]
    assert names
    assert all(torch.equal(one[name], other[name]) and one[name].any() for name in names)
