"""A picture of what was named for which cause."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from toolkit import pictures


def draw(said: Mapping[tuple[str, str], int], path: Path) -> None:
    """Writes a picture of shares: a row for each cause that was injected, a column for each that was named.

    Args:
        said: (cause injected, cause named) -> runs.
        path: Of the PNG file.
    """
    injected = sorted({cause for cause, _ in said})
    others = sorted({named for _, named in said} - set(injected))
    columns = [*injected, *others]
    counts = np.array([[said.get((cause, named), 0) for named in columns] for cause in injected])
    shares = counts / counts.sum(1, keepdims=True)
    figure = pictures.new_figure(3.5 + 0.24 * len(columns), 2.8 + 0.24 * len(injected))
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, column in zip(*np.nonzero(counts), strict=True):
        colour = "white" if shares[row, column] > 0.6 else "black"
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=6, color=colour)
    labels = [cause.replace("_", " ") for cause in columns]
    axes.set_xticks(range(len(columns)), labels, rotation=90, fontsize=7)
    axes.set_yticks(range(len(injected)), labels[: len(injected)], fontsize=7)
    axes.set_xlabel("named first")
    axes.set_ylabel("injected")
    right = sum(count for (cause, named), count in said.items() if cause == named)
    axes.set_title(f"{right} of {counts.sum()} runs with the right cause first", fontsize=9)
    figure.colorbar(image, label="share of the runs with the cause")
    pictures.save(figure, path)
