"""Expert parallelism on gloo ranks: the same losses, gradient norms, weights and checkpoints as one process."""

from copy import deepcopy

import pytest
import torch

from conformance.runs import on_ranks, run
from conformance.workshop import workshop, write_config
from plugins.cli.configuration.config_files import merge
from tests.support import exchanging
from tests.support.same_run import (
    CONFIG,
    SAVED,
    STEPS,
    TOLERANCE,
    differences,
    fit,
    one_process,
    same_bits,
    weights_apart,
)

NETWORK = {
    "class_path": "Mixtral",
    "init_args": {
        "vocab_size": 64, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "intermediate_size": 24, "n_experts": 4,
        "experts_per_token": 2, "max_sequence_length": 16, "tie_embeddings": True, "init_std": {"*.router": 0.5},
    },
}  # fmt: skip
DOTS = {
    "class_path": "Dots1",
    "init_args": {
        "vocab_size": 64, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "intermediate_size": 24, "n_experts": 8,
        "experts_per_token": 2, "expert_size": 12, "dense_layers": 1, "max_sequence_length": 16,
        "init_std": {"*.router": 0.5},
    },
}  # fmt: skip
LATENT = {
    "class_path": "DeepSeekV3",
    "init_args": {key: value for key, value in DOTS["init_args"].items() if key != "n_kv_head"}
    | {
        "q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6, "groups": 2,
        "groups_per_token": 1,
    },
}  # fmt: skip
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
    if strategy == "auto":  # what is not written is taken from the checkpoint
        values["trainer"]["strategy"] = strategy
    elif strategy is not None:
        values["trainer"]["strategy"] = {"class_path": "HybridParallel", "init_args": strategy}
    return values


def assert_same(found, expected):
    apart = differences(found, expected)
    assert max(apart.values()) < TOLERANCE, apart


LAYOUTS = [  # slow: parts of larger layouts
    pytest.param(2, {"expert": 2}, marks=pytest.mark.slow),
    pytest.param(2, {"tensor": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"tensor": 2, "data_shard": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"expert": 4}, marks=pytest.mark.slow),
    pytest.param(4, {"expert": 2, "data_shard": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"expert": 2, "data_replicate": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"expert": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"expert": 2, "tensor": 2, "sequence": 2}, marks=pytest.mark.ci),
]


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS, ids=str)
def test_experts_on_several_ranks_train_as_in_one_process(ranks, sizes):
    assert_same(fit(mixture(sizes), ranks), one_process(mixture()))


@pytest.mark.parametrize(
    "sequence", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.ci)]
)
def test_latent_attention_is_spread_over_its_heads(sequence):
    sizes = {"expert": 2, "tensor": 2, "sequence": sequence}
    assert_same(fit(mixture(sizes, LATENT), 4), one_process(mixture(network=LATENT)))


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("1F1B", marks=pytest.mark.slow),
        pytest.param("InterleavedZeroBubble", marks=pytest.mark.ci),
    ],
)
def test_experts_are_spread_over_stages_as_well(schedule):
    plain = {"class_path": "CausalLM"}
    network = {"class_path": "Mixtral", "init_args": NETWORK["init_args"] | {"n_layer": 4}}
    sizes = {"expert": 2, "pipeline": 2, "schedule": schedule}
    found = fit(mixture(sizes, objective=plain, network=network), 4)
    assert_same(found, one_process(mixture(objective=plain, network=network)))


@pytest.mark.ci
def test_shared_experts_and_biases_are_the_same_on_several_ranks():
    balancing = [{"class_path": "BiasBalancing", "init_args": {"rate": 0.01}}]
    expected = one_process(mixture(network=DOTS, callbacks=balancing))
    found = fit(mixture({"expert": 2}, network=DOTS, callbacks=balancing), 2)
    assert_same(found, expected)
    name = "network.layers.1.mlp.router.e_score_correction_bias"
    biases = [one.checkpoint()["state_dict"][name] for one in (found, expected)]
    assert torch.equal(*biases)
    assert biases[0].abs().max() > 0


