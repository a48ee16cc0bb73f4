"""A teacher is sharded with the network that learns from it, and the run is that of one process."""

import json
import shutil
from copy import deepcopy

import pytest
import torch

from conformance.workshop import workshop
from plugins.cli.configuration.config_files import merge
from plugins.commands.export import export
from plugins.networks.llama import Llama
from tests.support.chat_checkpoint import bytes_tokenizer
from tests.support.same_run import TOLERANCE, differences, fit, one_process, same_bits
from tests.support.stored_networks import lively_network, store

SIZES = {"vocab_size": 64, "n_layer": 3, "n_head": 4, "n_kv_head": 4, "n_embd": 16, "intermediate_size": 32}
ARGUMENTS = SIZES | {"max_sequence_length": 16, "tie_embeddings": False}


@pytest.fixture(scope="module")
def teacher():
    path, network = workshop() / "sharded-teacher.ckpt", lively_network(Llama, ARGUMENTS)
    with torch.no_grad():
        network.output_weight.mul_(30.0)  # of few tokens: gradients are large enough to be clipped
    return str(store(network, ARGUMENTS, path, tokenizer=bytes_tokenizer()))


@pytest.fixture(scope="module")
def folder_of_teacher(teacher):
    folder = workshop() / "sharded-teacher"
    assert export(["--ckpt_path", teacher, "--output", str(folder)]) == 0
    return str(folder)


def taught(teacher, strategy=None, held=None, **trainer):
    """Returns what is laid over the run; `held` is a folder for what each rank holds."""
    objective = {"class_path": "Distillation", "init_args": {"teacher": teacher, "label_weight": 0.5}}
    if strategy:
        trainer["strategy"] = deepcopy(strategy)
    if held:
        note = {
            "class_path": "tests.support.held_network.HeldNetwork",
            "init_args": {"folder": str(workshop() / held)},
        }
        trainer["callbacks"] = [note]
    return {"model": {"objective": objective}, "trainer": trainer}


def held_by(ranks, name):
    """Returns what each rank held."""
    return [json.loads((workshop() / name / f"held.{rank}.json").read_text()) for rank in range(ranks)]


def plan(name, **arguments):
    return {"class_path": name, "init_args": arguments}


PLANS = {
    "FSDP on 2": (2, 2, plan("FSDP")),
    "FSDP on 4": (4, 4, plan("FSDP")),
    "FSDP in 2 replicas": (4, 2, plan("FSDP", replicas=2)),
    "FSDP, offload": (2, 2, plan("FSDP", offload=True)),
    "data_shard 2, tensor 2": (4, 2, plan("HybridParallel", data_shard=2, tensor=2)),
    "ZeRO-3": (2, 2, plan("DeepSpeedZero", stage=3, persistence_threshold=0)),
}
"""Name -> ranks, over how many of them the teacher is sharded, strategy."""


OFTEN = ("FSDP on 2", "data_shard 2, tensor 2", "ZeRO-3")
"""What CI tries: one of each way in which weights are sharded."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.ci if name in OFTEN else pytest.mark.slow) for name in PLANS],
)
def test_a_rank_holds_its_share_and_the_run_is_that_of_one_process(name, teacher):
    ranks, shards, strategy = PLANS[name]
    label = f"held-{ranks}-{abs(hash(name)):x}"
    expected = one_process(taught(teacher))
    apart = differences(fit(taught(teacher, strategy, label), ranks), expected)
    assert max(apart.values()) <= TOLERANCE, apart
    for found in held_by(ranks, label):
        ends = found["whole"] - found["blocks"]
        assert found["after"] * shards == found["whole"]
        assert found["before"] == found["blocks"] // shards + ends
        assert found["dtypes"] == ["torch.float32"]


@pytest.mark.ci
def test_shards_have_the_data_type_in_which_they_are_gathered(folder_of_teacher):
    strategy = plan("FSDP")
    found = fit(taught(folder_of_teacher, strategy, "held-bf16", precision="bf16-mixed"), 2)
    expected = one_process(taught(folder_of_teacher, precision="bf16-mixed"))
    assert found.code == 0, found.error_text
    for step, figures in expected.record["figures"].items():
        assert found.record["figures"][step]["train/loss"] == pytest.approx(figures["train/loss"], rel=1e-2)
    for held in held_by(2, "held-bf16"):
        assert held["dtypes"] == ["torch.bfloat16"]
        assert held["after"] * 2 == held["whole"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "form", ["ShardedCheckpoint", pytest.param("AtomicCheckpoint", marks=pytest.mark.slow)]
)
def test_a_killed_run_goes_on_bitwise_without_a_teacher_in_its_checkpoint(form, teacher):
    whole, more = plan("FSDP"), {"plugins": [{"class_path": form}]}
    if form == "ShardedCheckpoint":  # a kill may come before a checkpoint that a thread writes is complete
        more["plugins"][0]["init_args"] = {"asynchronous": False}
    values = merge(taught(teacher, whole), {"trainer": more})
    name = f"teacher-{form}"
    expected = fit(values, 2, name=f"{name}-whole")
    assert expected.code == 0, expected.error_text
    shutil.rmtree(workshop() / name, ignore_errors=True)
    assert fit(values, 2, kill_at=3, name=name).code != 0
    found = fit(values, 2, "--ckpt_path=last", name=name)
    assert found.code == 0, found.error_text
    one, other = found.checkpoint(), expected.checkpoint()
    for key in ("state_dict", "optimizer_states", "global_step"):
        assert same_bits(one[key], other[key]), key
    for step, figures in expected.record["figures"].items():
        assert found.record["figures"][step]["train/divergence"] == figures["train/divergence"]
    assert all(name.startswith("network.") for name in one["state_dict"])
