"""What `fit` costs over a hand-written loop, in one process, block by block in turn.

    python -m tests.benchmarks.loop_overhead

Both sides train the same network with the same optimizer, schedule, clipping and batches. A callback at
the end of `fit`'s list runs a block of hand-written steps after each block of `fit` steps, so that both
see the same machine at the same time. `fit` has the default callbacks and loggers of configs/defaults.yaml
and logs every 10th step; the hand-written loop reads its loss as often.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

BLOCK = 10
SIZES: dict[str, dict[str, Any]] = {
    "0.3M": {
        "vocab_size": 512,
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 96,
        "batch": 2,
        "length": 32,
        "blocks": 60,
    },
    "10M": {
        "vocab_size": 4096,
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 336,
        "batch": 4,
        "length": 128,
        "blocks": 8,
    },
}


class Alternate(Callback):
    """Runs a block of hand-written steps after each block of `fit` steps and times both."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.fit_seconds, self.hand_seconds = batches, [], []
        self.step = 0
        self.stream = self._forever()

    def _forever(self) -> Any:
        while True:  # the loader of a hand-written loop, as of `fit`
            yield from torch.utils.data.DataLoader(self.batches, batch_size=None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the second copy of everything."""
        import copy

        self.network = copy.deepcopy(pl_module.network)
        self.objective = copy.deepcopy(pl_module.objective)
        self.optimizer = pl_module.build_optimizer([{"params": list(self.network.parameters())}])
        self.scheduler = pl_module.build_lr_scheduler(self.optimizer)
        self.scheduler.bind(trainer.max_steps)
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Ends a block of `fit` steps after every BLOCK of them, and takes the other side's turn."""
        self.step += 1
        if self.step % BLOCK:
            return
        now = time.perf_counter()
        self.fit_seconds.append((now - self.begin) / BLOCK)
        self._hand_written_block()
        self.begin = time.perf_counter()

    def _hand_written_block(self) -> None:
        start = time.perf_counter()
        for _ in range(BLOCK):
            batch = next(self.stream)
            loss, _ = self.objective.loss(self.network, batch)
            mean = loss.mean
            self.optimizer.zero_grad()
            mean.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
        mean.item()
        self.hand_seconds.append((time.perf_counter() - start) / BLOCK)


def batches_of(size: dict[str, Any]) -> list[Any]:
    """Returns random batches; `fit` and the hand-written loop read the same ones."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, size["vocab_size"], (64, size["batch"], size["length"] + 1), generator=generator)
    return [{"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in rows]


def measure(size: dict[str, Any], folder: Path) -> tuple[int, list[float], list[float]]:
    """Returns the number of parameters and the seconds per step of each block, `fit`'s and by hand."""
    from lightning.pytorch.loggers import TensorBoardLogger

    from callbacks.loss_curve import LossCurve
    from callbacks.periodic_checkpoint import PeriodicCheckpoint
    from callbacks.progress_bar import ProgressBar
    from callbacks.run_summary import RunSummary
    from callbacks.throughput import Throughput
    from core.language_module import LanguageModule
    from plugins.cli.runs.no_profiler import NoProfiler
    from plugins.loggers.metrics_csv import MetricsCSV
    from plugins.networks.gpt import GPT
    from plugins.objectives.causal_lm import CausalLM
    from plugins.optimizers.adamw import AdamW
    from plugins.schedules.warmup_cosine import WarmupCosine

    network = {key: size[key] for key in ("vocab_size", "n_layer", "n_head", "n_embd")}
    module = LanguageModule(
        lambda: GPT(max_sequence_length=size["length"], **network),
        CausalLM(),
        lambda groups: AdamW(groups),
        lambda optimizer: WarmupCosine(optimizer, warmup_steps=10),
    )
    batches = batches_of(size)
    steps = size["blocks"] * BLOCK
    alternate = Alternate(batches)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, gradient_clip_val=1.0, log_every_n_steps=BLOCK,
        enable_model_summary=False, num_sanity_val_steps=0, use_distributed_sampler=False, default_root_dir=folder,
        profiler=NoProfiler(), logger=[TensorBoardLogger(folder, name="", version=""), MetricsCSV(str(folder))],
        callbacks=[
            ProgressBar(), Throughput(), LossCurve(), RunSummary(),
            PeriodicCheckpoint(every_n_steps=10 * steps, dirpath=str(folder / "checkpoints")), alternate,
        ],
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, loader)
    parameters = sum(p.numel() for p in module.network.parameters())
    return parameters, alternate.fit_seconds, alternate.hand_seconds


def main() -> None:
    """Prints one line per size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3, help="runs of each size, small and large in turn")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, blocks of {BLOCK} steps in turn")
    print(
        "parameters  fit ms/step  by hand ms/step  ratio  added ms/step   (medians over blocks, first 2 left out)"
    )
    for _ in range(options.rounds):
        for size in SIZES.values():
            with tempfile.TemporaryDirectory() as folder:
                parameters, fit, hand = measure(size, Path(folder))
            fit, hand = fit[2:], hand[2:]
            ratio = statistics.median(f / h for f, h in zip(fit, hand, strict=True))
            added = statistics.median(f - h for f, h in zip(fit, hand, strict=True))
            print(
                f"{parameters:>10,}  {statistics.median(fit) * 1e3:>11.3f}  {statistics.median(hand) * 1e3:>15.3f}"
                f"  {ratio:>5.3f}  {added * 1e3:>13.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