@pytest.mark.ci
def test_tokens_reach_their_experts_and_come_back_however_few_there_are(tmp_path):
    on_ranks(exchanging.of_rank, 2, tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, counts in exchanging.COUNTS.items():
        experts, inputs = exchanging.whole(), [exchanging.given(counts, rank) for rank in (0, 1)]
        outputs = [experts(x, torch.tensor(own)) for x, own in zip(inputs, counts, strict=True)]
        sum(y.square().sum() for y in outputs).backward()
        for rank in (0, 1):
            y, x, *weights = found[rank][name]
            torch.testing.assert_close(y, outputs[rank].detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(x, inputs[rank].grad, rtol=1e-12, atol=1e-12)
            for own, weight in zip(weights, experts.parameters(), strict=True):
                # halved: averaged over two ranks, as gradients of other weights are
                half = weight.grad[2 * rank : 2 * rank + 2] / 2
                torch.testing.assert_close(own, half, rtol=1e-12, atol=1e-12)


@pytest.mark.slow  # six steps of larger layouts are CI's, above
@pytest.mark.parametrize(("ranks", "sizes"), [(2, {"expert": 2}), (4, {"expert": 4})], ids=str)
def test_the_loss_of_a_longer_run_is_that_of_one_process(ranks, sizes):
    longer = {"max_steps": 12, "val_check_interval": 6}
    expected, found = one_process(mixture(**longer)), fit(mixture(sizes, **longer), ranks)
    assert found.code == 0, found.error_text
    figures = found.record["figures"]
    assert len(figures) == 12
    for step, one in expected.record["figures"].items():
        for key in ("train/loss", "train/grad_norm"):
            assert figures[step][key] == pytest.approx(one[key], rel=TOLERANCE)


ADAM = {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.01}}}


def resumed(source, overlay, ranks, name):
    """Returns the run that goes on from the checkpoint of another one in the middle."""
    path = source.folder / "checkpoints" / f"step-{SAVED}.ckpt"
    done = fit(overlay, ranks, f"--ckpt_path={path}", name=name)
    assert done.code == 0, done.error_text
    return done


@pytest.mark.ci
def test_one_process_goes_on_from_spread_experts_and_the_other_way_round():
    alone, spread = mixture(strategy="auto"), mixture({"expert": 2})
    expected, whole = one_process(mixture()), fit(spread, 2)
    assert weights_apart(resumed(whole, alone, 1, "experts-to-one"), expected) < TOLERANCE
    assert weights_apart(resumed(expected, spread, 2, "one-to-experts"), expected) < TOLERANCE


@pytest.mark.parametrize(
    "plugin",
    [
        pytest.param("AtomicCheckpoint", marks=pytest.mark.slow),  # gathered as by test_whole_states.py
        pytest.param("ShardedCheckpoint", marks=pytest.mark.ci),
    ],
)
def test_resumed_it_is_bitwise_the_same(plugin):
    overlay = mixture({"expert": 2, "data_shard": 2}, plugins=[{"class_path": plugin}])
    overlay["model"] |= ADAM
    whole = fit(overlay, 4)
    assert whole.code == 0, whole.error_text
    again = resumed(whole, overlay, 4, f"experts-again-{plugin}")
    one, other = again.checkpoint(), whole.checkpoint()
    for part in ("state_dict", "optimizer_states"):
        assert same_bits(one[part], other[part])
    if plugin == "ShardedCheckpoint":  # in another layout, too
        overlay["trainer"]["strategy"]["init_args"] = {"expert": 2, "data_shard": 1}
        fewer = resumed(whole, overlay, 2, "experts-on-fewer")
        figures = [one.record["figures"][str(STEPS)]["train/loss"] for one in (fewer, whole)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-4)  # Adam makes 1e-7 larger


REFUSED = [
    ({"network": {**NETWORK, "init_args": NETWORK["init_args"] | {"n_experts": 3}}}, {}, "which does not divide the 3 experts of Mixtral"),
    ({}, {"context": 2}, "expert is 2 and context 2: set one of them to 1"),
    ({}, {"pipeline": 2}, "BalancedRouting sees the routers of the last stage only"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "sizes", "told"), REFUSED, ids=lambda value: str(value)[-40:])
def test_what_does_not_fit_is_refused_before_a_process_starts(more, sizes, told):
    ranks = 2 * len(sizes.keys() & {"context", "pipeline"}) * 2 or 2
    values = merge(deepcopy(CONFIG), deepcopy(mixture({"expert": 2, **sizes}, **more)))
    merge(values, {"trainer": {"devices": ranks}})
    done = run(["check", f"--config={write_config('refused', values)}"], workshop())
    assert done.code == 2
    assert told in done.error_text, done.error_text
