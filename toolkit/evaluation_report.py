"""The report of evaluations in a run folder: Markdown, and one HTML file with the pictures in it."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core import durable
from core.errors import ConfigError
from toolkit import pictures
from toolkit.evaluation_results import Results, SetResult, read_results
from toolkit.pages import Rows, html_page, html_picture, html_table, markdown_table
from toolkit.resampling import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_rows", "shown", "write_report"]

TITLE = "Evaluation"
NOTE = (
    "In brackets: the interval of 95% by the bootstrap over items (documents, questions). It says how the figure may differ for "
    "other items of the same kind, not for another run; without width it says only that all items agree. Two runs or checkpoints: python -m core compare."
)
STEPS = 8
"""Columns of the table over steps: the last ones."""

EXAMPLES, LONGEST = 3, 400
"""Items that are shown of a set, and characters of a text."""


def shown(found: Interval) -> str:
    """Returns a figure with its interval, as people read it."""
    if math.isnan(found.low):
        return f"{found.value:.4g}"
    return f"{found.value:.4g} [{found.low:.4g}, {found.high:.4g}]"


def write_report(folder: Path, newest: Results) -> None:
    """Writes report.md and report.html into a folder of evaluations, and `steps.png` where there are several steps.

    Args:
        folder: The folder.
        newest: The evaluation that is shown in detail.

    Raises:
        ConfigError: If they cannot be written.
    """
    every = read_results(folder)
    images = {
        f"step-{newest.step:08d}/{name}.png": one.picture for name, one in newest.sets.items() if one.picture
    }
    if len(every) > 1:
        images["steps.png"] = pictures.as_png(draw(every))
    try:
        if "steps.png" in images:
            durable.write(folder / "steps.png", images["steps.png"] or b"")
        durable.write(folder / "report.md", _markdown(newest, every, images))
        durable.write(folder / "report.html", _html(newest, every, images))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {durable.write_error(error)}.") from error


Part = tuple[str, str | Rows]
"""What it is ("heading", "text", "table", "picture"), and its content."""


def _parts(newest: Results, every: Sequence[Results], images: Mapping[str, Any]) -> Iterator[Part]:
    of = f" of {newest.checkpoint}" if newest.checkpoint else ""
    tokens = "" if newest.tokens is None else f", {newest.tokens:,} tokens"
    yield "text", f"Step {newest.step:,}{tokens}{of}."
    yield "table", figure_rows(newest.sets)
    yield "text", NOTE
    if len(every) > 1:
        yield "heading", "Over steps"
        yield "picture", "steps.png"
        yield "table", _steps(every[-STEPS:])
    for name, one in newest.sets.items():
        path = f"step-{newest.step:08d}/{name}.png"
        if one.groups or path in images or any(map(_texts, one.rows[:EXAMPLES])):
            yield "heading", f"{name} ({one.evaluation.rpartition('.')[2]})"
        if one.groups:
            yield "table", _groups(one)
        if path in images:
            yield "picture", path
        if examples := [texts for row in one.rows[:EXAMPLES] if (texts := _texts(row))]:
            names = list(examples[0])
            yield "table", [names, *([texts.get(key, "") for key in names] for texts in examples)]


def figure_rows(sets: Mapping[str, SetResult]) -> Rows:
    """Returns the table of all figures, its header first."""
    rows = [("set", "figure", "value", "items")]
    for name, one in sets.items():
        rows += [(name, figure, shown(found), f"{one.items:,}") for figure, found in one.figures.items()]
    return rows


def _groups(one: SetResult) -> Rows:
    names = list(one.figures)
    rows = [("group", *names)]
    for group, figures in one.groups.items():
        rows.append((group, *(shown(figures[name]) if name in figures else "-" for name in names)))
    return rows


def _columns(every: Sequence[Results]) -> list[tuple[str, str]]:
    found = ((name, figure) for one in every for name, found in one.sets.items() for figure in found.figures)
    return list(dict.fromkeys(found))


def _value(one: Results, name: str, figure: str) -> float:
    found = one.sets.get(name)
    return found.figures[figure].value if found is not None and figure in found.figures else math.nan


def _steps(every: Sequence[Results]) -> Rows:
    rows = [("figure", *(f"step {one.step:,}" for one in every))]
    for name, figure in _columns(every):
        values = (_value(one, name, figure) for one in every)
        cells = ("-" if math.isnan(value) else f"{value:.4g}" for value in values)
        rows.append((f"{name}/{figure}", *cells))
    return rows


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns what is shown of an item: its id and texts."""
    own = {
        name: value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
        for name, value in row.items()
        if isinstance(value, str) and name not in ("id", "digest", "group")
    }
    return {"id": str(row["id"])[:80], **own} if own else {}


def draw(every: Sequence[Results]) -> Figure:
    """Draws each figure over steps, with its interval."""
    columns = _columns(every)
    across = min(3, len(columns))
    down = -(-len(columns) // across)
    figure = pictures.new_figure(3.6 * across, 2.4 * down)
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (name, key) in zip(grid, columns, strict=False):
        known = [one for one in every if not math.isnan(_value(one, name, key))]
        found = [one.sets[name].figures[key] for one in known]
        steps = [one.step for one in known]
        axes.fill_between(
            steps, [one.low for one in found], [one.high for one in found], alpha=0.2, linewidth=0
        )
        axes.plot(steps, [one.value for one in found], marker="o", markersize=3)
        axes.set_title(f"{name}: {key}", fontsize="small", loc="left")
        axes.set_xlabel("optimizer step", fontsize="small")
        axes.ticklabel_format(useOffset=False, style="plain")
        axes.locator_params(axis="x", integer=True, nbins=5)
        axes.tick_params(labelsize="small")
        pictures.tidy(axes)
    for axes in grid[len(columns) :]:
        axes.set_visible(False)
    return figure


def _markdown(newest: Results, every: Sequence[Results], images: Mapping[str, Any]) -> str:
    lines = [f"# {TITLE}"]
    for kind, content in _parts(newest, every, images):
        if isinstance(content, str):
            lines.append(
                {"heading": f"## {content}", "picture": f"![{content}]({content})"}.get(kind, content)
            )
        else:
            lines.append(markdown_table(content))
    return "\n\n".join(lines) + "\n"


def _html(newest: Results, every: Sequence[Results], images: Mapping[str, bytes | None]) -> str:
    parts = []
    for kind, content in _parts(newest, every, images):
        if not isinstance(content, str):
            parts.append(html_table(content))
        elif kind == "picture":
            parts.append(html_picture(images[content] or b"", content))
        else:
            tag = "h2" if kind == "heading" else "p"
            parts.append(f"<{tag}>{html.escape(content)}</{tag}>")
    return html_page(TITLE, parts)
