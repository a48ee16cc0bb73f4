"""Pictures in one style, drawn without a display. matplotlib is imported when something is drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from core import durable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of this size in inches, with automatic layout."""
    # not at the top: the import takes half a second, and pyplot would look for a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, grid: bool = True) -> None:
    """Removes the upper and the right edge, and draws a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(alpha=0.25)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean over a twentieth of the points around each, (n,).

    The window is narrower at the beginning, where the loss falls fast, and one-sided at the end.
    """
    index = np.arange(len(values))
    before = np.minimum(len(values) // 40, index // 4)
    after = np.minimum(before, index[::-1])
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + after + 1] - sums[index - before]) / (before + after + 1)


def as_png(figure: Figure) -> bytes:
    """Returns the bytes of a PNG file, the same for the same figure: it does not name the version of matplotlib."""
    target = io.BytesIO()
    canvas = cast("FigureCanvasAgg", figure.canvas)
    canvas.print_png(target, metadata={"Software": None})  # savefig would draw it twice
    return target.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG file completely or not at all. If it cannot be written, a warning is shown and the run continues."""
    try:
        durable.write(path, as_png(figure))
    except OSError as error:
        from lightning.fabric.utilities.rank_zero import rank_zero_warn  # commands draw without torch

        rank_zero_warn(f"{path} could not be written: {error}")
