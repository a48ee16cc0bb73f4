"""Lines about techniques that a run could gain from and does not select."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from core import catalog
from core.contracts import Network
from core.errors import ConfigError
from plugins.cli import preflight
from plugins.cli.selection import describe
from toolkit.selection import AdvisesRuns, Run


def advice(run: Run, network: Network) -> Iterator[str]:
    """Yields what techniques that offer "advice" say, where nothing in the run keeps them from being added.

    Args:
        run: A run that was checked.
        network: Its network, on any device.
    """
    selected = {item.class_path for item in run.selected}
    for entry in catalog.offers("advice", "callbacks"):
        technique = entry.load() if entry.class_path not in selected else None
        if isinstance(technique, AdvisesRuns) and (line := technique.advice(run, network)):
            added = describe(f"trainer.callbacks.{len(run.selected)}", technique, entry.class_path)
            try:
                preflight.check(replace(run, selected=[*run.selected, added]))
            except ConfigError:
                continue
            yield line
