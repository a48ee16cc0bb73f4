"""How much memory a rank needs until DeepSpeedZero's first step, against the bytes of the weights.

    python -m tests.benchmarks.zero_start [--ranks 2] [--stages 1 2 3]

A GPT of 84M parameters in float32, with SGD, which has no states. Device and host are one on a CPU: what a stage keeps on
the device is counted, too. Figures are the most that a rank has held (VmHWM) after the network was built: when weights have their
values and DeepSpeed's engine begins to be built, and when the first step begins. Those of a network of 0.1M are subtracted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.callbacks import Callback

LAYERS, WIDTH, VOCABULARY = 6, 1024, 8192


def _status(field: str) -> float:
    """Returns a line of this process' status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field))


class MostMemory(Callback):
    """Prints what this rank has held at most, and holds."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Notes what it holds before the network is built."""
        import deepspeed

        plain, before = deepspeed.initialize, _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.found: list[float] = []

        def initialize(**arguments: Any) -> Any:
            self.found += [_status("VmHWM") - before, _status("VmRSS") - before]
            Path("/proc/self/clear_refs").write_text("5")
            return plain(**arguments)

        self.before, deepspeed.initialize = before, initialize

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Prints the difference."""
        self.found += [_status("VmHWM") - self.before, _status("VmRSS") - self.before]
        figures = " ".join(map(str, self.found))
        os.write(1, f"MEMORY {trainer.global_rank} {figures}\n".encode())  # at once: ranks share the output


def found(stage: int, ranks: int, layers: int, width: int, vocabulary: int) -> np.ndarray:
    """Returns what was printed on each rank, (ranks, 4) MiB."""
    network = (
        f"n_layer: {layers}, n_embd: {width}, n_head: 8, vocab_size: {vocabulary}, max_sequence_length: 64"
    )
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *[sys.executable, "-m", "core", "fit", "--config=quickstart", "--trainer.accelerator=cpu"],
            *[f"--trainer.devices={ranks}", f"--trainer.default_root_dir={folder}", "--trainer.max_steps=1"],
            f"--model.network={{class_path: GPT, init_args: {{{network}}}}}",
            *["--data.sequence_length=64", "--data.batch_size=1", "--trainer.num_sanity_val_steps=0"],
            *["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1"],
            *["--trainer.limit_val_batches=0"],
            f"--trainer.strategy={{class_path: DeepSpeedZero, init_args: {{stage: {stage}}}}}",
            "--trainer.callbacks+=tests.benchmarks.zero_start.MostMemory",
        ]
        done = subprocess.run(words, capture_output=True, text=True)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("MEMORY")]
    if done.returncode or len(lines) != ranks:
        sys.exit(done.stderr[-3000:] + done.stdout[-1000:])
    return np.array(sorted(lines), float)[:, 1:]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    weights = 4 * (12 * LAYERS * WIDTH**2 + VOCABULARY * WIDTH) / 2**20
    print(f"{options.ranks} ranks, weights of {weights:.0f} MiB; MiB of each rank")
    print("| stage | most until the engine | then | most until the first step | then |")
    print("| --- | --- | --- | --- | --- |")
    for stage in options.stages:
        figures = found(stage, options.ranks, LAYERS, WIDTH, VOCABULARY) - found(
            stage, options.ranks, 2, 32, 2048
        )
        each = (", ".join(f"{figure:.0f}" for figure in column) for column in figures.T)
        print(f"| {stage} | {' | '.join(each)} |", flush=True)


if __name__ == "__main__":
    main()
