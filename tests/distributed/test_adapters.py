"""Adapters under every strategy: the run of one process, checkpoints without the base, a resume from them."""

import pytest

from conformance.workshop import workshop
from plugins.networks.gpt import GPT
from tests.support.same_run import CONFIG, TOLERANCE, fit, one_process, same_bits, weights_apart
from tests.support.stored_networks import lively_network, store

ARGUMENTS = CONFIG["model"]["network"]["init_args"]
ADAPTERS = {
    "LoRA": {"class_path": "LoRA", "init_args": {"rank": 2, "alpha": 8.0}},
    "DoRA": {"class_path": "LoRA", "init_args": {"rank": 2, "alpha": 8.0, "use_dora": True}},
    "IA3": {"class_path": "IA3"},
    "Freeze": {"class_path": "Freeze", "init_args": {"last_blocks": 1}},
}
PLANS = {
    "DDP": {"class_path": "DDP"},
    "FSDP": {"class_path": "FSDP"},
    "ZeRO-2": {"class_path": "DeepSpeedZero", "init_args": {"stage": 2}},
    "ZeRO-3": {"class_path": "DeepSpeedZero", "init_args": {"stage": 3, "persistence_threshold": 0}},
    "tensor": {"class_path": "HybridParallel", "init_args": {"tensor": 2, "data_shard": 1}},
    "sequence": {"class_path": "HybridParallel", "init_args": {"tensor": 2, "sequence": 2, "data_shard": 1}},
    "pipeline": {"class_path": "HybridParallel", "init_args": {"pipeline": 2, "data_shard": 1}},
}
PAIRS = [
    *(("LoRA", plan) for plan in PLANS if plan not in ("ZeRO-2", "tensor")),
    *(pytest.param("LoRA", plan, marks=pytest.mark.slow) for plan in ("ZeRO-2", "tensor")),
    ("DoRA", "tensor"), ("Freeze", "FSDP"),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("IA3", "tensor"),
                                                               ("DoRA", "FSDP"), ("Freeze", "sequence"))),
]  # fmt: skip


@pytest.fixture(scope="module")
def base():
    return base_of(seed=0)


def base_of(seed):
    network = lively_network(GPT, ARGUMENTS)
    network.embed_tokens.weight.data.add_(seed)
    return str(store(network, ARGUMENTS, workshop() / "adapters" / f"base-{seed}.ckpt"))


def overlay(adapter, base, plan=None, **trainer):
    values = {"model": {"weights": base}, "trainer": {"callbacks": [ADAPTERS[adapter]], **trainer}}
    if plan:
        values["trainer"]["strategy"] = PLANS[plan]
    return values


def figures_apart(found, expected):
    assert found.code == 0, found.error_text
    one, other = found.record["figures"], expected.record["figures"]
    assert one.keys() == other.keys()
    names = ("train/loss", "val/loss", "train/grad_norm")
    return max(abs(one[s][n] / v - 1) for s, row in other.items() for n, v in row.items() if n in names)


@pytest.mark.ci
@pytest.mark.parametrize(("adapter", "plan"), PAIRS)
def test_is_the_run_of_one_process(adapter, plan, base):
    expected, found = one_process(overlay(adapter, base)), fit(overlay(adapter, base, plan), 2)
    assert "rank 0 initialises" not in found.error_text
    assert figures_apart(found, expected) < TOLERANCE
    assert (
        weights_apart(found, expected) < TOLERANCE
    )  # also compares names: what is trained, and nothing else
    assert not any(name.endswith("embed_tokens.weight") for name in found.checkpoint()["state_dict"])


@pytest.mark.ci
def test_activation_checkpointing_changes_no_bit(base):
    expected = one_process(overlay("LoRA", base))
    values = overlay("LoRA", base)
    values["trainer"]["callbacks"] = [
        *values["trainer"]["callbacks"],
        {"class_path": "ActivationCheckpointing"},
    ]
    found = fit(values, 1)
    assert figures_apart(found, expected) == weights_apart(found, expected) == 0


@pytest.mark.ci
def test_a_run_killed_and_resumed_ends_bitwise_as_one_that_was_not(base):
    expected = one_process(overlay("LoRA", base))
    killed = fit(overlay("LoRA", base), 1, kill_at=3, name="adapter-killed")
    assert killed.code == -9
    resumed = fit(overlay("LoRA", base), 1, "--ckpt_path=last", name="adapter-killed")
    assert resumed.code == 0, resumed.error_text
    one, other = resumed.checkpoint(), expected.checkpoint()
    for key in ("state_dict", "optimizer_states", "global_step"):
        assert same_bits(one[key], other[key]), key


@pytest.mark.ci
def test_ranks_resume_from_shards_and_all_refuse_another_base(base):
    # A kill may come before a checkpoint that a thread writes is complete.
    at_once = {"class_path": "ShardedCheckpoint", "init_args": {"asynchronous": False}}
    values = overlay("LoRA", base, "FSDP", plugins=[at_once])
    expected = one_process(overlay("LoRA", base))
    assert fit(values, 2, kill_at=3, name="adapter-shards").code != 0
    words = "--ckpt_path=last", f"--model.weights={base_of(seed=1)}"
    refused = fit(values, 2, *words, name="adapter-shards")
    assert refused.code == 2
    assert "trained on another base" in refused.error_text
    resumed = fit(values, 2, "--ckpt_path=last", name="adapter-shards")
    assert resumed.code == 0, resumed.error_text
    assert weights_apart(resumed, expected) < TOLERANCE


@pytest.mark.ci
def test_a_pipeline_with_the_last_blocks_alone_is_refused_before_the_run(base):
    refused = fit(overlay("Freeze", base, "pipeline"), 2)
    assert refused.code == 2
    assert "each of its stages has to train some of its blocks" in refused.error_text


@pytest.mark.ci
def test_a_pipeline_stage_with_nothing_to_train_is_refused(base):
    values = overlay("Freeze", base, "pipeline")
    values["trainer"]["callbacks"] = [{"class_path": "Freeze", "init_args": {"train": ["layers.1.*"]}}]
    refused = fit(values, 2)
    assert refused.code == 2
    assert "all blocks of stage 0 are frozen" in refused.error_text
