"""What `compare` writes: the picture, the Markdown and the HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plugins.commands.config import Flat
from toolkit import pages, pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOTE = (
    "Losses are in nats per token; the training loss is the mean over the last tenth of the tokens, tokens/s "
    "the median over the logged intervals. Memory is the peak in the process of rank 0: its GPU's or, on a CPU, "
    "RAM. Time is that of the training steps, without validation, checkpoints and sampling. In the picture, light "
    "lines are as logged, dark ones their mean over a twentieth of the run; the first 2% of a run may lie above "
    "its edge."
)
NOTHING = "Nothing."
Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Curve:
    """A loss as it was logged.

    Attributes:
        steps: Optimizer steps done, (n,).
        tokens: Label tokens seen by then, (n,).
        seconds: Time spent on training steps by then, (n,); NaN where the run did not measure it.
        losses: Nats per token, (n,).
    """

    steps: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    losses: np.ndarray


@dataclass(frozen=True)
class Run:
    """What is compared of a run."""

    name: str
    training: Curve
    validation: Curve
    tokens_per_second: float
    peak_memory_gib: float
    config: Flat

    @property
    def timed(self) -> bool:
        """Whether the run measured the time of its steps."""
        return bool(np.isfinite(self.training.seconds).any())


def draw(runs: Sequence[Run]) -> Figure:
    """Draws training above validation loss, over tokens and, where a run measured it, over time."""
    slowest = max((run.training.seconds[-1] for run in runs if run.timed), default=0.0)
    unit, divisor = ("h", 3600) if slowest > 3 * 3600 else ("min", 60) if slowest > 300 else ("s", 1)
    columns = [("tokens", "label tokens seen", 1)]
    if slowest:
        columns.append(("seconds", f"training time ({unit})", divisor))
    kinds = ["training", "validation"] if any(len(run.validation.losses) for run in runs) else ["training"]
    figure = pictures.new_figure(5.6 * len(columns), 0.6 + 3.6 * len(kinds))
    grid = figure.subplots(len(kinds), len(columns), sharex="col", sharey="row", squeeze=False)
    for row, kind in zip(grid, kinds, strict=True):
        for axes, (abscissa, label, divide_by) in zip(row, columns, strict=True):
            for index, run in enumerate(runs):
                curve = getattr(run, kind)
                _plot(axes, getattr(curve, abscissa) / divide_by, curve.losses, index, _label(run))
            _style(axes, label)
        row[0].set_ylabel(f"{kind} loss (nats per token)")
    _cut_beginning(grid[0][0], [run.training for run in runs])
    handles, labels = grid[0][0].get_legend_handles_labels()
    title = "run (last validation loss)" if len(kinds) == 2 else None
    look: dict[str, Any] = {"frameon": False, "title": title, "alignment": "left", "ncols": 2 * len(columns)}
    figure.legend(handles, labels, loc="outside upper left", **look)
    return figure


def _label(run: Run) -> str:
    last = run.validation.losses[-1:]
    return f"{run.name} ({last[0]:.3f})" if len(last) else run.name


def _plot(axes: Axes, x: np.ndarray, losses: np.ndarray, index: int, label: str) -> None:
    look: dict[str, Any] = {"color": f"C{index % 10}", "linestyle": ("-", "--", ":", "-.")[index // 10 % 4]}
    x, losses = x[np.isfinite(losses)], losses[np.isfinite(losses)]
    if len(losses) >= 40:
        axes.plot(x, losses, alpha=0.25, linewidth=0.6, **look)
        losses = pictures.running_mean(losses)
    axes.plot(x, losses, linewidth=1.5, label=label, marker="o" if len(x) < 30 else "", markersize=3, **look)


def _cut_beginning(axes: Axes, curves: Sequence[Curve]) -> None:
    """Lets the vertical axis end at the highest loss after the first 2% of each run."""
    later = [curve.losses[curve.tokens >= 0.02 * curve.tokens[-1]] for curve in curves]
    losses = np.concatenate(later)
    losses = losses[np.isfinite(losses)]
    if len(losses) and losses.max() > losses.min():
        margin = 0.03 * (losses.max() - losses.min())
        axes.set_ylim(losses.min() - margin, losses.max() + margin)


def _style(axes: Axes, label: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(label)
    axes.label_outer()
    pictures.tidy(axes)
    if "tokens" in label:
        axes.xaxis.set_major_formatter(EngFormatter())


def draw_png(runs: Sequence[Run]) -> bytes:
    """Returns the picture of :func:`draw` as a PNG file."""
    return pictures.as_png(draw(runs))


@dataclass(frozen=True)
class Curves:
    """What is shown of training: the tables of results and of differences in configurations, notes, and the picture."""

    results: Rows
    differences: Rows
    notes: str
    picture: bytes


@dataclass(frozen=True)
class Evaluations:
    """The table of evaluations, what to know of it, and its picture."""

    rows: Rows
    notes: Sequence[str]
    picture: bytes


def as_markdown(curves: Curves | None, evaluations: Evaluations | None) -> str:
    """Returns the comparison as Markdown, with the pictures beside it."""
    parts = ["# Comparison of runs"]
    if curves:
        parts += ["![Loss curves](compare.png)", pages.markdown_table(curves.results), curves.notes]
    if evaluations:
        table = pages.markdown_table(evaluations.rows)
        parts += ["## Evaluations", "![Evaluations](evaluations.png)", table, *evaluations.notes]
    if curves:
        rows = curves.differences
        parts += [
            "## What differs in the configurations",
            pages.markdown_table(rows) if len(rows) > 1 else NOTHING,
        ]
    return "\n\n".join(parts) + "\n"


def as_html(curves: Curves | None, evaluations: Evaluations | None) -> str:
    """Returns the comparison as one HTML file, the pictures inside."""
    parts = []
    if curves:
        parts += [pages.html_picture(curves.picture, "Loss curves"), pages.html_table(curves.results)]
        parts += [f"<p>{html.escape(curves.notes)}</p>"]
    if evaluations:
        parts += ["<h2>Evaluations</h2>", pages.html_picture(evaluations.picture, "Evaluations")]
        parts += [
            pages.html_table(evaluations.rows),
            *(f"<p>{html.escape(one)}</p>" for one in evaluations.notes),
        ]
    if curves:
        rows = curves.differences
        parts += ["<h2>What differs in the configurations</h2>"]
        parts += [pages.html_table(rows) if len(rows) > 1 else f"<p>{NOTHING}</p>"]
    return pages.html_page("Comparison of runs", parts)
