"""What one GPU gives: the tests that need it, GPT-2's speed and memory beside a loop written by hand, kernels by time.

    python -m tests.benchmarks.gpu --out gpu.md

Parts, in this order: the tests marked `gpu`; tokens/s, MFU and peak memory of GPT-2 124M and 1.5B and of Llama 8B's blocks, eager and
compiled, in bf16 and fp8, beside a compiled network and loop written by hand; what others publish; kernels by time. Each line is a process of its
own: one that fails, or runs out of memory, says so in its line, and the next one starts. Lines are printed as they come, in the
Markdown of RESULTS.md. Nothing starts that the budget has no time for. MFU of fp8, too, is over the bf16 peak.

Data are random rows made on the spot, and networks, callbacks and precision are built from their classes: the speed needs torch
and lightning, fp8 also torchao, and neither litdata nor jsonargparse. Only the tests need what the extra `test` installs.

`--tiny` goes through all of it in a minute or two with a small network, on a CPU where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

HOUSE = Path(__file__).resolve().parents[2]
PARTS = ("tests", "speed", "published", "kernels")
TESTS_SECONDS, LINE_SECONDS, LEAST_SECONDS = 180, 150, 20
"""The most that the tests and one line may take, and the least that is worth a start."""

Size = dict[str, int]
"""GPT's or Llama's sizes, with `rows` of `length` tokens in a step."""

SIZES: dict[str, Size] = {
    "124M": {"vocab_size": 50304, "n_layer": 12, "n_head": 12, "n_embd": 768, "length": 1024, "rows": 32},
    "1.5B": {"vocab_size": 50304, "n_layer": 48, "n_head": 25, "n_embd": 1600, "length": 1024, "rows": 8},
    "Llama 8B, 4 of 32 blocks": {
        "vocab_size": 128256,
        "n_layer": 4,
        "n_head": 32,
        "n_kv_head": 8,
        "n_embd": 4096,
        "intermediate_size": 14336,
        "length": 8192,
        "rows": 2,
    },
    "tiny Llama": {
        "vocab_size": 512,
        "n_layer": 2,
        "n_head": 4,
        "n_kv_head": 2,
        "n_embd": 64,
        "intermediate_size": 128,
        "length": 64,
        "rows": 2,
    },
    "tiny": {"vocab_size": 512, "n_layer": 2, "n_head": 2, "n_embd": 64, "length": 64, "rows": 2},
}
WAYS = {
    "bf16, blocks compiled": {"precision": "bf16", "scope": "blocks"},
    "bf16, by hand, compiled": {"precision": "bf16", "scope": "whole", "by_hand": True},
    "bf16, whole compiled": {"precision": "bf16", "scope": "whole"},
    "fp8, blocks compiled": {"precision": "fp8", "scope": "blocks"},
    "bf16, FSDP, blocks compiled": {"precision": "bf16", "scope": "blocks", "strategy": "FSDP"},
    "bf16, eager": {"precision": "bf16"},
    "fp8, eager": {"precision": "fp8"},
}
"""What is measured, the most telling first: the budget may end the list."""

PUBLISHED = (
    ("torchtitan, Llama 3.1 8B, 8 H100, FSDP, eager", "5,762", "its docs, performance on 8 H100 (500 W)"),
    ("the same, compiled", "6,667 (39% MFU)", "the same"),
    ("the same, compiled, fp8", "8,532", "the same"),
    ("llm.c, GPT-2 124M, 8 H100", "463,000", "10B tokens in 45 minutes: README of modded-nanogpt"),
    (
        "nanochat, d32 (1.9B), 8 H100",
        "at least 40,000",
        "38B tokens in 33 hours, fine-tuning included: its README",
    ),
)
"""What, tokens/s of one GPU, source."""


class Watch:
    """Times steps on a device, and notes which kernels they ran.

    Args:
        warm_up: Steps before, which compile.
        steps: Steps that are timed.
        device: Where they run.
        kernels: Whether to profile them: the time is then none to quote.
    """

    def __init__(self, warm_up: int, steps: int, device: torch.device, kernels: bool = False) -> None:
        self.warm_up, self.steps, self.device = warm_up, steps, device
        self.seconds, self.done, self.began = 0.0, 0, 0.0
        both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.profiler = torch.profiler.profile(activities=both[: 1 + self.on_gpu]) if kernels else None

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def step(self) -> None:
        """Is called after each step."""
        self.done += 1
        if self.done == self.warm_up:
            if self.profiler is not None:
                self.profiler.start()
            self.began = self._now()
        elif self.done == self.warm_up + self.steps:
            self.seconds = self._now() - self.began
            if self.profiler is not None:
                self.profiler.stop()

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def kernels(self, most: int = 15) -> list[tuple[str, float, int]]:
        """Returns name, milliseconds a step and calls a step of what takes the most time."""
        assert self.profiler is not None
        time_of = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        found = [(one.key, getattr(one, time_of) / 1e3, one.count) for one in self.profiler.key_averages()]
        found.sort(key=lambda one: -one[1])
        return [(name, ms / self.steps, calls // self.steps) for name, ms, calls in found[:most]]


class Watched(Callback):
    """Tells a watch of each step of a Trainer."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Tells it."""
        self.watch.step()


