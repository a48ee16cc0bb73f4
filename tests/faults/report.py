"""Judges recorded runs: which cause is named, when, and what its remedy brings."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.faults import confusion
from toolkit.diagnosis import Case, Finding, History, diagnose, read_history
from toolkit.diagnosis.report import read_config

LEAST_CONFIDENCE = 0.6
"""As TrainingDoctor's default."""

WITHIN = 0.01
"""How far the loss with a remedy may be above that of the clean run."""


class Verdict(NamedTuple):
    """What is said of a run.

    Attributes:
        first: The finding that is named first at the end; None: nothing is found.
        steps: Cause -> the step in which it was named first for good.
        causes: All causes at the end.
    """

    first: Finding | None
    steps: dict[str, int]
    causes: tuple[str, ...]


def judged(folder: Path) -> Verdict:
    """Goes through a run step by step, as the callback does."""
    whole, config = read_history(folder / "metrics.csv"), read_config(folder)
    all_steps = sorted({int(step) for name in whole.names() for step in whole.series(name).steps})
    columns = {name: whole.series(name) for name in whole.names()}
    history, since = History(), {}
    found: list[Finding] = []
    for step in all_steps:
        at = {
            name: float(s.values[i])
            for name, s in columns.items()
            if (i := _index(s.steps, step)) is not None
        }
        history.add(step, at)
        found = [one for one in diagnose(Case(history, config)) if one.confidence >= LEAST_CONFIDENCE]
        cause = found[0].cause if found else None
        since = {cause: since.get(cause, step)} if cause else {}
    return Verdict(found[0] if found else None, since, tuple(one.cause for one in found))


def _index(steps: np.ndarray, step: int) -> int | None:
    at = int(np.searchsorted(steps, step))
    return at if at < len(steps) and steps[at] == step else None


def final_loss(folder: Path) -> float:
    """Returns the last validation loss of a run."""
    if not (folder / "metrics.csv").is_file():
        return float("nan")
    values = read_history(folder / "metrics.csv").series("val/loss").values
    return float(values[-1]) if len(values) else float("nan")


def write(options: Any, runs: list[Any], folder_of: Any, configuration: Any) -> None:
    """Prints the tables."""
    rows: dict[tuple[bool, str, str], list[Any]] = {}
    said: Counter[tuple[str, str]] = Counter()
    alarms = clean = 0
    silent = [folder for one in runs if (folder := folder_of(options.out, *one)) and _is_silent(folder)]
    for fault, name, seed in runs:
        folder = folder_of(options.out, fault, name, seed)
        if not (folder / "done").exists() or _is_silent(folder):
            continue
        verdict = judged(folder)
        cause = verdict.first.cause if verdict.first else "nothing"
        if fault is None:
            clean += 1
            alarms += verdict.first is not None
            if verdict.first:
                print(f"ALARM {name} {seed}: {verdict.first.line()}")
            continue
        wanted = cause if cause in fault.also else fault.cause
        said[wanted, cause] += 1
        delay = verdict.steps.get(wanted, np.inf) - fault.onset + 1
        healed = _healed(options, fault, name, seed, verdict, folder_of, configuration)
        rows.setdefault((fault.held_out, fault.name, fault.cause), []).append(
            (cause == wanted, delay, healed)
        )
        if options.detail and cause != wanted:
            line = verdict.first.line() if verdict.first else "nothing"
            print(f"WRONG {fault.name} [{name} {seed}] wants {fault.cause}: {line} {verdict.causes}")
        elif options.detail and healed is False:
            print(
                f"NOT HEALED {fault.name} [{name} {seed}]: {_losses(options, fault, name, seed, folder_of)}"
            )
    for (held_out, fault_name, cause), found in rows.items():
        right = sum(ok for ok, _, _ in found)
        delays = [delay for ok, delay, _ in found if ok]
        healed = [one for _, _, one in found if one is not None]
        print(
            f"| {'held out' if held_out else 'tuned'} | {fault_name} | {cause} | {right}/{len(found)} | "
            f"{statistics.median(delays) if delays else '-'} | {sum(healed)}/{len(healed)} |"
        )
    for held_out in (False, True):
        every = [one for key, found in rows.items() if key[0] == held_out for one in found]
        if every:
            right = sum(ok for ok, _, _ in every)
            healed = [one for _, _, one in every if one is not None]
            delay = statistics.median(delay if ok else np.inf for ok, delay, _ in every)
            print(
                f"{'held out' if held_out else 'tuned'}: right cause first {right}/{len(every)} = {right / len(every):.1%}; "
                f"median {delay} steps; remedy within 1%: {sum(healed)}/{len(healed)}"
                + (f" = {sum(healed) / len(healed):.1%}" if healed else "")
            )
    if options.picture and said:
        confusion.draw(said, options.picture)
    print(f"clean: {alarms} alarms in {clean} runs")
    print(f"left out, as an error ended them before a figure was logged: {len(silent)}", *silent, sep="\n  ")


def _is_silent(folder: Path) -> bool:
    """Returns whether a run is over and has no figures to be judged by."""
    return (folder / "done").exists() and not (folder / "metrics.csv").is_file()


def _losses(options: Any, fault: Any, name: str, seed: int, folder_of: Any) -> tuple[float, float, float]:
    folder = folder_of(options.out, fault, name, seed)
    clean = folder_of(options.out, None, name, seed)
    return final_loss(clean), final_loss(folder), final_loss(folder.with_name(f"{folder.name}-remedied"))


def _healed(
    options: Any, fault: Any, name: str, seed: int, verdict: Verdict, folder_of: Any, configuration: Any
) -> bool | None:
    """Returns whether the remedy of the first finding brings the loss of the clean run; None: not run yet."""
    clean, _, remedied = _losses(options, fault, name, seed, folder_of)
    if not np.isfinite(clean):
        return None
    if verdict.first is None or not verdict.first.remedy:
        return False
    values = configuration(fault, name, seed, options.out, dict(verdict.first.remedy))
    if values == configuration(None, name, seed, options.out):
        return True
    again = folder_of(options.out, fault, name, seed)
    again = again.with_name(f"{again.name}-remedied")
    if not (again / "done").exists() or read_config(again) != values:
        return None
    return bool(remedied <= (1 + WITHIN) * clean)
