"""What the callbacks for stability add to a step, at their default settings.

    python -m tests.benchmarks.stability_callbacks

One run of `fit`, in blocks of a few steps with and without the callback in turn; CPU time of the process, so that
other programs on the machine count less. The ratio is the median over neighbouring blocks; figures are logged at the end of each. What a
snapshot of SpikeRollback takes stands below, as a share of the steps between two. The run clips by norm
without the callback too (`gradient_clip_val`), but where GradientClip takes its place.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer

from tests.benchmarks.loop_overhead import SIZES, batches_of


class Batches(LightningDataModule):
    """Random batches, which can be skipped.

    Args:
        batches: The batches.
    """

    def __init__(self, batches: Any) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        """Returns the batches."""
        return torch.utils.data.DataLoader(self.batches, batch_size=None)

    def skip_batches(self, batches: int) -> None:
        """Says that there was a spike, which there should not be."""
        raise RuntimeError("a spike in a benchmark")


SWITCHES = {
    "OOMGuard": ("on_train_start", "on_train_end"),
    "StochasticDepth": ("on_fit_start", "on_fit_end"),
}
"""Hooks that switch a callback on and off; others do their work in the hooks of a step."""


class Alternate(Callback):
    """Passes hooks on to a callback in every second block of steps, and times the blocks.

    Args:
        inner: The callback.
        block: Steps in a block.
    """

    def __init__(self, inner: Callback, block: int) -> None:
        self.inner, self.block = inner, block
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.on, self.snapshot_s = True, 0.0

    def on_fit_start(self, *args: Any) -> None:
        """Passes it on."""
        self.inner.on_fit_start(*args)

    def on_train_start(self, *args: Any) -> None:
        """Passes it on and begins."""
        self.inner.on_train_start(*args)
        self.begin = time.process_time()

    def on_train_batch_start(self, *args: Any) -> None:
        """Passes it on, if it is its turn."""
        if self.on:
            self.inner.on_train_batch_start(*args)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        """Passes it on, if it is its turn; else clips, where the callback would have."""
        if self.on:
            self.inner.on_before_optimizer_step(trainer, pl_module, optimizer)
        elif type(self.inner).__name__ == "GradientClip":
            torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Passes it on, if it is its turn, and ends the block."""
        if self.on:
            self.inner.on_train_batch_end(trainer, *args)
        if trainer.global_step % self.block == 0:
            now = time.process_time()
            self.seconds[self.on].append((now - self.begin) / self.block)
            self.on = not self.on
            if switch := SWITCHES.get(type(self.inner).__name__):
                getattr(self.inner, switch[not self.on])(trainer, args[0])
            self.begin = time.process_time()


def measure(inner: Callback, size: dict[str, Any], blocks: int, block: int) -> tuple[float, float]:
    """Returns the median CPU seconds of a step without it, and the median ratio with it."""
    from core.language_module import LanguageModule
    from plugins.cli.runs.no_profiler import NoProfiler
    from plugins.networks.gpt import GPT
    from plugins.objectives.causal_lm import CausalLM
    from plugins.optimizers.adamw import AdamW

    shape = {key: size[key] for key in ("vocab_size", "n_layer", "n_head", "n_embd")}
    module = LanguageModule(
        lambda: GPT(max_sequence_length=size["length"], **shape), CausalLM(), lambda g: AdamW(g)
    )
    alternate = Alternate(inner, block)
    own = type(inner).__name__ == "GradientClip"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=2 * blocks * block, callbacks=[alternate], logger=False,
            gradient_clip_val=None if own else 1.0, enable_model_summary=False, enable_progress_bar=False,
            enable_checkpointing=False, num_sanity_val_steps=0, use_distributed_sampler=False, default_root_dir=folder,
            profiler=NoProfiler(), log_every_n_steps=block,
        )  # fmt: skip
        trainer.fit(module, datamodule=Batches(batches_of(size)))
        if type(inner).__name__ == "SpikeRollback":
            begin = time.process_time()
            inner._ring.add(trainer)
            alternate.snapshot_s = time.process_time() - begin
    with_it, without = (alternate.seconds[on][1:] for on in (True, False))
    ratios = [a / b for a, b in zip(with_it, without, strict=True)]
    usual = statistics.median(without)
    if alternate.snapshot_s:
        share = alternate.snapshot_s / usual / inner.snapshot_every_n_steps
        print(
            f"a snapshot: {alternate.snapshot_s:.3f} CPU s, {share:.2%} of {inner.snapshot_every_n_steps} steps"
        )
    return usual, statistics.median(ratios)


def main() -> None:
    """Prints one line per callback."""
    from callbacks.exponential_moving_average import ExponentialMovingAverage
    from callbacks.gradient_clip import GradientClip
    from callbacks.non_finite_guard import NonFiniteGuard
    from callbacks.oom_guard import OOMGuard
    from callbacks.skip_step import SkipStep
    from callbacks.spike_rollback import SpikeRollback
    from callbacks.stochastic_depth import StochasticDepth

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="callbacks; none: all")
    parser.add_argument("--blocks", type=int, default=12, help="with and without, each: %(default)s")
    parser.add_argument("--block", type=int, default=5, help="steps in a block: %(default)s")
    options = parser.parse_args()
    size = SIZES["10M"] | {"batch": 8, "length": 256}
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, 9.6 M parameters, 2,048 tokens a step"
    )
    print("| callback | CPU s/step without | ratio with it |\n" + "| --- " * 3 + "|")
    for inner in (
        SkipStep(),
        GradientClip(),
        GradientClip("adaptive"),
        NonFiniteGuard(),
        SpikeRollback(),
        ExponentialMovingAverage(),
        OOMGuard(memory_limit=8 << 30),
        StochasticDepth(),
    ):
        name = f"{type(inner).__name__}{'-adaptive' if getattr(inner, 'method', '') == 'adaptive' else ''}"
        if options.names and name not in options.names:
            continue
        seconds, ratio = measure(inner, size, options.blocks, options.block)
        print(f"| {name} | {seconds:.3f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
