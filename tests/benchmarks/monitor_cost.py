"""What all monitors together add to a step, at their default intervals.

    python -m tests.benchmarks.monitor_cost

One run of `fit`, in blocks of steps with and without the monitors in turn; a block has as many steps as the longest interval. CPU
time of the process, so that other programs on the machine count less. The ratio is that of neighbouring blocks, its median
over them, after a first pair that is left out. Monitors are those of `MONITORS` that are registered. With `--each`, each alone too.
With `--sampled`, instead: what one monitored step costs, of each monitor that samples steps. Every second step is monitored, of TrainingDoctor every tenth, as it looks at
logged ones, so that few steps and a busy machine do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from core import catalog
from plugins.loggers.metrics_csv import MetricsCSV
from tests.benchmarks.loop_overhead import SIZES, batches_of
from tests.benchmarks.stability_callbacks import Batches

MONITORS: dict[str, dict[str, Any]] = {
    "Throughput": {},
    "StepTime": {},
    "LossBreakdown": {},
    "CollectiveMonitor": {},
    "MemoryMonitor": {},
    "DeviceMonitor": {},
    "EnergyMonitor": {"watts": 100.0, "grams_per_kwh": 400.0},
    "WeightMonitor": {},
    "ActivationMonitor": {},
    "AttentionMonitor": {},
    "GradientNoiseScale": {},
    "ConvergenceMonitor": {},
    "TrainingDoctor": {},
}
"""Name -> arguments; their intervals are the default ones. RoutingMonitor needs a network with experts."""

SAMPLED = {
    "LossBreakdown": 2,
    "WeightMonitor": 2,
    "ActivationMonitor": 2,
    "AttentionMonitor": 2,
    "GradientNoiseScale": 2,
    "TrainingDoctor": 10,
}
"""Those that measure one step in `every_n_steps`, also in one process -> a short interval, to measure that step by."""

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def has(callback: Callback, hook: str) -> bool:
    """Returns whether a callback has a hook that does something."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


class Alternate(Callback):
    """Passes hooks on to callbacks in every second block of steps, and times the blocks.

    Args:
        inner: The callbacks.
        block: Steps in a block.
    """

    def __init__(self, inner: list[Callback], block: int) -> None:
        self.inner, self.block = inner, block
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.on = True
        for name in HOOKS[:-1]:
            # as Lightning passes over hooks that a callback does not have
            hooks = [getattr(each, name) for each in inner if has(each, name)]
            setattr(self, name, lambda *args, hooks=hooks: self._pass(hooks, args))
        self._ends = [each.on_train_batch_end for each in inner if has(each, HOOKS[-1])]

    def _pass(self, hooks: list[Any], args: Any) -> None:
        if self.on:
            for hook in hooks:
                hook(*args)

    def setup(self, *args: Any, **named: Any) -> None:
        """Passes it on."""
        for each in self.inner:
            each.setup(*args, **named)

    def on_fit_start(self, *args: Any) -> None:
        """Passes it on."""
        for each in self.inner:
            each.on_fit_start(*args)

    def on_train_start(self, *args: Any) -> None:
        """Passes it on and begins."""
        for each in self.inner:
            each.on_train_start(*args)
        self.begin = time.process_time()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Passes it on, if it is its turn, and ends the block."""
        self._pass(self._ends, (trainer, *args))
        if trainer.global_step % self.block == 0:
            now = time.process_time()
            self.seconds[self.on].append((now - self.begin) / self.block)
            if not self.on:
                with_them, without = self.seconds[True][-1], self.seconds[False][-1]
                print(
                    f"{trainer.global_step} steps: {with_them:.4f} s, {without:.4f} s",
                    file=sys.stderr,
                    flush=True,
                )
            self.on = not self.on
            self.begin = time.process_time()


def measure(names: list[str], pairs: int, block: int, **arguments: Any) -> tuple[float, list[float]]:
    """Returns the median CPU seconds of a step without the monitors, and the ratio with them of each pair of blocks."""
    from core.language_module import LanguageModule
    from plugins.cli.runs.no_profiler import NoProfiler
    from plugins.networks.gpt import GPT
    from plugins.objectives.causal_lm import CausalLM
    from plugins.optimizers.adamw import AdamW

    size = SIZES["10M"]
    shape = {key: size[key] for key in ("vocab_size", "n_layer", "n_head", "n_embd")}
    module = LanguageModule(
        lambda: GPT(max_sequence_length=size["length"], **shape), CausalLM(), lambda groups: AdamW(groups)
    )
    monitors = [catalog.find(name, "callbacks").load()(**MONITORS[name], **arguments) for name in names]
    alternate = Alternate(monitors, block)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=2 * (pairs + 1) * block, callbacks=[alternate],
            logger=[MetricsCSV(folder)], gradient_clip_val=1.0, enable_model_summary=False, enable_progress_bar=False,
            enable_checkpointing=False, num_sanity_val_steps=0, use_distributed_sampler=False, default_root_dir=folder,
            profiler=NoProfiler(), log_every_n_steps=10,
        )  # fmt: skip
        trainer.fit(module, datamodule=Batches(batches_of(size)))
    with_them, without = (alternate.seconds[on][1:] for on in (True, False))
    return statistics.median(without), [a / b for a, b in zip(with_them, without, strict=True)]


def print_sampled(pairs: int) -> None:
    """Prints one line for each monitor that samples steps."""
    print(
        "| monitor | a monitored step adds, in steps | smallest | largest | interval | share |\n"
        + "| --- " * 6
        + "|"
    )
    total = 0.0
    for name, every in SAMPLED.items():
        _, ratios = measure([name], pairs, 3 * every if every < 10 else every, every_n_steps=every)
        low, cost, high = (every * (f(ratios) - 1) for f in (min, statistics.median, max))
        interval = catalog.find(name, "callbacks").load()().every_n_steps
        total += cost / interval
        print(
            f"| {name} | {cost:.3f} | {low:.3f} | {high:.3f} | {interval} | {cost / interval:.2%} |",
            flush=True,
        )
    print(f"| all | | | | | {total:.2%} |")


def main() -> None:
    """Prints one line for all, and one for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5, help="blocks with and without: %(default)s")
    parser.add_argument("--block", type=int, default=100, help="steps in a block: %(default)s")
    parser.add_argument("--each", action="store_true", help="each monitor alone too")
    parser.add_argument("--sampled", action="store_true", help="what one monitored step costs")
    options = parser.parse_args()
    registered = {entry.name for entry in catalog.entries() if entry.kind == "callbacks"}
    names = [name for name in MONITORS if name in registered]
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, 9.6 M parameters, 512 tokens a step"
    )
    if options.sampled:
        print_sampled(options.pairs)
        return
    print(f"all: {', '.join(names)}\n")
    print("| monitors | CPU s/step without | ratio with them | smallest | largest |\n" + "| --- " * 5 + "|")
    for chosen in [names, *([name] for name in names if options.each)]:
        seconds, ratios = measure(chosen, options.pairs, options.block)
        label = "all" if chosen is names else chosen[0]
        print(
            f"| {label} | {seconds:.4f} | {statistics.median(ratios):.4f} | {min(ratios):.4f} | {max(ratios):.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
