"""What RankInvariance costs on two ranks: steps with it over steps of gradient accumulation without.

    python -m tests.benchmarks.rank_invariance
    python -m tests.benchmarks.rank_invariance --size 10M --rounds 3

Both sides take the same batches in the same micro-batches, on two gloo ranks with one thread each. They run in turn, one
short run each in a round; a round gives one ratio, of the medians of their steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from conformance.runs import run
from conformance.workshop import workshop, write_config

RANKS, UNITS, ROWS, LENGTH, STEPS, FIRST = 2, 8, 2, 64, 8, 2
SIZES = {
    "1M": {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 2048},
    "10M": {"n_layer": 6, "n_head": 6, "n_embd": 336, "vocab_size": 4096},
}


class StepSeconds(Callback):
    """Writes the seconds of each optimizer step.

    Args:
        path: Where rank 0 writes to.
    """

    def __init__(self, path: str) -> None:
        self.path, self.seconds, self.step, self.begin = Path(path), list[float](), 0, 0.0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Notes a step that is complete."""
        if trainer.global_step > self.step:
            now = time.perf_counter()
            self.seconds.append(now - self.begin)
            self.step, self.begin = trainer.global_step, now

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes them, without the first."""
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.seconds[FIRST:]), encoding="utf-8")


def median_step(size: str, strategy: str, exact: bool) -> float:
    """Returns the median seconds of a step in a run of its own."""
    from datamodules.preparation.writers.token_shards import TokenShards

    name = f"{size}-{strategy}-{exact}"
    network, tokens = SIZES[size], workshop() / f"tokens-{size}"
    if not tokens.exists():
        for split in ("train", "validation"):
            drawn = np.random.default_rng(0).integers(network["vocab_size"], size=40_000)
            TokenShards().write([drawn.tolist()], tokens / split, vocab_size=network["vocab_size"])
    times = workshop() / f"{name}.json"
    callbacks: list[dict[str, Any]] = [
        {"class_path": "tests.benchmarks.rank_invariance.StepSeconds", "init_args": {"path": str(times)}}
    ]
    if exact:
        callbacks.append({"class_path": "RankInvariance", "init_args": {"micro_batches": UNITS}})
    data = {"folder": str(tokens), "sequence_length": LENGTH, "batch_size": ROWS, "shuffle": False}
    config = {
        "trainer": {
            "accelerator": "cpu",
            "devices": RANKS,
            "strategy": strategy,
            "max_steps": STEPS,
            "log_every_n_steps": 100,
            "limit_val_batches": 0,
            "gradient_clip_val": 1.0,
            "accumulate_grad_batches": 1 if exact else UNITS // RANKS,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "use_distributed_sampler": False,
            "logger": False,
            "callbacks": callbacks,
            "default_root_dir": str(workshop() / name),
        },
        "model": {
            "network": {"class_path": "GPT", "init_args": network | {"max_sequence_length": LENGTH}},
            "objective": "CausalLM",
            "optimizer": {"class_path": "AdamW", "init_args": {"lr": 1e-3, "fused": False}},
        },
        "data": {
            "class_path": "tests.support.tokens.StoredTokens",
            "init_args": data | {"vocab_size": network["vocab_size"]},
        },
    }
    words = ["fit", f"--config={write_config(name, config)}"]
    run(words, workshop() / name, ranks=RANKS, timeout=600).succeeded(name)
    return statistics.median(json.loads(times.read_text(encoding="utf-8")))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ["LEYDEN_TRUST"] = "tests"
    print("| size | strategy | accumulation ms/step | RankInvariance ms/step | ratio | least, most |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in options.size or SIZES:
        for strategy in ("ddp", "fsdp"):
            pairs = [
                (median_step(size, strategy, False), median_step(size, strategy, True))
                for _ in range(options.rounds)
            ]
            ratios = sorted(exact / plain for plain, exact in pairs)
            plain, exact = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
            print(
                f"| {size} | {strategy} | {plain:.0f} | {exact:.0f} | {statistics.median(ratios):.2f} "
                f"| {ratios[0]:.2f}, {ratios[-1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
