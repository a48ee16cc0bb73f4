"""The row of padding: zero at the beginning and after training, on every strategy, and nothing else is changed."""

import pytest
import torch

from callbacks.padding_row import PaddingRow, embeddings
from core.errors import ConfigError
from plugins.networks.llama import Llama
from plugins.objectives.causal_lm import CausalLM
from tests.support.reference_models import tokens
from tests.support.same_run import TOLERANCE, differences, fit, one_process
from tests.support.small_networks import DENSE


@pytest.mark.parametrize("tied", [True, False])
def test_only_the_rows_gradient_is_changed(tied):
    network, callback = Llama(**DENSE, tie_embeddings=tied), PaddingRow(7)
    callback.change_network(network)
    assert not network.embed_tokens.weight[7].any()
    assert network.embed_tokens.weight[6].any()
    ids = tokens()
    CausalLM().loss(network, {"input_ids": ids, "labels": ids.roll(-1, 1)})[0].mean.backward()
    before = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    assert before["embed_tokens.weight"][7].any()
    callback._weights = embeddings(network)
    callback.on_before_optimizer_step(None, None, None)
    for name, parameter in network.named_parameters():
        expected = before[name]
        if name == "embed_tokens.weight":
            expected[7] = 0
        assert torch.equal(parameter.grad, expected), name


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="padding_id is 61, and the network's vocab_size 61"):
        PaddingRow(61).change_network(Llama(**DENSE))
    with pytest.raises(ConfigError, match="at least 0"):
        PaddingRow(-1)


OVERLAY = {"trainer": {"callbacks": [{"class_path": "PaddingRow", "init_args": {"padding_id": 3}}]}}


def rows(done):
    assert done.code == 0, done.error_text
    weight = done.checkpoint()["state_dict"]["network.embed_tokens.weight"]
    return weight[3], weight[2]


STRATEGIES = [
    {"class_path": "FSDP"},
    {"class_path": "HybridParallel", "init_args": {"tensor": 2}},
    {"class_path": "HybridParallel", "init_args": {"pipeline": 2}},
    pytest.param(
        {"class_path": "DeepSpeedZero", "init_args": {"stage": 3, "persistence_threshold": 0}},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.ci
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_tied_embeddings_keep_a_row_of_zeros_on_ranks_as_in_one_process(strategy):
    expected = one_process(OVERLAY)
    padding, other = rows(expected)
    assert not padding.any()
    assert other.any()
    found = fit({"trainer": {**OVERLAY["trainer"], "strategy": strategy}}, 2)
    assert not rows(found)[0].any()
    apart = differences(found, expected)
    assert max(apart.values()) < TOLERANCE, apart
