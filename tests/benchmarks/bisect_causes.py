"""50 planted causes by which a run differs from another: does `bisect` name step, place and cause?

    python -m tests.benchmarks.bisect_causes [FIRST LAST]

One run of 40 steps is made without a cause, and one for each: a weight that is changed by one bit (at the start, in mid-run
before or after a step, with the same change in the replay or without it), one token, one setting among several that are
written differently without effect, and a layer that sums in another order. Runs and replays are those of the command line.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from conformance import runs
from plugins.commands.bisect import Verdict, find
from plugins.commands.bisect_runs import read_run
from tests.conftest import TINY
from tests.support.planted import VARIABLE

STEPS = 40
PARTS = ("attention.q_proj", "attention.v_proj", "attention.o_proj", "mlp.up_proj", "mlp.down_proj")
LAYERS = [f"network.layers.{layer}.{part}" for layer in range(2) for part in PARTS]
NAMES = ["network.embed_tokens.weight", *(f"{layer}.weight" for layer in LAYERS)]


@dataclass
class Cause:
    """A planted cause.

    Attributes:
        kind: What `bisect` is to call it.
        step: In which step it acts first.
        plant: What is planted.
        settings: What is another setting: path -> value.
        again: Whether it acts in a replay too.
    """

    kind: str
    step: int
    plant: dict[str, Any]
    settings: dict[tuple[str | int, ...], Any]
    again: bool = True


def config() -> dict[str, Any]:
    """Returns the run without a cause."""
    values = deepcopy(TINY)
    values["trainer"] |= {"max_steps": STEPS, "log_every_n_steps": 5}
    values["trainer"]["callbacks"] = [
        {"class_path": "tests.support.planted.Planted"},
        {"class_path": "HashChain"},
        {"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": 10, "keep": -1}},
        {"class_path": "GradientClip"},
    ]
    values["model"]["network"]["init_args"] |= {"n_layer": 2, "dropout": 0.1}
    return values


SETTINGS: dict[tuple[str | int, ...], Any] = {
    ("model", "optimizer", "init_args", "lr"): 0.0101,
    ("model", "optimizer", "init_args", "weight_decay"): 0.011,
    ("model", "optimizer", "init_args", "betas"): [0.9, 0.951],
    ("model", "optimizer", "init_args", "eps"): 1.1e-8,
    ("model", "lr_scheduler", "init_args", "warmup_steps"): 3,
    ("model", "lr_scheduler", "init_args", "min_lr_ratio"): 0.11,
    ("model", "network", "init_args", "dropout"): 0.11,
    ("model", "decay_embeddings"): False,
    ("seed_everything",): 1,
    ("trainer", "accumulate_grad_batches"): 2,
    ("model", "network", "init_args", "n_head"): 4,
    ("data", "init_args"): {"seed": 1},
}
HARMLESS = {
    ("trainer", "deterministic"): True,
    ("trainer", "num_sanity_val_steps"): 1,
    ("trainer", "limit_test_batches"): 3,
}


def causes() -> Iterator[Cause]:
    """Yields the 50 causes, always the same ones."""
    draw = np.random.default_rng(0)
    for number in range(16):
        step = 0 if number < 5 else int(draw.integers(2, STEPS))
        plant = {
            "kind": "weight",
            "step": step,
            "name": NAMES[int(draw.integers(len(NAMES)))],
            "late": number >= 11,
        }
        plant |= {"index": int(draw.integers(1 << 20)), "bit": int(draw.integers(8, 22))}
        again = number not in (9, 10, 14, 15)
        yield Cause("weight" if again else "not reproducible", max(step, 1), plant, {}, again)
    for _ in range(12):
        step = int(draw.integers(1, STEPS))
        key = ("input_ids", "labels")[int(draw.integers(2))]
        place = {"row": int(draw.integers(4)), "position": int(draw.integers(16))}
        yield Cause("token", step, {"kind": "token", "step": step, "key": key} | place, {})
    for path, value in SETTINGS.items():
        first = 3 if path[-1] == "min_lr_ratio" else 1  # the rate has its peak in the second step
        yield Cause("setting", first, {}, {path: value, **HARMLESS})
    for _ in range(10):
        step = int(draw.integers(1, STEPS))
        module = LAYERS[int(draw.integers(len(LAYERS)))]
        yield Cause("reduction order", step, {"kind": "order", "step": step, "module": module}, {})


def run(values: Mapping[str, Any], folder: Path, plant: Mapping[str, Any]) -> None:
    """Runs `fit`."""
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    words = ["fit", "--config", str(path), f"--trainer.default_root_dir={folder}"]
    runs.run(words, folder, environments=[_environment(plant)]).succeeded(f"fit {folder.name}")


def _environment(plant: Mapping[str, Any]) -> dict[str, str]:
    return {VARIABLE: json.dumps(dict(plant))}


def changed(settings: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Returns the configuration with other settings."""
    values = config()
    for path, value in settings.items():
        target = values
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = value
    return values


def judge(cause: Cause, folder: Path, clean: Path) -> Verdict:
    """Trains with a cause, and lets `bisect` find it."""

    def launch(side: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        plant = cause.plant if side == "b" and cause.again else {}
        runs.run(["fit", *words], folder, environments=[_environment(plant) | dict(environment)]).succeeded(
            "a replay"
        )

    folder.mkdir(parents=True)
    run(changed(cause.settings), folder / "b", cause.plant)
    scratch = folder / "scratch"
    scratch.mkdir()
    return find(read_run(str(clean)), read_run(str(folder / "b")), scratch, launch)


def right(cause: Cause, verdict: Verdict) -> bool:
    """Returns whether cause, step and place are those that were planted."""
    place = (
        cause.plant.get("name")
        or cause.plant.get("key")
        or cause.plant.get("module", "").removeprefix("network.")
    )
    where = any(place in name for name in (*verdict.names, verdict.text, *verdict.evidence))
    if cause.kind == "setting":
        path = next(iter(cause.settings))
        where = (
            str(path[0 if len(path) == 1 else 1 if path[0] == "trainer" else -1]) in verdict.text
            or path[0] == "data"
        )
    if cause.kind == "not reproducible":  # the record has modules
        where = any(cause.plant["name"].startswith(name) for name in verdict.names) or verdict.stage == "loss"
    return verdict.cause == cause.kind and verdict.step == cause.step and where


def main(first: int = 0, last: int = 50) -> None:
    """Prints a line for each cause."""
    os.environ.setdefault("LEYDEN_TRUST", "tests,conformance")
    found, most = 0, 0
    with tempfile.TemporaryDirectory() as name:
        clean = Path(name, "a")
        run(config(), clean, {})
        chosen = list(causes())[first:last]
        for number, cause in enumerate(chosen, first):
            verdict = judge(cause, Path(name, str(number)), clean)
            good = right(cause, verdict)
            found, most = found + good, max(most, verdict.replays)
            print(
                f"{'right' if good else 'WRONG'} {number:2} {cause.kind}, step {cause.step}: {verdict.text} [{verdict.replays}]"
            )
            if not good:
                print("      ", cause, *verdict.evidence, sep="\n       ")
    print(
        f"{found} of {len(chosen)} causes; at most {most} replays (log2 of {STEPS} steps: {math.log2(STEPS):.1f})"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
