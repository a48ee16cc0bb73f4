"""Draws the learning rate of each schedule over the quickstart, for its page of the docs.

    python -m tests.benchmarks.schedules

Writes docs/pictures/NAME.png, as `python -m core plot-schedule` draws it with the schedule's overlay.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from core import catalog
from core.__main__ import main as core_main
from plugins.commands.docs_page import overlay_name

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def main() -> int:
    """Draws all of them; returns 1 if one cannot be drawn."""
    PICTURES.mkdir(exist_ok=True)
    schedules = [e for e in catalog.entries() if e.kind == "schedules" and e.package == "leyden"]
    for entry in schedules:
        with tempfile.TemporaryDirectory() as folder:
            overlay = f"techniques/{overlay_name(entry.name)}"
            words = ["plot-schedule", "--config", "quickstart", "--config", overlay, "--output", folder]
            if core_main(words):
                return 1
            shutil.copyfile(Path(folder) / "schedule.png", PICTURES / f"{entry.name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
