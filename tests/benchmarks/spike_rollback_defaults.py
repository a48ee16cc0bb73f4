"""Which settings of SpikeRollback's detector find spikes and leave ordinary steps alone.

    python -m tests.benchmarks.spike_rollback_defaults --processes 16 --out results
    python -m tests.benchmarks.spike_rollback_defaults --report results

For each size and seed a clean run with the quickstart's text, rate, schedule, clipping and norms, whose loss and
gradient norm of each step are written to a file. From a snapshot of it, runs on poisoned data follow: garbled tokens
at a rate that is too high, garbled tokens alone, and one bad step in which the gradients are large. Each is run until the host
would look, put back to the snapshot that SpikeRollback would take, and trained to the end behind the skipped data; so
is the clean run from there, which shows what other data alone change.
The report replays `OutlierWindow`, the class that SpikeRollback decides with, over the recorded steps for
a grid of settings. It needs torch alone.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.outliers import OutlierWindow

SIZES: dict[str, dict[str, int]] = {
    "0.2M": {"n_layer": 2, "n_head": 2, "n_embd": 64},
    "1.1M": {"n_layer": 4, "n_head": 4, "n_embd": 128},
    "2.2M": {"n_layer": 6, "n_head": 5, "n_embd": 160},
}
VOCABULARY, ROWS, LENGTH, VALIDATION_ROWS = 2048, 8, 128, 256
WARMUP, LOG_EVERY, REWIND, SNAPSHOT_EVERY, SKIP = 40, 10, 100, 50, 200
POISONS = {
    "rate and garbage": {"steps": 10, "rate": 30.0, "garbage": 1.0, "gradient": 1.0},
    "garbage": {"steps": 10, "rate": 1.0, "garbage": 1.0, "gradient": 1.0},
    "half garbage": {"steps": 10, "rate": 1.0, "garbage": 0.5, "gradient": 1.0},
    "gradient": {"steps": 1, "rate": 1.0, "garbage": 0.0, "gradient": 100.0},
}
"""What is done to data and steps; of garbage the share of rows."""

WINDOWS, SIGMAS = (32, 64, 128, 256), (4.0, 6.0, 8.0, 10.0, 12.0, 15.0)
RISES = ((0.0, 0.0), (0.1, 1.0), (0.0, 4.0), (0.0, 9.0))
"""Least rise of loss and gradient norm above the mean, as a share of it."""


def tokens() -> Tensor:
    """Returns the quickstart's text as token ids: the most frequent words, and letters for the rest."""
    from datamodules.preparation.readers.python_docs import python_documents

    words = re.findall(r" ?[A-Za-z]+|\s+|[^A-Za-z\s]", "\n\n".join(python_documents()))
    kept = [w for w, _ in Counter(words).most_common() if len(w.encode()) > 1][: VOCABULARY - 256]
    ids = {word: 256 + number for number, word in enumerate(kept)}
    found = [[ids[word]] if word in ids else list(word.encode()) for word in words]
    return torch.tensor(list(itertools.chain.from_iterable(found)))


