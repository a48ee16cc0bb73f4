"""Runs every combination beside one process and writes the table of differences into the README.

python -m tests.distributed.table
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.distributed.combinations import COMBINATIONS
from tests.distributed.same_run import TOLERANCE, differences, fit, one_process

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- generated: strategies -->", "<!-- end: strategies -->"
HEAD = ("strategy", "combination", "ranks", "loss", "gradient norm", "weights")


def rows(text: str) -> list[list[str]]:
    """Returns the cells of the written table, without its head."""
    table = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def main() -> int:
    """Writes the table; returns 1 if a difference is above the tolerance."""
    lines, worst = [f"| {' | '.join(HEAD)} |", "| --- |" + " --- |" * (len(HEAD) - 1)], 0.0
    for item in COMBINATIONS:
        apart = differences(fit(item.overlay, item.ranks), one_process(item.config))
        worst = max(worst, *apart.values())
        figures = (f"{value:.0e}" for value in apart.values())
        lines.append(f"| {' | '.join([item.strategy, item.name, str(item.ranks), *figures])} |")
        print(lines[-1], flush=True)
    page = README.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    table = "\n".join(lines)
    README.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
