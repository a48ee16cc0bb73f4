"""Evaluations during a run: each strategy finds what one process finds, and trains as it does without them."""

import csv
import json
from functools import cache

import pytest
import yaml

from conformance.case import tiny
from conformance.runs import run
from conformance.workshop import text, workshop
from tests.support.harness_tasks import write_tasks

PLANS = {
    "DDP": ({"class_path": "DDP"}, 2),
    "FSDP": ({"class_path": "FSDP"}, 2),
    "tensor": ({"class_path": "HybridParallel", "init_args": {"tensor": 2, "data_shard": 1}}, 4),
    "pipeline": ({"class_path": "HybridParallel", "init_args": {"pipeline": 2, "data_shard": 1}}, 4),
    "sequence": (
        {"class_path": "HybridParallel", "init_args": {"tensor": 2, "sequence": 2, "data_shard": 1}},
        4,
    ),
    "ring": ({"class_path": "HybridParallel", "init_args": {"context": 2, "data_shard": 1}}, 4),
    "ulysses": (
        {
            "class_path": "HybridParallel",
            "init_args": {"context": 2, "data_shard": 1, "context_method": "ulysses"},
        },
        4,
    ),
    "experts": ({"class_path": "HybridParallel", "init_args": {"expert": 2, "data_shard": 1}}, 2),
    "ZeRO-3": ({"class_path": "DeepSpeedZero", "init_args": {"stage": 3, "persistence_threshold": 0}}, 2),
    "experts beside data": (
        {"class_path": "HybridParallel", "init_args": {"expert": 2, "data_shard": 2}},
        1,
        4,
    ),
    "tokens in stages": ({"class_path": "HybridParallel", "init_args": {"context": 2, "pipeline": 2}}, 4, 4),
    "sequence and tokens": (
        {"class_path": "HybridParallel", "init_args": {"tensor": 2, "sequence": 2, "context": 2}},
        4,
        4,
    ),
}
"""Strategy, the rows of a rank's batch, and the number of ranks where it is not 2."""

OFTEN = ("pipeline", "experts")
"""What CI tries; with the ranks of test_evaluate_command.py one of each way in which they share the work, but rows alone."""

MIXTURE = {
    "class_path": "Mixtral",
    "init_args": {
        "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "intermediate_size": 24, "n_experts": 4,
        "experts_per_token": 2, "max_sequence_length": 64, "init_std": {"*.router": 0.5},
    },
}  # fmt: skip


def evaluations():
    found = {
        "pairs": {"class_path": "PairedBias"},
        "refusals": {"class_path": "Refusals", "init_args": {"max_new_tokens": 6}},
        "text": {
            "class_path": "Perplexity",
            "init_args": {"documents": {"class_path": "TextDocuments", "init_args": {"source": texts()}}},
        },
    }
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        return found
    folder = str(write_tasks(workshop() / "harness" / "tasks"))
    return found | {"harness": {"class_path": "LMEvalHarness", "init_args": {"folder": folder, "limit": 3}}}


def texts():
    """Returns a folder of five texts of different lengths: an odd number, for which ranks have different ones."""
    folder = workshop() / "evaluated-texts"
    folder.mkdir(exist_ok=True)
    words = text().read_text(encoding="utf-8").split()
    for number, length in enumerate((3, 40, 11, 90, 1)):
        (folder / f"{number}.txt").write_text(" ".join(words[:length]), encoding="utf-8")
    return str(folder)


def trained(name, strategy=None, rows=4, ranks=2, evaluated=True, network=None):
    """Returns the losses by step, the figures of the evaluations, and the rows of each set, of a run of four steps."""
    callbacks = [{"class_path": "Evaluate", "init_args": {"evaluations": evaluations(), "every_n_steps": 2}}]
    folder = workshop() / f"evaluations-{name}"
    overlay = {
        "trainer": {
            "max_steps": 4,
            "log_every_n_steps": 1,
            "devices": ranks if strategy else 1,
            "callbacks": callbacks if evaluated else [],
            "logger": [{"class_path": "MetricsCSV", "init_args": {"save_dir": "${run_folder}"}}],
            "default_root_dir": str(folder),
        },
        "model": {"network": network or {"init_args": {"n_layer": 2, "max_sequence_length": 64}}},
        "data": {"init_args": {"source": str(text()), "cache_dir": str(workshop() / "evaluations-data"), "batch_size": rows}},
    }  # fmt: skip
    if strategy:
        overlay["trainer"]["strategy"] = strategy
    config = folder / "config-given.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(tiny([overlay])))
    done = run(["fit", "--config", str(config)], folder, ranks=ranks if strategy else 1)
    assert done.code == 0, done.error_text
    with open(next(folder.rglob("metrics.csv")), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train/loss"]) for row in rows if row.get("train/loss")]
    figures = {
        f"{row['step']} {key}": float(value)
        for row in rows
        for key, value in row.items()
        if key.startswith("eval/") and value
    }
    sets = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.rglob("step-00000004/*.jsonl")
    }
    return losses, figures, sets


@cache
def alone(mixture):
    return trained(f"alone-{mixture}", network=MIXTURE if mixture else None)


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=pytest.mark.ci if plan in OFTEN else pytest.mark.slow) for plan in PLANS],
)
def test_ranks_find_what_one_process_finds(plan):
    network = MIXTURE if "experts" in plan else None
    expected = alone(network is not None)
    losses, figures, sets = trained(plan, *PLANS[plan], network=network)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert figures.keys() == expected[1].keys()
    # weights differ by rounding, which a sum of a hundred nats and an exponential make larger
    assert figures == pytest.approx(expected[1], rel=1e-4, abs=1e-6)
    assert [row["answer"] for row in sets["refusals"]] == [row["answer"] for row in expected[2]["refusals"]]
    assert (
        trained(f"{plan}-unwatched", *PLANS[plan], evaluated=False, network=network)[0] == losses
    )  # to the last bit
