"""Evaluations of several runs or checkpoints side by side, with a test whether they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core import catalog
from core.errors import ConfigError
from toolkit import pictures
from toolkit.evaluation_report import shown
from toolkit.evaluation_results import FOLDER, RESULTS, Results, read_items, read_results
from toolkit.resampling import Difference, adjusted, difference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVEL = 0.05
"""Below this adjusted p-value two networks differ."""

NOTHING, FEW = "no difference", "too few items"
NOTE = (
    "Differences are those to the first column, with their interval of 95% (bootstrap over items). The p-values are of a "
    "permutation test over items, in pairs where both have the same ones, and are adjusted for the {count} comparisons of this "
    "table together (Holm): if nothing differs, the table says so in 95% of cases. "
    '"no difference" means that these items do not show one. Items are resampled, not runs: another seed of the same training '
    "may differ by more."
)


@dataclass(frozen=True)
class Evaluated:
    """Evaluations that are compared.

    Attributes:
        label: Of the run or checkpoint.
        folder: The folder of evaluations.
        results: Of its newest step, or of the one that was named.
    """

    label: str
    folder: Path
    results: Results


def is_step(folder: Path) -> bool:
    """Returns whether a folder is that of one step, such as runs/a/evaluation/step-00001000."""
    return (folder / RESULTS).is_file()


def evaluated(folder: Path, label: str) -> Evaluated | None:
    """Returns the evaluations of a step's folder, or the newest of a run folder; None: there are none."""
    if is_step(folder):
        every = read_results(folder.resolve().parent)
        own = [one for one in every if f"step-{one.step:08d}" == folder.resolve().name]
        if not own:
            raise ConfigError(f"{folder}: its results are not those of the step that it is named after.")
        return Evaluated(label, folder.resolve().parent, own[0])
    every = read_results(folder / FOLDER)
    return Evaluated(label, folder / FOLDER, every[-1]) if every else None


def compared(runs: Sequence[Evaluated]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns the table of what all have, its header first, and notes; empty where there is nothing in common.

    Raises:
        ConfigError: If what is stored is damaged.
    """
    first, *others = runs
    names = [name for name in first.results.sets if all(name in one.results.sets for one in others)]
    rows: list[tuple[str, str, list[Difference | None]]] = []
    notes = []
    for name in names:
        found, said = _differences(runs, name)
        notes += said
        for figure in first.results.sets[name].figures:
            if all(figure in one.results.sets[name].figures for one in others):
                rows.append((name, figure, [one.get(figure) for one in found]))
    if not rows:
        return [], notes
    tests = [one.p_value for _, _, found in rows for one in found if one is not None]
    corrected = iter(adjusted(tests))
    header = ["set", "figure", *(f"{one.label} (step {one.results.step:,})" for one in runs)]
    for one in others:
        header += [f"{one.label} - {first.label}", "p (adjusted)", "verdict"]
    table = [tuple(header)]
    for name, figure, gaps in rows:
        cells = [name, figure, *(shown(one.results.sets[name].figures[figure]) for one in runs)]
        for gap in gaps:
            cells += ["-", "-", "-"] if gap is None else _cells(gap, next(corrected), len(tests))
        table.append(tuple(cells))
    if len({one.results.tokenizer for one in runs}) > 1:
        notes.append("Tokenizers differ: figures per token do not compare, bits_per_byte does.")
    return table, [NOTE.format(count=len(tests)), *notes]


def _cells(gap: Difference, p_value: float, count: int) -> list[str]:
    verdict = NOTHING if p_value >= LEVEL else "higher" if gap.second > gap.first else "lower"
    if gap.least * count >= LEVEL and gap.p_value < 1:
        verdict = FEW
    limits = "" if math.isnan(gap.low) else f" [{gap.low:+.3g}, {gap.high:+.3g}]"
    return [f"{gap.second - gap.first:+.4g}{limits}", f"{p_value:.3f}", verdict]


def _differences(runs: Sequence[Evaluated], name: str) -> tuple[list[Mapping[str, Difference]], list[str]]:
    """Returns how each run but the first differs from it in the figures of a set, and notes."""
    first, *others = runs
    kinds = {one.results.sets[name].evaluation for one in runs}
    entry = catalog.by_class_path(next(iter(kinds)))
    if len(kinds) > 1 or entry is None:
        why = "they are different evaluations" if len(kinds) > 1 else f"{next(iter(kinds))} is not installed"
        return [{}] * len(others), [f"{name} is not tested: {why}."]
    figures = entry.load().figures
    own = {_key(row): row["sums"] for row in read_items(first.folder, first.results.step, name)}
    found: list[Mapping[str, Difference]] = []
    notes = []
    for one in others:
        theirs = {_key(row): row["sums"] for row in read_items(one.folder, one.results.step, name)}
        both = [key for key in own if key in theirs]
        if both:
            pairs = [own[key] for key in both], [theirs[key] for key in both]
            found.append(difference(*pairs, figures, paired=True))
            if len(both) < max(len(own), len(theirs)):
                notes.append(f"{name}: {one.label} is compared over the {len(both):,} items that both have.")
        else:
            found.append(difference(list(own.values()), list(theirs.values()), figures, paired=False))
            notes.append(
                f"{name}: {one.label} has other items: they are compared without pairs, which tells less."
            )
    return found, notes


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["id"]), str(row["digest"])


def draw(runs: Sequence[Evaluated], rows: Sequence[tuple[str, ...]]) -> Figure:
    """Draws each figure of a table of :func:`compared` with the interval of each run."""
    wanted = [(row[0], row[1]) for row in rows[1:]]
    across = min(3, len(wanted))
    down = -(-len(wanted) // across)
    figure = pictures.new_figure(3.8 * across, 0.7 + (0.6 + 0.3 * len(runs)) * down)
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (name, key) in zip(grid, wanted, strict=False):
        for place, one in enumerate(runs):
            found = one.results.sets[name].figures[key]
            if not math.isnan(found.low):
                axes.plot([found.low, found.high], [place, place], color=f"C{place % 10}", linewidth=2)
            axes.plot([found.value], [place], color=f"C{place % 10}", marker="o")
        axes.set_yticks(range(len(runs)), [one.label for one in runs], fontsize="small")
        axes.set_ylim(len(runs) - 0.5, -0.5)
        axes.set_title(f"{name}: {key}", fontsize="small", loc="left")
        axes.tick_params(labelsize="small")
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.locator_params(axis="x", nbins=5)
        pictures.tidy(axes)
    for axes in grid[len(wanted) :]:
        axes.set_visible(False)
    return figure
