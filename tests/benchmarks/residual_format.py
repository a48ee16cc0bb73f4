"""What a residual stream in bf16 changes beside autocast, on one device: loss curve, time of a step, memory for backward.

    python -m tests.benchmarks.residual_format

Under autocast the embedding is float32, and so is the sum of the blocks' outputs. Two other ways: "cast" has the embedding in bf16
and leaves all else to autocast; "policy" does what FSDP's policy does: blocks compute without autocast, with bf16 copies of
their weights. Losses are held against those of float32 on the same batches, as in mesh_precision. Memory is that of the
distinct tensors that autograd keeps, without parameters. Time is CPU time, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from plugins.optimizers.adamw import AdamW
from tests.benchmarks.compiled_step import LLAMA, SIZES

WAYS = ("autocast", "cast", "policy")
STEPS, ROWS, LENGTH, RATE = 60, 8, 128, 1e-3
SMALL = {"vocab_size": 256, "n_layer": 4, "n_head": 4, "n_embd": 64}


class Side:
    """A network that is trained in one of the ways, or in "float32"."""

    def __init__(self, way: str, options: dict[str, Any], seed: int, rate: float) -> None:
        torch.manual_seed(seed)
        self.network, self.way = (
            GPT(**{k: v for k, v in options.items() if k not in ("rows", "length")}, **LLAMA),
            way,
        )
        self.network.init_weights()
        self.optimizer = AdamW(self.network.parameters(), lr=rate)
        if way == "cast":
            self.network.dropout.register_forward_hook(lambda module, inputs, output: output.bfloat16())
        for block in self.network.blocks if way == "policy" else ():
            _compute_in_bf16(block)

    def step(self, ids: Tensor) -> float:
        """Trains on ids (B, T + 1); returns the loss."""
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        with nullcontext() if self.way == "float32" else torch.autocast("cpu", torch.bfloat16):
            loss = CausalLM().loss(self.network, batch)[0].mean
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def kept_bytes(self, ids: Tensor) -> int:
        """Trains a step; returns the bytes that are kept for backward."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self.network.parameters()}
        found: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if (place := tensor.untyped_storage().data_ptr()) not in own:
                found[place] = tensor  # held, so that no other tensor is put in its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.step(ids)
        return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def _compute_in_bf16(block: nn.Module) -> None:
    forward = block.forward

    def computed(x: Tensor, *args: Any) -> Any:
        weights = {name: parameter.bfloat16() for name, parameter in block.named_parameters()}
        block.forward = forward  # type: ignore[method-assign]
        try:
            with torch.autocast("cpu", enabled=False):
                return torch.func.functional_call(block, weights, (x.bfloat16(), *args))
        finally:
            block.forward = computed  # type: ignore[method-assign]

    block.forward = computed  # type: ignore[method-assign]


def curve(way: str, seed: int, text: Tensor) -> list[float]:
    """Returns the losses of a run on bytes of a text."""
    side, generator = Side(way, SMALL, seed, RATE), torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=generator)
        losses.append(side.step(torch.stack([text[at : at + LENGTH + 1] for at in starts])))
    return losses


def cost(size: str, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Returns for each way bytes for backward, seconds of a step, and how many times as fast as autocast it is."""
    options = SIZES[size]
    ids = torch.randint(options["vocab_size"], (options["rows"], options["length"] + 1))
    sides = {way: Side(way, options, 0, 1e-4) for way in WAYS}
    kept = {way: side.kept_bytes(ids) for way, side in sides.items()}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, side in sides.items():
            begin = time.process_time()
            side.step(ids)
            times[way].append(time.process_time() - begin)
    ratios = {way: [a / b for a, b in zip(times["autocast"], own, strict=True)] for way, own in times.items()}
    return {way: (kept[way], statistics.median(times[way]), statistics.median(ratios[way])) for way in WAYS}


def main() -> None:
    """Prints two tables in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=24)
    words = parser.parse_args()
    files = sorted(Path(__file__).parents[2].joinpath("docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8).long()
    apart: dict[str, list[float]] = {way: [] for way in WAYS}
    last: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(words.seeds):
        expected = curve("float32", seed, text)
        for way in WAYS:
            found = curve(way, seed, text)
            apart[way].append(
                statistics.fmean((a - b) ** 2 for a, b in zip(found, expected, strict=True)) ** 0.5
            )
            last[way].append(found[-1] - expected[-1])
    print(
        "| way | rms of loss differences: median | smallest to largest | last loss, mean difference |\n"
        + "| --- " * 4
        + "|"
    )
    for way in WAYS:
        print(
            f"| {way} | {statistics.median(apart[way]):.1e} | {min(apart[way]):.1e} to {max(apart[way]):.1e} | {statistics.fmean(last[way]):+.4f} |"
        )
    print("\n| size | way | MiB kept for backward | ms a step | times as fast |\n" + "| --- " * 5 + "|")
    for size in SIZES:
        for way, (kept, seconds, ratio) in cost(size, words.rounds).items():
            print(f"| {size} | {way} | {kept / 2**20:.1f} | {seconds * 1000:.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
