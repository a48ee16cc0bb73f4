"""Expert parallelism on gloo ranks: the same losses, gradient norms, weights and checkpoints as one process."""

import pytest
import torch

from tests.support.same_run import TOLERANCE, differences, fit, one_process

NETWORK = {
    "class_path": "Mixtral",
    "init_args": {
        "vocab_size": 64, "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "intermediate_size": 24, "n_experts": 4,
        "experts_per_token": 2, "max_sequence_length": 16, "tie_embeddings": True, "init_std": {"*.router": 0.5},
    },
}  # fmt: skip
DOTS = {
    "class_path": "Dots1",
    "init_args": {
        "vocab_size": 64, "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "intermediate_size": 24, "n_experts": 8,
        "experts_per_token": 2, "expert_size": 12, "dense_layers": 1, "max_sequence_length": 16,
        "init_std": {"*.router": 0.5},
    },
}  # fmt: skip
BALANCED = {
    "class_path": "BalancedRouting",
    "init_args": {"objective": {"class_path": "CausalLM"}, "load_balancing": 0.0, "z_loss": 0.01},
}
PER_ROW = {
    "class_path": "BalancedRouting",
    "init_args": {
        "objective": {"class_path": "CausalLM"},
        "load_balancing": 0.1,
        "z_loss": 0.01,
        "over": "sequence",
    },
}


def mixture(strategy=None, network=NETWORK, objective=PER_ROW, **trainer):
    values = {"model": {"network": network, "objective": objective}, "trainer": trainer}
    if strategy is not None:
        values["trainer"]["strategy"] = {"class_path": "HybridParallel", "init_args": strategy}
    return values


def assert_same(found, expected):
    apart = differences(found, expected)
    assert max(apart.values()) < TOLERANCE, apart


LAYOUTS = [
    (2, {"expert": 2}),
    pytest.param(4, {"expert": 4}, marks=pytest.mark.ci),
    pytest.param(4, {"expert": 2, "data_shard": 2}, marks=pytest.mark.ci),
    pytest.param(4, {"expert": 2, "data_replicate": 2}, marks=pytest.mark.ci),
    pytest.param(4, {"expert": 2, "tensor": 2}, marks=pytest.mark.ci),
    pytest.param(4, {"expert": 2, "tensor": 2, "sequence": 2}, marks=pytest.mark.ci),
]


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS, ids=str)
def test_experts_on_several_ranks_train_as_in_one_process(ranks, sizes):
    assert_same(fit(mixture(sizes), ranks), one_process(mixture()))


@pytest.mark.ci
def test_experts_are_spread_over_stages_as_well():
    plain = {"class_path": "CausalLM"}
    found = fit(mixture({"expert": 2, "pipeline": 2}, objective=plain), 4)
    assert_same(found, one_process(mixture(objective=plain)))


@pytest.mark.ci
def test_shared_experts_and_biases_are_the_same_on_several_ranks():
    balancing = [{"class_path": "BiasBalancing", "init_args": {"rate": 0.01}}]
    expected = one_process(mixture(network=DOTS, callbacks=balancing))
    found = fit(mixture({"expert": 2}, network=DOTS, callbacks=balancing), 2)
    assert_same(found, expected)
    name = "network.layers.2.mlp.router.e_score_correction_bias"
    biases = [one.checkpoint()["state_dict"][name] for one in (found, expected)]
    assert torch.equal(*biases)
    assert biases[0].abs().max() > 0
