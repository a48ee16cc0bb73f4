"""Runs every combination beside one process and writes the table of differences into docs/cluster.md.

python -m tests.support.strategy_table
python -m tests.support.strategy_table "8 ranks"    # these rows alone
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.combinations import COMBINATIONS
from tests.support.same_run import TOLERANCE, differences, fit, one_process

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
BEGIN, END = "<!-- generated: strategies -->", "<!-- end: strategies -->"
HEAD = ("strategy", "combination", "ranks", "loss", "gradient norm", "weights")


def rows(text: str) -> list[list[str]]:
    """Returns the cells of the written table, without its head."""
    table = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def main(words: Sequence[str]) -> int:
    """Writes the table; returns 1 if a difference is above the tolerance.

    Args:
        words: Rows that have all of them are measured, the others stay as they are written.
    """
    page = PAGE.read_text(encoding="utf-8")
    written = {tuple(row[:3]): row for row in rows(page)}
    lines, worst = [f"| {' | '.join(HEAD)} |", "| --- |" + " --- |" * (len(HEAD) - 1)], 0.0
    for item in COMBINATIONS:
        key = item.strategy, item.name, str(item.ranks)
        if key in written and not all(word in str(item) for word in words):
            lines.append(f"| {' | '.join(written[key])} |")
            continue
        apart = differences(fit(item.overlay, item.ranks), one_process(item.config))
        worst = max(worst, *apart.values())
        lines.append(f"| {' | '.join([*key, *(f'{value:.0e}' for value in apart.values())])} |")
        print(lines[-1], flush=True)
    before, _, rest = page.partition(BEGIN)
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
