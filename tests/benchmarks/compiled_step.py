"""What Compile gains in a step, and what its first step costs: paired, block by block in turn.

    python -m tests.benchmarks.compiled_step

Three copies of a network train on the same batches in one process, in turn, BLOCK steps at a time: as it is, with
its blocks compiled, and with network and loss compiled as a whole. Ratios are those of neighbouring blocks of steps, so that
all see the same machine. "Cold" is the first step with an empty cache, "kept" that of a second copy with a full one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from callbacks.compile import Compile, Region
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from plugins.optimizers.adamw import AdamW

BLOCK = 5
LLAMA: dict[str, Any] = {
    "position": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "max_sequence_length": 1024,
}
SIZES: dict[str, dict[str, Any]] = {
    "1.1M": {"vocab_size": 2048, "n_layer": 4, "n_head": 4, "n_embd": 128, "rows": 4, "length": 128},
    "10M": {"vocab_size": 4096, "n_layer": 6, "n_head": 6, "n_embd": 336, "rows": 4, "length": 128},
}


class Side:
    """One copy of a network, with its optimizer."""

    def __init__(self, scope: str | None, options: dict[str, Any], bf16: bool, device: str) -> None:
        options = dict(options)
        self.shape = options.pop("rows"), options.pop("length")
        torch.manual_seed(0)
        self.network, self.objective = GPT(**options, **LLAMA).to(device), CausalLM()
        self.network.init_weights()
        self.optimizer = AdamW(self.network.parameters(), lr=1e-4)
        self.device, self.bf16 = device, bf16
        self.loss: Callable[..., Any] = self.objective.loss
        self.compiler = Compile()
        if scope == "blocks":
            self.compiler.change_network(self.network)
        elif scope == "whole":
            self.loss = Region(self.loss, [], self.compiler.compiled())

    def step(self) -> float:
        """Trains one step; returns its seconds, on a CPU those of computing: other work on the machine does not count."""
        ids = torch.randint(self.network.vocab_size, self.shape, device=self.device)
        self._wait()
        clock = time.perf_counter if self.device == "cuda" else time.process_time
        begin = clock()
        context = torch.autocast(self.device, torch.bfloat16) if self.bf16 else nullcontext()
        with context:
            mean = self.loss(self.network, {"input_ids": ids, "labels": ids.roll(-1, 1)})[0].mean
        mean.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        return clock() - begin

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _first(side: Side) -> float:
    begin = time.perf_counter()
    side.step()
    return time.perf_counter() - begin


def measure(options: dict[str, Any], bf16: bool, rounds: int, device: str) -> dict[str, tuple[float, ...]]:
    """Returns, for each way, seconds of a step, the median and the quartiles of its ratio, and of the first steps."""
    firsts, sides = {}, {"plain": Side(None, options, bf16, device)}
    for scope in ("blocks", "whole"):
        torch.compiler.reset()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
        cold = _first(Side(scope, options, bf16, device))
        torch.compiler.reset()
        firsts[scope] = cold, _first(Side(scope, options, bf16, device))
    torch.compiler.reset()
    for scope in firsts:  # both from what is kept, or from the compiler once more
        sides[scope] = Side(scope, options, bf16, device)
    for side in sides.values():
        side.step()
        side.step()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(statistics.median(side.step() for _ in range(BLOCK)))
    found = {}
    for name, seconds in times.items():
        ratios = [plain / own for plain, own in zip(times["plain"], seconds, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        found[name] = (
            statistics.median(seconds),
            quartiles[1],
            quartiles[0],
            quartiles[2],
            *firsts.get(name, ()),
        )
    return found


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument(
        "--precisions", nargs="+", default=["32-true", "bf16-mixed"], choices=["32-true", "bf16-mixed"]
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words = parser.parse_args()
    print("| size | precision | way | ms a step | times as fast (quartiles) | first step, cold / kept, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in words.sizes:
        for precision in words.precisions:
            bf16 = precision == "bf16-mixed"
            for name, row in measure(SIZES[size], bf16, words.rounds, words.device).items():
                first = f"{row[4]:.0f} / {row[5]:.1f}" if len(row) > 4 else ""
                print(
                    f"| {size} | {precision} | {name} | {row[0] * 1000:.1f} | "
                    f"{row[1]:.2f} ({row[2]:.2f} to {row[3]:.2f}) | {first} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
