"""The command `compare`: the curves of several runs in one picture, their results, and what differed."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.yaml_texts import read_yaml
from plugins.commands.compare_evaluations import compared, evaluated, is_step
from plugins.commands.compare_evaluations import draw as draw_evaluations
from plugins.commands.compare_report import (
    NOTE,
    Curve,
    Curves,
    Evaluations,
    Rows,
    Run,
    as_html,
    as_markdown,
    draw_png,
)
from plugins.commands.config import Flat, differing, flatten, read_all, short, technique_cells, value_cells
from plugins.commands.plugins_terminal import print_table, write
from plugins.commands.run_folders import require_run
from toolkit import pictures
from toolkit.bounded import MOST_TABLE_BYTES


@technique(paper="loss over tokens and over time, as scaling studies show them: arXiv:2001.08361, figure 2")
def compare(arguments: list[str]) -> int:
    """Compares runs: curves over tokens and time, losses, speed, memory, evaluations, and what differed in their configs.

    Writes compare.md, compare.png and compare.html, which holds the pictures and needs no other file. Where all runs have
    evaluations (the callback Evaluate, or the command `evaluate`), the newest of each are tested against those of the first run, and
    evaluations.png shows them with their intervals. Folders of single steps, RUN/evaluation/step-..., compare two checkpoints.

    Example:
        python -m core compare runs/quickstart runs/quickstart-2 --output runs/compare
        python -m core compare runs/a/evaluation/step-00001000 runs/a/evaluation/step-00002000
    """
    parser = Parser(prog="python -m core compare", description=compare.__doc__)
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", help="a run folder with a metrics.csv, or a step"
    )
    parser.add_argument("--output", metavar="DIR", default="runs/compare", help="where to write: %(default)s")
    options = parser.parse_args(arguments)
    folder = Path(options.output)
    _check_given_once(options.run_dirs)
    steps = all(is_step(Path(name)) for name in options.run_dirs)
    runs = [] if steps else read_runs(options.run_dirs)
    curves = Curves(result_rows(runs), difference_rows(runs), _notes(runs), draw_png(runs)) if runs else None
    evaluations = _evaluations(options.run_dirs, runs)
    files = {"compare.md": as_markdown(curves, evaluations).encode()}
    files["compare.html"] = as_html(curves, evaluations).encode()
    if curves:
        files["compare.png"] = curves.picture
        _print(curves.results, curves.differences, curves.notes)
    if evaluations:
        files["evaluations.png"] = evaluations.picture
        _print(evaluations.rows, [], " ".join(evaluations.notes))
    for name, content in files.items():
        write(folder / name, content)
    print(f"Written: {folder}/{', '.join(sorted(files))}")
    return 0


def _print(rows: Rows, differences: Rows, notes: str) -> None:
    print_table(rows)
    if len(differences) > 1:
        print()
        print_table([tuple(map(_cut, row)) for row in differences])
    print(f"\n{textwrap.fill(notes, 110)}\n")


def _check_given_once(names: Sequence[str]) -> None:
    if len({Path(name).resolve() for name in names}) < len(names):
        raise ConfigError(f"A run is given twice: {' '.join(names)}. Name each once.")


def _evaluations(names: Sequence[str], runs: Sequence[Run]) -> Evaluations | None:
    """Returns the evaluations of several runs, or of several steps; None where they have none in common."""
    paths = [Path(name).resolve() for name in names]
    labels = [run.name for run in runs] or [f"{path.parents[1].name}/{path.name}" for path in paths]
    found = [evaluated(path, label) for path, label in zip(paths, labels, strict=True)]
    known = [one for one in found if one is not None]
    if len(known) < len(found) or len(known) < 2:
        return None
    rows, notes = compared(known)
    return Evaluations(rows, notes, pictures.as_png(draw_evaluations(known, rows))) if rows else None


def _cut(cell: str) -> str:
    return cell if len(cell) <= 40 else f"{cell[:37]}..."


def _notes(runs: Sequence[Run]) -> str:
    without = ", ".join(run.name for run in runs if not run.timed)
    if not without:
        return NOTE
    return f"{NOTE} No times, which the callback Throughput logs from the second logged step on: {without}."


def read_runs(names: Sequence[str]) -> list[Run]:
    """Reads what the runs logged and how they were configured.

    Raises:
        ConfigError: If a folder is not there, or has no training loss in a metrics.csv.
    """
    paths = [Path(name) for name in names]
    tables = [_columns(path) for path in paths]
    flats = [flatten(values) for values in read_all(names)]
    labels = [path.resolve().name for path in paths]
    labels = [
        str(path) if labels.count(label) > 1 else label for path, label in zip(paths, labels, strict=True)
    ]
    return [_run(*parts) for parts in zip(labels, tables, flats, strict=True)]


def _columns(folder: Path) -> dict[str, np.ndarray]:
    """Returns the columns of a run's metrics.csv; NaN where a figure was not logged."""
    path = folder / "metrics.csv"
    require_run(folder)
    if not path.is_file():
        raise ConfigError(f"{folder} has no metrics.csv: {_why_none(folder)}")
    if path.stat().st_size > MOST_TABLE_BYTES:
        raise ConfigError(
            f"{path} has more than {MOST_TABLE_BYTES:,} bytes: it is not as MetricsCSV writes it."
        )
    try:
        text = path.read_text(encoding="utf-8")
        # a killed run may end in mid-line
        rows = list(csv.DictReader(text[: text.rfind("\n") + 1].split("\n")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not as MetricsCSV writes it: {error}.") from error
    if not any(row.get("train/loss") and row.get("train/tokens") for row in rows):
        raise ConfigError(
            f"{path} holds no train/loss: the run ended before its first logged step.{_steps(folder)}"
        )
    try:
        columns = {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}
        _check_steps(columns)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not as MetricsCSV writes it: {error}.") from None
    return columns


def _check_steps(columns: Mapping[str, np.ndarray]) -> None:
    """Raises a ValueError where steps or tokens cannot be those of a run."""
    trained = np.isfinite(columns["train/tokens"]) & np.isfinite(columns["train/loss"])
    steps, tokens = columns["step"], columns["train/tokens"][trained]
    if not trained.any():
        raise ValueError("no row has both train/loss and train/tokens")
    if not (np.isfinite(steps) & (steps >= 0)).all() or not (np.diff(steps) >= 0).all():
        raise ValueError("its steps do not rise")
    if tokens[0] < 0 or not (np.diff(tokens) >= 0).all() or not tokens[-1] > 0:
        raise ValueError("its train/tokens do not rise")


def _why_none(folder: Path) -> str:
    config = folder / "config.yaml"
    if config.is_file() and "MetricsCSV" in config.read_text(encoding="utf-8", errors="replace"):
        return f"the run ended before its first logged step.{_steps(folder)}"
    return "add the logger MetricsCSV to the run (trainer.logger)."


def _steps(folder: Path) -> str:
    """Returns how often a run logs and what to do about it; nothing if its config does not say."""
    path = folder / "config.yaml"
    values = read_yaml(path)[0] if path.is_file() else {}
    trainer = values.get("trainer")
    if not isinstance(trainer, Mapping) or not (every := trainer.get("log_every_n_steps")):
        return ""
    return (
        f"\nIts log_every_n_steps is {every} and its max_steps {trainer.get('max_steps')}: "
        f"train for longer, or with a smaller --trainer.log_every_n_steps."
    )


def _run(name: str, columns: dict[str, np.ndarray], config: Flat) -> Run:
    empty = np.full(len(columns["step"]), np.nan)
    trained = np.isfinite(columns["train/tokens"])
    steps, tokens = columns["step"][trained], columns["train/tokens"][trained]
    seconds = seconds_at(steps, columns.get("throughput/step_time_ms", empty)[trained])
    validation = columns.get("val/loss", empty)
    at = columns["step"][np.isfinite(validation)]
    rates = columns.get("throughput/tokens_per_second", empty)
    memory = columns.get("throughput/peak_memory_gib", empty)
    return Run(
        name,
        Curve(steps, tokens, seconds, columns["train/loss"][trained]),
        Curve(
            at, _between(at, steps, tokens), _between(at, steps, seconds), validation[np.isfinite(validation)]
        ),
        float(np.median(rates[np.isfinite(rates)])) if np.isfinite(rates).any() else np.nan,
        float(np.fmax.reduce(memory)),
        config,
    )


def seconds_at(steps: np.ndarray, step_time_ms: np.ndarray) -> np.ndarray:
    """Returns the time that training has taken by each logged step, (n,).

    Args:
        steps: Logged steps, (n,).
        step_time_ms: Mean time of the steps since the logged one before, (n,). It is not known (NaN)
            after a start, when warm-up would be measured: the nearest known one is used.
    """
    known = np.flatnonzero(np.isfinite(step_time_ms))
    if not len(known):
        return np.full(len(steps), np.nan)
    following = np.searchsorted(known, np.arange(len(steps))).clip(max=len(known) - 1)
    return np.cumsum(step_time_ms[known[following]] / 1e3 * np.diff(steps, prepend=0))


def _between(at: np.ndarray, steps: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """Interpolates an amount that starts at 0 and continues after the last logged step as on average."""
    end = max(at.max(initial=0), steps[-1] + 1)
    return np.interp(at, [0, *steps, end], [0, *amounts, amounts[-1] / steps[-1] * end])


def result_rows(runs: Sequence[Run]) -> Rows:
    """Returns the table of results, its header first."""
    header = (
        "run",
        "steps",
        "tokens",
        "train loss",
        "val loss",
        "lowest val loss",
        "tokens/s",
        "memory",
        "time",
    )
    rows: Rows = [header]
    for run in runs:
        train, val = run.training, run.validation
        last = train.tokens > 0.9 * train.tokens[-1]
        loss = np.average(train.losses[last], weights=np.diff(train.tokens, prepend=0)[last])
        best = int(np.argmin(val.losses)) if len(val.losses) else 0
        lowest = f"{val.losses[best]:.4f} (step {val.steps[best]:,.0f})" if len(val.losses) else "-"
        rows.append(
            (
                run.name,
                f"{train.steps[-1]:,.0f}",
                f"{train.tokens[-1]:,.0f}",
                f"{loss:.4f}",
                f"{val.losses[-1]:.4f}" if len(val.losses) else "-",
                lowest,
                _known(run.tokens_per_second, lambda rate: f"{rate:,.0f}"),
                _known(run.peak_memory_gib, lambda gib: f"{gib:,.2f} GiB"),
                _known(train.seconds[-1], lambda time: str(timedelta(seconds=round(time)))),
            )
        )
    return rows


def _known(value: float, shown: Any) -> str:
    return shown(value) if np.isfinite(value) else "-"


def difference_rows(runs: Sequence[Run]) -> Rows:
    """Returns the table of what is not the same in all configurations, techniques first, its header first."""
    flats = [run.config for run in runs]
    techniques, values = differing(flats)
    rows = [
        (key, *(cell.removeprefix(short(key)) or "yes" for cell in technique_cells(flats, key)))
        for key in techniques
    ]
    rows += [(key, *value_cells(flats, key)) for key in values if key != "trainer.default_root_dir"]
    return [("", *(run.name for run in runs)), *rows]
