"""Time to a fixed validation loss with and without SequenceLengthSchedule, on the quickstart's text.

    python -m tests.benchmarks.length_warmup

The quickstart's network, text, rate and tokens a step, on rows of 1,024 tokens instead of 256: there is little to gain
on short rows. For each seed both are run, one after the other, until the loss on full rows is reached, or the schedule
of the rate ends. Time is CPU time of the training process, from the first step on and without validation (other
programs on the machine count less); between two validations it is interpolated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from core import durable

HOUSE = Path(__file__).resolve().parents[2]


class Clock(Callback):
    """Notes the CPU seconds of training and the validation loss at each validation; ends the run at a loss.

    Args:
        path: Where to write them, as JSON: [optimizer step, seconds, nats per token] each.
        target: The loss, in nats per token.
    """

    def __init__(self, path: str, target: float) -> None:
        self.path, self.target = Path(path), target
        self.points: list[tuple[int, float, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins."""
        self.begin = time.process_time()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self.seconds = time.process_time() - self.begin

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the loss and goes on."""
        loss = float(trainer.callback_metrics["val/loss"])
        self.points.append((trainer.global_step, self.seconds, loss))
        durable.write(self.path, json.dumps(self.points))
        trainer.should_stop = loss <= self.target
        self.begin = time.process_time() - self.seconds


def run(name: str, schedule: dict[str, Any] | None, seed: int, options: Any, folder: Path) -> list[Any]:
    """Trains, and returns the points."""
    path = folder / f"{name}-{seed}.json"
    clock = {
        "class_path": "tests.benchmarks.length_warmup.Clock",
        "init_args": {"path": str(path), "target": options.target},
    }
    own = [{"class_path": "SequenceLengthSchedule", "init_args": schedule}] if schedule else []
    config = {
        "base": "quickstart",
        "seed_everything": seed,
        "trainer": {
            "max_steps": options.steps,
            "val_check_interval": options.every,
            "limit_val_batches": 6,
            "enable_progress_bar": False,
            "callbacks": [*own, clock],
            "logger": False,
        },
        "model": {
            "network": {"init_args": {"max_sequence_length": options.length}},
            "lr_scheduler": {"init_args": {"warmup_steps": 0.1}},
        },
        "data": {
            "init_args": {
                "sequence_length": options.length,
                "batch_size": 2048 // options.length,
                "seed": seed,
            }
        },
    }
    written = folder / f"{name}-{seed}.yaml"
    written.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "core", "fit", f"--config={written}"]
    command += [f"--trainer.default_root_dir={folder / name}", f"--data.cache_dir={folder / 'data'}"]
    done = subprocess.run(
        command, cwd=HOUSE, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return list(json.loads(path.read_text(encoding="utf-8")))


def reached(points: list[Any], target: float) -> tuple[float, float]:
    """Returns the step and the seconds at which a loss was reached, interpolated; NaN if it was not."""
    before = (0, 0.0, math.inf)
    for point in points:
        if point[2] <= target:
            share = 1.0 if math.isinf(before[2]) else (before[2] - target) / (before[2] - point[2])
            return before[0] + share * (point[0] - before[0]), before[1] + share * (point[1] - before[1])
        before = point
    return math.nan, math.nan


def main() -> None:
    """Prints one line per seed and the mean of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="%(default)s")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a full row: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="length of the rate's schedule: %(default)s")
    parser.add_argument("--every", type=int, default=10, help="steps between validations: %(default)s")
    parser.add_argument("--target", type=float, default=5.6, help="validation loss: %(default)s")
    parser.add_argument("--start", type=int, default=8, help="first length: %(default)s")
    parser.add_argument("--duration", type=float, default=0.3, help="share of the steps: %(default)s")
    options = parser.parse_args()
    schedule = {"start": options.start, "duration": options.duration}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {vars(options)}")
    print(
        "| seed | without: steps | CPU s | last loss | with: steps | CPU s | last loss | time with / without |"
    )
    print("| --- " * 8 + "|", flush=True)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            kinds = [("without", None), ("with", schedule)][:: -1 if seed % 2 else 1]
            points = {name: run(name, own, seed, options, Path(folder)) for name, own in kinds}
            cells = [f"{seed}"]
            for name in ("without", "with"):
                step, seconds = reached(points[name], options.target)
                cells += [f"{step:.0f}", f"{seconds:.1f}", f"{points[name][-1][2]:.3f}"]
            ratios.append(
                reached(points["with"], options.target)[1] / reached(points["without"], options.target)[1]
            )
            print(f"| {' | '.join(cells)} | {ratios[-1]:.3f} |", flush=True)
    print(f"mean ratio {statistics.mean(ratios):.3f}")


if __name__ == "__main__":
    main()
