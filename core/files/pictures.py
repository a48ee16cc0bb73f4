"""Pictures in one look, drawn without a display; matplotlib is imported when something is drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, cast

from core.files import durable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of so many inches, whose parts find their places by themselves."""
    # not at the top: the import takes half a second, and pyplot would look for a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, grid: bool = True) -> None:
    """Takes the upper and the right edge away, and lays a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(alpha=0.25)


def as_png(figure: Figure) -> bytes:
    """Returns a PNG file, the same for the same figure: the version of matplotlib is not in it."""
    target = io.BytesIO()
    canvas = cast("FigureCanvasAgg", figure.canvas)
    canvas.print_png(target, metadata={"Software": None})  # savefig would draw it twice
    return target.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG file, whole or not at all; that it cannot be written is no reason to lose a run."""
    try:
        durable.write(path, as_png(figure))
    except OSError as error:
        from lightning.fabric.utilities.rank_zero import rank_zero_warn  # commands draw without torch

        rank_zero_warn(f"{path} could not be written: {error}")
