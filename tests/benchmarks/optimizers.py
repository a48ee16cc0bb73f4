"""What each optimizer costs and brings: state, step time, validation loss at equal tokens.

    python -m tests.benchmarks.optimizers --picture optimizers.png
    python -m tests.benchmarks.optimizers --compiled

State: bytes of all tensors of the state after a step, per parameter. Step time: CPU time of the step alone, on the
quickstart's network, as a ratio to fused AdamW's, which takes every second turn in the same process; the median of
the ratios. Validation loss: `fit` on the quickstart's text with its seed, batches and schedule, for so many steps,
at the best of a few learning rates. With `--compiled`: the step of those whose update Compile compiles, beside that of their library,
in CPU time and in turn, and the seconds of the first compiled step, which the compiler takes with an empty cache.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from core import catalog
from tests.benchmarks.compiled_step import LLAMA, SIZES
from toolkit import pictures
from toolkit.updates import CompilesUpdate

RATES: dict[str, tuple[float, ...]] = {
    "AdamW": (2e-3, 4e-3, 8e-3),
    "AdamW8bit": (2e-3, 4e-3, 8e-3),
    "PagedAdamW8bit": (4e-3,),
    "TorchaoAdamW8bit": (4e-3,),
    "Lion": (3e-4, 6e-4, 1.2e-3),
    "Lion8bit": (3e-4, 6e-4, 1.2e-3),
    "Adafactor": (0.02, 0.04, 0.08),
    "Muon": (2e-3, 4e-3, 8e-3),
    "SOAP": (2e-3, 4e-3, 8e-3),
    "AdEMAMix": (1e-3, 2e-3, 4e-3),
    "ScheduleFreeAdamW": (4e-3, 8e-3, 1.6e-2),
    "SGD": (0.1, 0.3, 1.0),
}
"""Optimizer -> learning rates that are tried."""

DECAYS = {"Lion": 0.3, "Lion8bit": 0.3, "Adafactor": 0.0, "SGD": 0.0}
"""Weight decay where it is not 0.1."""

HOUSE = Path(__file__).resolve().parents[2]
QUICKSTART = HOUSE / "configs" / "quickstart.yaml"


def network(options: Mapping[str, Any] | None = None) -> Any:
    """Returns a network, that of the quickstart if none is given, with random gradients."""
    from plugins.networks.gpt import GPT

    torch.manual_seed(0)
    written = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    built = GPT(**(options or written["model"]["network"]["init_args"]))
    for block in built.blocks:
        for parameter in block.parameters():
            if parameter.ndim == 2:
                parameter.hidden_matrix = True
    for parameter in built.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return built


def optimizer(name: str, built: Any) -> Any:
    """Returns an optimizer as a run would build it."""
    parameters = list(built.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return catalog.find(name, "optimizers").load()(groups, lr=1e-4)


def state_bytes(stepped: Any) -> int:
    """Returns the bytes of the tensors in an optimizer's state; what stands there twice counts once."""
    found: dict[int, int] = {}

    def walk(value: Any) -> None:
        if hasattr(value, "__tensor_flatten__"):  # torchao's, made of others
            walk([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)

    walk(dict(stepped.state))
    return sum(found.values())


def seconds(stepped: Any) -> float:
    """Returns the CPU time of a step."""
    start = time.process_time()  # not the clock: other programs share the cores
    stepped.step()
    return time.process_time() - start


def cost(name: str, rounds: int) -> tuple[float, float]:
    """Returns state bytes per parameter, and step time over that of fused AdamW."""
    own, reference = network(), network()
    stepped, adamw = optimizer(name, own), optimizer("AdamW", reference)
    for _ in range(3):  # SOAP's first step only makes its basis
        stepped.step()
        adamw.step()
    ratios = [seconds(stepped) / seconds(adamw) for _ in range(rounds)]
    if name == "SOAP":  # every tenth step makes a new basis: the mean, not the median
        return state_bytes(stepped) / sum(p.numel() for p in own.parameters()), statistics.mean(ratios)
    return state_bytes(stepped) / sum(p.numel() for p in own.parameters()), statistics.median(ratios)


def compiled_cost(name: str, size: str, rounds: int) -> tuple[float, float, list[float], float]:
    """Returns seconds of a step as it is and compiled, quartiles of the ratios, and seconds of the first compiled step."""
    options = {key: value for key, value in SIZES[size].items() if key not in ("rows", "length")} | LLAMA
    own, other = network(options), network(options)
    library, fused = optimizer(name, own), optimizer(name, other)
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        fused.compile_update(partial(torch.compile, dynamic=True))
        begin = time.perf_counter()
        fused.step()
        first = time.perf_counter() - begin
        library.step()
        times = [(seconds(library), seconds(fused)) for _ in range(rounds)]
    ratios = statistics.quantiles((slow / fast for slow, fast in times), n=4)
    return *(statistics.median(side) for side in zip(*times, strict=True)), ratios, first


def print_compiled(names: list[str], rounds: int) -> None:
    """Prints one line for each optimizer whose update is compiled, and size."""
    print(
        "| optimizer | size | ms a step | compiled | times as fast (quartiles) | first step, s |\n"
        + "| --- " * 6
        + "|"
    )
    for name in names:
        if not issubclass(catalog.find(name, "optimizers").load(), CompilesUpdate):
            continue
        for size in SIZES:
            slow, fast, ratios, first = compiled_cost(name, size, rounds)
            print(
                f"| {name} | {size} | {slow * 1000:.1f} | {fast * 1000:.1f} | {ratios[1]:.1f} ({ratios[0]:.1f} to {ratios[2]:.1f}) | "
                f"{first:.0f} |",
                flush=True,
            )


def validation_loss(name: str, rate: float, steps: int, folder: Path) -> float:
    """Trains, and returns the last validation loss in nats per token."""
    options = {"lr": rate, "weight_decay": DECAYS.get(name, 0.1)}
    schedule: Any = {"class_path": "WarmupCosine", "init_args": {"warmup_steps": 0.1}}
    if name == "ScheduleFreeAdamW":
        options["warmup_steps"], schedule = steps // 10, None
    config = {
        "base": "quickstart",
        "trainer": {
            "max_steps": steps,
            "val_check_interval": steps,
            "enable_progress_bar": False,
            "callbacks": [],
            "logger": [{"class_path": "MetricsCSV", "init_args": {"save_dir": "${run_folder}"}}],
        },
        "model": {"optimizer": {"class_path": name, "init_args": options}, "lr_scheduler": schedule},
    }
    path, run = folder / f"{name}-{rate:g}.yaml", folder / f"{name}-{rate:g}"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "core", "fit", f"--config={path}", f"--trainer.default_root_dir={run}"]
    command.append(f"--data.cache_dir={folder / 'data'}")
    done = subprocess.run(
        command, cwd=HOUSE, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    with open(run / "metrics.csv", encoding="utf-8", newline="") as file:
        losses = [float(row["val/loss"]) for row in csv.DictReader(file) if row.get("val/loss")]
    return losses[-1]


def draw(rows: list[tuple[str, float, float, float, float]], path: Path) -> None:
    """Draws the three figures of each optimizer as bars."""

    figure = pictures.new_figure(12, 4.5)
    names = [row[0] for row in rows][::-1]
    titles = (
        "state (bytes per parameter)",
        "step time (ratio to fused AdamW)",
        "validation loss (nats per token)",
    )
    for index, (axes, title) in enumerate(zip(figure.subplots(1, 3, sharey=True), titles, strict=True)):
        values = [row[index + 1] for row in rows][::-1]
        axes.barh(names, values, color=("tab:blue", "tab:orange", "tab:green")[index])
        axes.bar_label(axes.containers[0], fmt="%.3g" if index < 2 else "%.3f", padding=3)
        axes.set_title(title, fontsize=10, loc="left")
        pictures.tidy(axes, grid=False)
        if index == 1:
            axes.set_xscale("log")
        axes.margins(x=0.18)
        if index == 2:
            axes.set_xlim(min(values) - 0.3, max(values) + 0.3)
    figure.savefig(path, dpi=150)


def measured(
    names: list[str], options: argparse.Namespace
) -> Iterator[tuple[str, float, float, float, float]]:
    """Yields name, state, ratio, validation loss and the learning rate that gave it."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            state, ratio = cost(name, options.rounds)
            rates = RATES[name] if options.rates == "all" else RATES[name][len(RATES[name]) // 2 :][:1]
            losses = dict.fromkeys(rates, math.nan)
            for rate in rates if options.steps else ():
                losses[rate] = validation_loss(name, rate, options.steps, Path(folder))
            best = min(losses, key=losses.__getitem__)
            yield name, state, ratio, losses[best], best


def main() -> None:
    """Prints one line per optimizer; draws them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="optimizers; none: all")
    parser.add_argument("--steps", type=int, default=200, help="of training; 0: none: %(default)s")
    parser.add_argument("--rounds", type=int, default=40, help="timed steps: %(default)s")
    parser.add_argument("--rates", choices=("all", "one"), default="all", help="learning rates: %(default)s")
    parser.add_argument("--picture", type=Path, help="where to draw")
    parser.add_argument("--compiled", action="store_true", help="measure compiled updates alone")
    options = parser.parse_args()
    if options.compiled:
        print_compiled(options.names or list(RATES), options.rounds)
        return
    parameters = sum(p.numel() for p in network().parameters())
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {parameters:,} parameters, {options.steps} steps"
    )
    print(
        "| optimizer | state bytes/parameter | step time / fused AdamW | validation loss | at lr |\n"
        + "| --- " * 5
        + "|"
    )
    rows = []
    for row in measured(options.names or list(RATES), options):
        rows.append(row)
        print("| {} | {:.2f} | {:.1f} | {:.3f} | {:g} |".format(*row), flush=True)
    if options.picture:
        draw(rows, options.picture)
        print(f"Picture: {options.picture}")


if __name__ == "__main__":
    main()