def network_of(size: Size) -> Callable[[], Any]:
    """Returns what builds Llama, if its sizes are there, or else GPT."""
    from plugins.networks.gpt import GPT
    from plugins.networks.llama import Llama

    own = {name: number for name, number in size.items() if name not in ("length", "rows")}
    kind: Callable[..., Any] = Llama if "n_kv_head" in size else GPT
    return partial(kind, max_sequence_length=size["length"], **own)


def batches(size: Size, count: int) -> list[dict[str, Tensor]]:
    """Returns random rows with their labels."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(size["vocab_size"], (count, size["rows"], size["length"] + 1), generator=generator)
    return [{"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in rows]


def fit(size: Size, way: dict[str, Any], watch: Watch) -> None:
    """Trains as a run does: Trainer, LanguageModule, AdamW, clipping at 1."""
    from callbacks.compile import Compile
    from core.language_module import LanguageModule
    from plugins.objectives.causal_lm import CausalLM
    from plugins.optimizers.adamw import AdamW
    from plugins.precision.float8 import Float8
    from plugins.strategies.fsdp import FSDP

    module = LanguageModule(network_of(size), CausalLM(), partial(AdamW, lr=6e-4, weight_decay=0.1))
    fp8 = way["precision"] == "fp8"
    strategy: Any = (
        FSDP() if way.get("strategy") == "FSDP" else "auto"
    )  # bf16 weights and residual, by policy
    compiled: list[Callback] = [Compile(scope=way["scope"])] if "scope" in way else []
    rows: Any = batches(size, watch.warm_up + watch.steps)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            accelerator="gpu" if watch.on_gpu else "cpu", devices=1, strategy=strategy, max_steps=len(rows), gradient_clip_val=1.0,
            precision=None if fp8 else "bf16-mixed", plugins=[Float8()] if fp8 else None, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            log_every_n_steps=10, use_distributed_sampler=False, callbacks=[*compiled, Watched(watch)],
            default_root_dir=folder,
        ).fit(module, torch.utils.data.DataLoader(rows, batch_size=None))  # fmt: skip


class HandBlock(nn.Module):
    """GPT-2's block, as anybody would write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, (B, T, C) -> (B, T, C)."""
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class HandGPT(nn.Module):
    """GPT-2 with its loss, and nothing of this project."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size["n_embd"]
        self.tokens = nn.Embedding(size["vocab_size"], width)
        self.positions = nn.Embedding(size["length"], width)
        self.blocks = nn.ModuleList(HandBlock(width, size["n_head"]) for _ in range(size["n_layer"]))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of rows of tokens, (B, T)."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).flatten(0, 1), labels.flatten())


def loop(size: Size, way: dict[str, Any], watch: Watch) -> None:
    """Trains HandGPT on the same rows in the same precision, with nothing but a loop."""
    with watch.device:
        network = HandGPT(size)
    loss_of: Callable[..., Any] = torch.compile(network) if "scope" in way else network
    optimizer = torch.optim.AdamW(network.parameters(), lr=6e-4, weight_decay=0.1, fused=True)
    for batch in batches(size, watch.warm_up + watch.steps):
        ids, labels = batch["input_ids"].to(watch.device), batch["labels"].to(watch.device)
        with torch.autocast(watch.device.type, torch.bfloat16):
            loss = loss_of(ids, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        watch.step()


def measured(size: Size, way: dict[str, Any], steps: int, kernels: bool = False) -> dict[str, Any]:
    """Trains one way; returns its figures, or the kernels by time."""
    from callbacks.throughput import peak_flops, peak_memory

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    watch = Watch(4, steps, device, kernels)
    (loop if way.get("by_hand") else fit)(size, way, watch)
    if kernels:
        return {"kernels": watch.kernels()}
    with torch.device("meta"):
        flops = network_of(size)().flops_per_token(size["length"])
    rate = steps * size["rows"] * size["length"] / watch.seconds
    peak = peak_flops(device, torch.bfloat16)[1]
    [memory] = peak_memory(device).values()
    return {
        "rate": rate,
        "ms": 1e3 * watch.seconds / steps,
        "mfu": rate * flops / peak if peak else None,
        "gib": memory,
    }


class Report:
    """Prints lines as they come, writes them to a file too, and starts what there is time for."""

    def __init__(self, file: TextIO | None, budget: float) -> None:
        self.file, self.end = file, time.monotonic() + budget

    def line(self, text: str = "") -> None:
        """Prints a line."""
        for stream in filter(None, (sys.stdout, self.file)):
            print(text, file=stream, flush=True)

    def run(self, command: list[str], most: float) -> tuple[int | None, str]:
        """Runs a command; returns its exit code and output, or None and why there is none."""
        left = min(most, self.end - time.monotonic())
        if left < LEAST_SECONDS:
            return None, "left out: the budget is spent"
        paths = [str(HOUSE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(
                command, cwd=HOUSE, env=environ, timeout=left, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None, f"not done after {left:.0f} s"
        return done.returncode, done.stdout

    def one(self, **values: Any) -> dict[str, Any] | str:
        """Measures in a process of its own; returns the figures, or why there are none."""
        command = [sys.executable, "-m", "tests.benchmarks.gpu", "--one", json.dumps(values)]
        code, output = self.run(command, LINE_SECONDS)
        lines = output.strip().splitlines() or ["no output"]
        found = next((line for line in lines if line.startswith("MEASURED ")), None)
        if code == 0 and found is not None:
            return dict(json.loads(found.removeprefix("MEASURED ")))
        # a failed process ends with its error; "|" would begin another column
        fault = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        return fault.replace("|", "/")[:160]


def tests(report: Report, options: argparse.Namespace) -> None:
    """Runs the tests that need CUDA; without a GPU they are listed."""
    folder = HOUSE / "tests"
    files = [
        str(path.relative_to(HOUSE))
        for path in sorted(folder.rglob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    gpu = torch.cuda.is_available()
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    code, output = report.run([*command, *(["-rfE"] if gpu else ["--collect-only"]), *files], TESTS_SECONDS)
    report.line("Tests marked `gpu`:\n\n```")
    report.line(output if code is None else "\n".join(output.strip().splitlines()[-25:]))
    report.line("```\n")


def speed(report: Report, options: argparse.Namespace) -> None:
    """Measures each way of each size."""
    report.line(
        "| network | way | rows | tokens/s | ms/step | MFU | peak GiB |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name, size in options.chosen.items():
        for way in options.ways:
            found = report.one(size=size, way=WAYS[way], steps=options.steps)
            begin = f"| {name} | {way} | {size['rows']} |"
            if isinstance(found, str):
                report.line(f"{begin} {found} | | | |")
                continue
            mfu = "" if found["mfu"] is None else f"{100 * found['mfu']:.1f}%"
            report.line(f"{begin} {found['rate']:,.0f} | {found['ms']:.1f} | {mfu} | {found['gib']:.1f} |")
    report.line()


def published(report: Report, options: argparse.Namespace) -> None:
    """Prints what others publish."""
    report.line(
        "Published by others, not measured here:\n\n| what | tokens/s of one GPU | source |\n| --- | --- | --- |"
    )
    for row in PUBLISHED:
        report.line(f"| {' | '.join(row)} |")
    report.line()


def kernels(report: Report, options: argparse.Namespace) -> None:
    """Profiles the first size, with its blocks compiled."""
    [(name, size), *_] = options.chosen.items()
    way = options.ways[0]
    found = report.one(size=size, way=WAYS[way], steps=3, kernels=True)
    if isinstance(found, str):
        report.line(f"Kernels of {name}: {found}")
        return
    report.line(
        f"Kernels of {name}, {way}, by their own time in 3 steps:\n\n| kernel | ms/step | calls/step |\n| --- | --- | --- |"
    )
    for kernel, ms, calls in found["kernels"]:
        report.line(f"| `{kernel.replace('|', '/')[:100]}` | {ms:.3f} | {calls} |")


def head(options: argparse.Namespace) -> Iterator[str]:
    """Yields the section's heading and where it ran."""
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else "CPU (no GPU: these figures are none to quote)"
    yield f"## gpu, {date.today().isoformat()}, {device}, torch {torch.__version__}"
    steps = f"{options.steps} steps after 4 that compile"
    yield f"\n`python -m tests.benchmarks.gpu`: GPT-2 on random rows, AdamW, clipping at 1; means of {steps}.\n"


def main(words: list[str] | None = None) -> None:
    """Prints the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["124M", "1.5B"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rows", type=int, help="rows of a step, for all sizes")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed (%(default)s)")
    parser.add_argument(
        "--budget", type=float, default=570, metavar="SECONDS", help="of all parts (%(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the lines go, too")
    parser.add_argument("--tiny", action="store_true", help="the size tiny, 3 steps")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.one:
        print("MEASURED", json.dumps(measured(**json.loads(options.one))), flush=True)
        return
    if options.tiny:
        options.sizes, options.steps = ["tiny"], 3
    options.chosen = {
        name: SIZES[name] | ({"rows": options.rows} if options.rows else {}) for name in options.sizes
    }
    parts: dict[str, Callable[[Report, argparse.Namespace], None]] = {
        "tests": tests, "speed": speed, "published": published, "kernels": kernels,
    }  # fmt: skip
    with options.out.open("w", encoding="utf-8") if options.out else open(os.devnull, "w") as file:
        report = Report(file, options.budget)
        for line in head(options):
            report.line(line)
        for name in PARTS:
            if name in options.parts:
                parts[name](report, options)


if __name__ == "__main__":
    main()