class Training:
    """A run that can be put back to where it was.

    Args:
        size: Of the network.
        seed: Of weights and of the order of the data.
        steps: Of the run.
        device: Where it computes.
    """

    def __init__(self, size: dict[str, int], seed: int, steps: int, device: str) -> None:
        from plugins.networks.gpt import GPT
        from plugins.objectives.causal_lm import CausalLM
        from plugins.optimizers.adamw import AdamW
        from plugins.schedules.warmup_cosine import WarmupCosine

        rows = tokens().unfold(0, LENGTH + 1, LENGTH)
        order = torch.randperm(
            len(rows), generator=torch.Generator().manual_seed(12345)
        )  # the same split for all
        self.validation, self.rows = rows[order[:VALIDATION_ROWS]], rows[order[VALIDATION_ROWS:]]
        self.seed, self.device, self.objective = seed, device, CausalLM()
        torch.manual_seed(seed)
        self.network = GPT(
            VOCABULARY,
            max_sequence_length=LENGTH,
            position="rotary",
            norm="rmsnorm",
            activation="swiglu",
            bias=False,
            **size,
        ).to(device)
        matrices = [p for p in self.network.parameters() if p.ndim > 1]
        rest = [p for p in self.network.parameters() if p.ndim < 2]
        self.optimizer = AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=4e-3)
        self.schedule = WarmupCosine(self.optimizer, warmup_steps=WARMUP)
        self.schedule.bind(steps)
        self.step = self.read = 0

    def batch(self, number: int, garbage: float = 0.0) -> dict[str, Tensor]:
        """Returns a batch by its number in the order of the data, some of its rows garbled."""
        epoch, place = divmod(number * ROWS, len(self.rows) - len(self.rows) % ROWS)
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        rows = self.rows[torch.randperm(len(self.rows), generator=generator)[place : place + ROWS]].clone()
        if bad := round(garbage * ROWS):
            rows[:bad] = torch.randint(VOCABULARY, rows[:bad].shape, generator=generator.manual_seed(number))
        return self.as_batch(rows)

    def as_batch(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns rows (B, T + 1) as inputs and labels."""
        rows = rows.to(self.device)
        return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    def advance(self, garbage: float = 0.0, rate: float = 1.0, gradient: float = 1.0) -> tuple[float, float]:
        """Takes a step; returns its loss and the norm of its gradients before clipping."""
        loss, _ = self.objective.loss(self.network, self.batch(self.read, garbage))
        loss.mean.backward()
        parameters = list(self.network.parameters())
        if gradient != 1.0:
            torch._foreach_mul_([p.grad for p in parameters], gradient)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * rate
        self.optimizer.step()
        for group, own in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = own
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step, self.read = self.step + 1, self.read + 1
        return float(loss.mean.detach()), float(norm)

    def loss(self) -> float:
        """Returns the loss on the validation rows."""
        self.network.eval()
        with torch.no_grad():
            losses = [
                float(self.objective.loss(self.network, self.as_batch(part))[0].mean)
                for part in self.validation.split(32)
            ]
        self.network.train()
        return statistics.fmean(losses)

    def snapshot(self) -> Any:
        """Returns all but the position in the data."""
        parts = self.network, self.optimizer, self.schedule
        return self.step, copy.deepcopy([part.state_dict() for part in parts])

    def put_back(self, snapshot: Any) -> None:
        """Goes back; the data go on."""
        self.step, states = snapshot[0], copy.deepcopy(snapshot[1])
        for part, state in zip((self.network, self.optimizer, self.schedule), states, strict=True):
            part.load_state_dict(state)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Runs one size and seed: clean, poisoned and put back, and clean on the data that are left then."""
    torch.set_num_threads(1)
    begin, steps = time.monotonic(), job["steps"]
    training = Training(SIZES[job["size"]], job["seed"], steps, job["device"])
    bad = round(steps * (0.4 + 0.04 * job["seed"] % 0.4)) + 1  # the first poisoned step
    target = max(bad - REWIND, 0) // SNAPSHOT_EVERY * SNAPSHOT_EVERY
    trace, before, back = [], None, None
    for step in range(steps):
        back = training.snapshot() if step == target else back
        before = training.snapshot() if step == bad - 1 else before
        trace.append(training.advance())
    found = {**job, "bad": bad, "target": target, "trace": trace, "clean": training.loss(), "poisoned": {}}

    def finish(read: int) -> float:
        training.put_back(back)
        training.read = max(read, target + SKIP)
        while training.step < steps:
            training.advance()
        return training.loss()

    seen = -(-bad // LOG_EVERY) * LOG_EVERY
    found["after"] = finish(seen)
    for name in job["poisons"]:
        poison = dict(POISONS[name])
        training.put_back(before)
        training.read, last = bad - 1, bad - 1 + poison.pop("steps")
        trace = []
        while training.step < min(max(seen, bad + 2 * LOG_EVERY), steps):
            trace.append(training.advance(**(poison if training.step < last else {})))
        found["poisoned"][name] = {"trace": trace}
        if job["unguarded"]:
            while training.step < steps:
                training.advance(**(poison if training.step < last else {}))
            found["poisoned"][name]["unguarded"] = training.loss()
    found["seconds"] = time.monotonic() - begin
    path = Path(job["out"], f"{job['size']}-{job['seed']}.json")
    path.write_text(json.dumps(found), encoding="utf-8")
    return found


def outliers(detector: OutlierWindow, trace: list[list[float]], rule: str) -> list[int]:
    """Returns which steps of a trace (from 0) SpikeRollback's own window calls outliers."""
    found = []
    for step, figures in enumerate(trace):
        outlier, now, limits = detector.take(*map(torch.tensor, figures))
        beyond = bool((now > limits).all()) if rule == "both" else bool(outlier)
        if beyond or not all(map(math.isfinite, figures)):
            found.append(step)
    return found


def judge(job: tuple[tuple[Any, ...], list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns in how many clean runs a setting is wrong, and how late it finds poison; None: not at all."""
    (window, sigma, rises, rule), runs = job
    torch.set_num_threads(1)
    row: dict[str, Any] = {"false": {}, "late": {}}
    for run in runs:
        size, trace, bad = run["size"], run["trace"], run["bad"]
        detector = OutlierWindow(2, window, sigma, rises)
        wrong = outliers(detector, trace[: bad - 1], rule)
        before = copy.deepcopy(detector)
        wrong += outliers(detector, trace[bad - 1 :], rule)
        row["false"][size] = row["false"].get(size, 0) + bool(wrong)
        for name, poisoned in run["poisoned"].items():
            steps = outliers(copy.deepcopy(before), poisoned["trace"], rule)
            row["late"].setdefault(name, []).append(steps[0] if steps else None)
    return row


def report(runs: list[dict[str, Any]], processes: int) -> None:
    """Prints both tables."""
    print(
        "| size | runs | clean loss | behind skipped data: change | largest | unguarded: change |\n"
        + "| --- " * 6
        + "|"
    )
    for size in sorted({run["size"] for run in runs}, key=list(SIZES).index):
        own = [run for run in runs if run["size"] == size]
        changes = [run["after"] / run["clean"] - 1 for run in own]
        unguarded = {
            name: statistics.fmean(run["poisoned"][name]["unguarded"] / run["clean"] - 1 for run in own)
            for name in own[0]["poisoned"]
            if all("unguarded" in run["poisoned"].get(name, {}) for run in own)
        }
        message = ", ".join(f"{name} {change:+.1%}" for name, change in unguarded.items()) or "not run"
        clean, mean = statistics.fmean(run["clean"] for run in own), statistics.fmean(changes)
        print(
            f"| {size} | {len(own)} | {clean:.4f} | {mean:+.2%} | {max(changes, key=abs):+.2%} | {message} |"
        )
    settings = list(itertools.product(WINDOWS, SIGMAS, RISES, ("either", "both")))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        rows = pool.map(judge, [(setting, runs) for setting in settings], chunksize=4)
    sizes, names = list(rows[0]["false"]), list(rows[0]["late"])
    print(
        "\nClean runs with a false rollback, of each size; poisoned runs that are found (mean steps late):\n"
    )
    heads = ["window", "sigma", "rises", "figures", *(f"false, {size}" for size in sizes), *names]
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|")
    for setting, row in zip(settings, rows, strict=True):
        cells = [*setting, *row["false"].values()]
        for name in names:
            late = [steps for steps in row["late"][name] if steps is not None]
            behind = f" ({statistics.fmean(late):.1f})" if late else ""
            cells.append(f"{len(late)} of {len(row['late'][name])}{behind}")
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    """Measures, or reports what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--report", metavar="FOLDER", help="of the traces of an earlier measurement")
    parser.add_argument(
        "--out", default="spike_rollback_defaults", help="folder for a JSON file a run: %(default)s"
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--seeds", type=int, default=10, help="%(default)s")
    parser.add_argument("--steps", type=int, default=500, help="%(default)s")
    parser.add_argument("--poisons", nargs="*", default=list(POISONS), choices=list(POISONS))
    parser.add_argument(
        "--unguarded", action="store_true", help="finish poisoned runs without a rollback, too"
    )
    parser.add_argument("--device", default="cpu", help="%(default)s; several processes may share a GPU")
    parser.add_argument("--processes", type=int, default=1, help="of one thread each: %(default)s")
    options = parser.parse_args()
    folder = Path(options.report or options.out)
    if not options.report:
        folder.mkdir(parents=True, exist_ok=True)
        shared = {name: getattr(options, name) for name in ("steps", "poisons", "unguarded", "device", "out")}
        jobs = [
            {"size": size, "seed": seed, **shared}
            for size in sorted(options.sizes, key=list(SIZES).index, reverse=True)  # the longest first
            for seed in range(options.seeds)
        ]
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            for run in pool.imap_unordered(measure, jobs):
                print(
                    f"{run['size']} seed {run['seed']}: {run['clean']:.4f}, {run['seconds']:.0f} s",
                    flush=True,
                )
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-*.json"))]
    report(runs, options.processes)


if __name__ == "__main__":
    main()
