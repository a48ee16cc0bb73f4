"""Evaluations during a run: each strategy finds what one process finds, and trains as it does without them."""

import csv
import json

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
}
"""Strategy, and the rows of a rank's batch."""


def evaluations():
    found = {
        "pairs": {"class_path": "PairedBias"},
        "refusals": {"class_path": "Refusals", "init_args": {"max_new_tokens": 6}},
    }
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        return found
    folder = str(write_tasks(workshop() / "harness" / "tasks"))
    return found | {"harness": {"class_path": "LMEvalHarness", "init_args": {"folder": folder, "limit": 3}}}


def trained(name, strategy=None, rows=4, evaluated=True):
    """Returns the losses by step, the figures of the evaluations, and the rows of each set, of a run of four steps."""
    callbacks = [{"class_path": "Evaluate", "init_args": {"evaluations": evaluations(), "every_n_steps": 2}}]
    folder = workshop() / f"evaluations-{name}"
    overlay = {
        "trainer": {
            "max_steps": 4,
            "log_every_n_steps": 1,
            "devices": 2 if strategy else 1,
            "callbacks": callbacks if evaluated else [],
            "logger": [{"class_path": "MetricsCSV", "init_args": {"save_dir": "${run_folder}"}}],
            "default_root_dir": str(folder),
        },
        "model": {"network": {"init_args": {"n_layer": 2, "max_sequence_length": 64}}},
        "data": {"init_args": {"source": str(text()), "cache_dir": str(workshop() / "evaluations-data"), "batch_size": rows}},
    }  # fmt: skip
    if strategy:
        overlay["trainer"]["strategy"] = strategy
    config = folder / "config-given.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(tiny([overlay])))
    done = run(["fit", "--config", str(config)], folder, ranks=2 if strategy else 1)
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


@pytest.fixture(scope="module")
def alone():
    return trained("alone")


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=pytest.mark.slow if "DP" in plan else pytest.mark.ci) for plan in PLANS],
)
def test_ranks_find_what_one_process_finds(plan, alone):
    losses, figures, sets = trained(plan, *PLANS[plan])
    assert losses == pytest.approx(alone[0], rel=1e-5)
    assert figures.keys() == alone[1].keys()
    # weights differ by rounding, which a sum of a hundred nats and an exponential make larger
    assert figures == pytest.approx(alone[1], rel=1e-4, abs=1e-6)
    assert [row["answer"] for row in sets["refusals"]] == [row["answer"] for row in alone[2]["refusals"]]
    assert trained(f"{plan}-unwatched", *PLANS[plan], evaluated=False)[0] == losses  # to the last bit
