"""A run starts from weights alone under every strategy as in one process."""

import pytest

from conformance.workshop import workshop
from plugins.networks.gpt import GPT
from tests.support.same_run import CONFIG, TOLERANCE, differences, fit, one_process
from tests.support.stored_networks import lively_network, store

ARGUMENTS = CONFIG["model"]["network"]["init_args"]
PLANS = {
    "DDP": (2, {"class_path": "DDP"}),
    "FSDP": (2, {"class_path": "FSDP"}),
    "ZeRO-3": (2, {"class_path": "DeepSpeedZero", "init_args": {"stage": 3}}),
    "tensor": (2, {"class_path": "HybridParallel", "init_args": {"tensor": 2, "data_shard": 1}}),
    "pipeline": (2, {"class_path": "HybridParallel", "init_args": {"pipeline": 2, "data_shard": 1}}),
}


@pytest.fixture(scope="module")
def weights():
    network = lively_network(GPT, ARGUMENTS | {"vocab_size": 60})  # the run's has 4 rows more
    return str(store(network, ARGUMENTS, workshop() / "initial" / "weights.ckpt", sharded=True))


def overlay(weights):
    return {"model": {"weights": weights}, "trainer": {"gradient_clip_val": 0.25}}


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=[pytest.mark.slow] * (plan == "DDP")) for plan in PLANS]
)
def test_ranks_begin_with_the_weights_as_one_process_does(plan, weights):
    ranks, strategy = PLANS[plan]
    values = overlay(weights)
    expected = one_process(values)
    values["trainer"]["strategy"] = strategy
    found = fit(values, ranks)
    assert max(differences(found, expected).values()) < 10 * TOLERANCE
    first = expected.record["figures"]["1"]["train/loss"]
    assert first > 4.5  # lively weights, where a new network has ln(64) = 4.16


@pytest.mark.ci
def test_all_ranks_refuse_weights_of_another_network(weights):
    values = overlay(weights) | {"trainer": {"strategy": {"class_path": "FSDP"}}}
    values["model"]["network"] = {"init_args": {"n_embd": 32}}
    done = fit(values, 2)
    assert done.code == 2
    assert "embed_tokens.weight is (60, 16) there and (64, 32) in the network" in done.error_text
