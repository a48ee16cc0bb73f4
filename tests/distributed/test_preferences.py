"""Objectives on preferences, their references and teachers are the same on any ranks, whoever has which weights."""

import json

import pytest

from conformance.workshop import workshop
from plugins.networks.gpt import GPT
from tests.support.chat_checkpoint import bytes_tokenizer
from tests.support.same_run import TOLERANCE, differences, fit, one_process
from tests.support.stored_networks import store

REFERENCE = {"trainer": {"callbacks": [{"class_path": "ReferenceLogProbabilities"}]}}
TENSOR = {"class_path": "HybridParallel", "init_args": {"tensor": 2}}


def run_of(objective, paired=True, batch_size=4, **arguments):
    """Returns what is laid over the run: on two ranks `batch_size` is half of that."""
    folder = workshop()
    (folder / "bytes.json").write_text(bytes_tokenizer(), encoding="utf-8")
    path = folder / f"preferences-{paired}.jsonl"
    pairs = [
        {"prompt": f"{n}:", "chosen": "a" * (1 + n % 3), "rejected": "b" * (1 + n % 5)} for n in range(80)
    ]
    single = [{"prompt": f"{n}:", "completion": "a" * (1 + n % 5), "label": n % 3 > 0} for n in range(80)]
    path.write_text("".join(json.dumps(one) + "\n" for one in (pairs if paired else single)))
    data = {
        "source": str(path),
        "paired": paired,
        "template": "plain",
        "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": {"path": str(folder / "bytes.json")}},
        "sequence_length": 16,
        "batch_size": batch_size,
        "cache_dir": str(folder / "preferences"),
    }
    return {
        "model": {
            "network": {"init_args": {"vocab_size": 320}},
            "objective": {"class_path": objective, "init_args": arguments},
        },
        "data": {"class_path": "PreferenceDataModule", "init_args": data},
    }


def teacher():
    arguments = {"vocab_size": 320, "n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 16}
    path = workshop() / "teacher-of-preferences.ckpt"
    return str(
        path if path.exists() else store(GPT(**arguments), arguments, path, tokenizer=bytes_tokenizer())
    )


def compared(strategy, objective, stored=True, **arguments):
    """Returns how far the run on two ranks is from that of one process."""
    more = REFERENCE["trainer"] if stored else {}
    shared = strategy["class_path"] == "HybridParallel"  # both ranks have all rows
    apart = run_of(objective, batch_size=4 if shared else 2, **arguments)
    alone = run_of(objective, **arguments)
    found = fit(apart | {"trainer": more | {"strategy": strategy}}, 2)
    return differences(found, one_process(alone | {"trainer": more}))


FSDP, DDP = {"class_path": "FSDP"}, {"class_path": "DDP"}


@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (FSDP, DDP)), TENSOR],
    ids=["FSDP", "DDP", "tensor"],
)
def test_dpo_on_two_ranks_is_the_run_of_one_process(strategy):
    apart = compared(strategy, "DPO", kind="ipo", chunk_tokens=10)
    assert max(apart.values()) <= TOLERANCE, apart


@pytest.mark.ci
@pytest.mark.parametrize(
    "objective", ["KTO", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ORPO", "SimPO"))]
)
def test_the_others_on_two_ranks_are_the_run_of_one_process(objective):
    arguments = {
        "KTO": {"beta": 1.0, "desirable_weight": 9.0, "undesirable_weight": 9.0, "paired": False},
        "ORPO": {},
        "SimPO": {},
    }[objective]
    apart = compared(FSDP, objective, objective == "KTO", **arguments)
    # KTO's divergence is a difference of sums that are 100 times as large
    assert max(apart.values()) <= TOLERANCE * (10 if objective == "KTO" else 1), apart


@pytest.mark.slow  # what a teacher computes on ranks is CI's in test_teachers.py
@pytest.mark.parametrize("strategy", [FSDP, DDP, TENSOR], ids=["FSDP", "DDP", "tensor"])
def test_distillation_on_two_ranks_is_the_run_of_one_process(strategy):
    apart = compared(strategy, "Distillation", False, teacher=teacher(), label_weight=0.5, chunk_tokens=10)
    assert max(apart.values()) <= TOLERANCE, apart
