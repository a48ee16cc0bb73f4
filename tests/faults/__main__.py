"""Runs the fault kit, and prints how well faults are diagnosed.

    python -m tests.faults run --out FOLDER        # every fault in every recipe with 5 seeds, and clean runs
    python -m tests.faults run --out FOLDER --half clean --seeds $(seq 0 33)
    python -m tests.faults remedy --out FOLDER     # each fault again, with the remedy of its first finding
    python -m tests.faults report --out FOLDER --half held-out
    python -m tests.faults run --out FOLDER --half unseen        # further faults, also over two ranks and of resumed runs
    python -m tests.faults run --out FOLDER --half second-unseen
    python -m tests.faults run --out FOLDER --half third-unseen
    python -m tests.faults run --out FOLDER --half fourth-unseen
    python -m tests.faults run --out FOLDER --half fifth-unseen
    python -m tests.faults run --out FOLDER --half silent-errors  # those of reports that TrainCheck was evaluated on
    python -m tests.faults run --out FOLDER --half sixth-unseen
    python -m tests.faults run --out FOLDER --half seventh-unseen
    python -m tests.faults run --out FOLDER --half eighth-unseen
    python -m tests.faults run --out FOLDER --half harmless       # clean runs with parts of others
    python -m tests.faults run --out FOLDER --half clean --recipes gpt-2-ranks gpt-resumed

What a run has recorded is kept: a stopped kit goes on where it was, and rules are judged again without a run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.faults import report
from tests.faults.blind import BLIND
from tests.faults.catalogue import FAULTS, Fault
from tests.faults.eighth_unseen import EIGHTH_UNSEEN
from tests.faults.fifth_unseen import FIFTH_UNSEEN
from tests.faults.fourth_unseen import FOURTH_UNSEEN
from tests.faults.harmless import HARMLESS
from tests.faults.recipes import RECIPES, VARIANTS, recipe
from tests.faults.running import composed, train
from tests.faults.second_unseen import SECOND_UNSEEN
from tests.faults.seventh_unseen import SEVENTH_UNSEEN
from tests.faults.silent_errors import SILENT_ERRORS
from tests.faults.sixth_unseen import SIXTH_UNSEEN
from tests.faults.third_unseen import THIRD_UNSEEN
from tests.faults.unseen import UNSEEN

SETS = {
    "blind": BLIND,
    "unseen": UNSEEN,
    "second-unseen": SECOND_UNSEEN,
    "third-unseen": THIRD_UNSEEN,
    "fourth-unseen": FOURTH_UNSEEN,
    "fifth-unseen": FIFTH_UNSEEN,
    "silent-errors": SILENT_ERRORS,
    "sixth-unseen": SIXTH_UNSEEN,
    "seventh-unseen": SEVENTH_UNSEEN,
    "eighth-unseen": EIGHTH_UNSEEN,
    "harmless": HARMLESS,
}
"""Faults beside those of the catalogue."""


def folder_of(out: Path, fault: Fault | None, name: str, seed: int) -> Path:
    """Returns the run folder of a fault, or of a clean run."""
    return out / (fault.name.replace(" ", "-").replace("/", "by-") if fault else "clean") / f"{name}-{seed}"


def chosen(options: argparse.Namespace) -> Iterator[tuple[Fault | None, str, int]]:
    """Yields fault, recipe and seed of each run; None: a clean one."""
    for seed in options.seeds:
        for fault in SETS.get(options.half, FAULTS):
            wanted = options.half in ("all", *SETS, "held-out" if fault.held_out else "tuned")
            if wanted and (not options.only or any(word in fault.name for word in options.only)):
                for name in options.recipes or (*RECIPES, *VARIANTS):
                    if name in fault.overlays:
                        yield fault, name, seed
    if options.half in ("all", "clean") and not options.only:
        for seed in options.seeds:
            for name in options.recipes or RECIPES:
                yield None, name, seed


def configuration(
    fault: Fault | None, name: str, seed: int, work: Path, *more: dict[str, Any]
) -> dict[str, Any]:
    """Returns the configuration of a run."""
    values = composed(recipe(name, work, seed), fault.overlays[name] if fault else {}, *more)
    found: dict[str, Any] = yaml.safe_load(yaml.safe_dump(values).replace("FOLDER", str(work)))
    return found


def record(values: dict[str, Any], folder: Path) -> None:
    """Trains, and keeps what was logged; an error that ends the run is kept, too."""
    config = folder / "config.yaml"
    if (folder / "done").exists() and yaml.safe_load(config.read_text(encoding="utf-8")) == values:
        return
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    try:
        train(values, folder)
    except Exception:
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        print(f"{folder}: {traceback.format_exc().splitlines()[-1]}", file=sys.stderr)
    (folder / "done").write_text(f"{time.perf_counter() - began:.2f} s\n", encoding="utf-8")


def run(options: argparse.Namespace) -> None:
    """Records the chosen runs, until the time is over."""
    until = time.monotonic() + options.minutes * 60
    for fault, name, seed in chosen(options):
        if time.monotonic() > until:
            print("The time is over; the rest is left.")
            return
        record(configuration(fault, name, seed, options.out), folder_of(options.out, fault, name, seed))


def remedy(options: argparse.Namespace) -> None:
    """Records each run with the remedy of its first finding."""
    until = time.monotonic() + options.minutes * 60
    for fault, name, seed in chosen(options):
        if fault is None:
            continue
        if time.monotonic() > until:
            print("The time is over; the rest is left.")
            return
        folder = folder_of(options.out, fault, name, seed)
        first = report.judged(folder).first
        if first is None or not first.remedy:
            continue
        values = configuration(fault, name, seed, options.out, dict(first.remedy))
        if values == configuration(None, name, seed, options.out):
            continue  # the clean run
        again = folder.with_name(f"{folder.name}-remedied")
        record(values, again)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("run", "remedy", "report"))
    parser.add_argument("--out", type=Path, required=True, help="where runs are recorded")
    parser.add_argument("--half", choices=("all", "tuned", "held-out", *SETS, "clean"), default="all")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=(*RECIPES, *VARIANTS),
        help="default: all in which a fault is; of clean runs those of one process",
    )
    parser.add_argument("--only", nargs="+", default=(), help="parts of names of faults")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further run is begun")
    parser.add_argument("--detail", action="store_true", help="report: a line for each run")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="report: what was named for which cause, as a PNG"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.action == "report":
        report.write(options, list(chosen(options)), folder_of, configuration)
    else:
        {"run": run, "remedy": remedy}[options.action](options)


if __name__ == "__main__":
    main()
