"""Which techniques run together: trains every pair and writes the tables of configs/README.md.

    python -m tests.conformance.compatibility

Pairs are each callback with each other callback, strategy and precision that a CPU can run. A pair works if a
tiny model trains a few steps with finite losses; it is refused if preflight says why; all else is a bug.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core import catalog
from core.configuration.config_files import merge
from core.technique import Declaration, declaration_of
from core.testing.case import Case, tiny
from core.testing.runs import run
from core.testing.workshop import text, workshop, write_config

README = Path(__file__).resolve().parents[2] / "configs" / "README.md"
BEGIN, END = "<!-- generated: {} -->", "<!-- end: {} -->"
STEPS = 4
WORKS, REFUSED, BUG = "yes", "refused", "BUG"

LIGHTNING = {
    "ddp, 2 ranks": {"trainer": {"strategy": "ddp", "devices": 2}},
    "ddp_find_unused_parameters_true, 2 ranks": {
        "trainer": {"strategy": "ddp_find_unused_parameters_true", "devices": 2}
    },
    "32-true": {"trainer": {"precision": "32-true"}},
    "bf16-mixed": {"trainer": {"precision": "bf16-mixed"}},
    "bf16-true": {"trainer": {"precision": "bf16-true"}},
    "16-true": {"trainer": {"precision": "16-true"}},
    "64-true": {"trainer": {"precision": "64-true"}},
}
"""Lightning's own strategies and precisions that run on a CPU, by the name of their column."""

SHORT: dict[str, dict[str, Any]] = {
    "BatchSizeRamp": {"start": 0.5, "tokens_until_full": 128, "growth": "doubling"},
    "LRFinder": {"num_steps": 10, "then": "use"},
    "RandomRestart": {"seeds": 3, "num_steps": 3},
}
"""Arguments for runs of a few steps, where those of the example are for longer ones."""

COLUMNS = ("callbacks", "strategies", "precision")
COMMANDS = ("commands", "datamodules")


@dataclass(frozen=True)
class Part:
    """A technique, or a setting of Lightning's, as the tables name it."""

    name: str
    overlay: dict[str, Any]

    @property
    def ranks(self) -> int:
        """Number of processes that its overlay asks for."""
        return int(self.overlay.get("trainer", {}).get("devices", 1))


def entries(*kinds: str) -> list[catalog.Entry]:
    """Returns leyden's own techniques of these kinds."""
    return [entry for entry in catalog.entries() if entry.package == "leyden" and entry.kind in kinds]


def callbacks() -> list[Part]:
    """Returns the rows."""
    return [Part(entry.name, Case(entry, SHORT.get(entry.name)).overlay) for entry in entries("callbacks")]


def others() -> list[Part]:
    """Returns the columns beside the callbacks."""
    cases = [Case(entry) for entry in entries("strategies", "precision")]
    own = [Part(case.entry.name, case.overlay) for case in cases if not case.absent()]
    return [Part(name, overlay) for name, overlay in LIGHTNING.items()] + own


def pairs() -> list[tuple[Part, Part]]:
    """Returns every pair once."""
    return [*itertools.combinations(callbacks(), 2), *itertools.product(callbacks(), others())]


def outcome(first: Part, second: Part) -> str:
    """Trains with both; returns "yes", "refused: why" or "BUG: what"."""
    label = re.sub(r"\W+", "-", f"{first.name}-{second.name}")
    folder = workshop() / f"pair-{label}"
    values = tiny([first.overlay, second.overlay])
    data = {"source": str(text()), "cache_dir": str(workshop() / "prepared")}
    recorder = {"class_path": "core.testing.recorder.Recorder", "init_args": {"folder": str(folder)}}
    merge(values, {"data": {"init_args": data}})
    trainer = {"max_steps": STEPS, "default_root_dir": str(folder), "enable_progress_bar": True}
    merge(values, {"trainer": trainer})
    merge(values, {"trainer": {"callbacks+": [recorder]}})
    ranks = max(first.ranks, second.ranks)
    done = run(["fit", f"--config={write_config(f'pair-{label}', values)}"], folder, ranks=ranks)
    if done.code == 2 and "This selection cannot run" in done.complaint:
        problems = re.findall(r"^- (.*)", done.complaint, re.MULTILINE)
        return f"{REFUSED}: {'; '.join(problems)}"
    if done.code:
        return f"{BUG}: exit code {done.code}: {done.complaint[-500:]}"
    losses = done.record["losses"]
    good = len(losses) == STEPS and all(map(math.isfinite, losses))
    return WORKS if good else f"{BUG}: losses {losses}"


def matrix(results: dict[tuple[str, str], str]) -> str:
    """Returns the table of pairs; reasons stand below it."""
    rows, columns = [part.name for part in callbacks()], [part.name for part in [*callbacks(), *others()]]
    reasons: dict[str, int] = {}
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for row in rows:
        cells = [_cell(results.get((row, c)) or results.get((c, row), ""), reasons) for c in columns]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cell(result: str, reasons: dict[str, int]) -> str:
    kind, _, reason = result.partition(": ")
    if kind != REFUSED:
        return kind
    return f"refused ({reasons.setdefault(reason, len(reasons) + 1)})"


def support() -> str:
    """Returns the table of what each technique needs and excludes."""
    head = ("technique", "kind", "overlay", "needs", "excludes", "alone in control of", "maturity")
    lines = [f"| {' | '.join(head)} |", "| --- |" * 1 + " --- |" * (len(head) - 1)]
    for entry in entries(*(kind for kind in catalog.KINDS if kind not in COMMANDS)):
        said = declaration_of(entry.load()) or Declaration(paper="")
        overlay = overlay_of(entry)
        cells = (
            entry.name,
            entry.kind,
            f"techniques/{overlay.stem}" if overlay.is_file() else "",
            ", ".join(str(need) for need in said.needs),
            "; ".join(f"{name}: {reason}" for name, reason in said.conflicts.items()),
            ", ".join(owned.replace("_", " ") for owned in said.owns),
            said.maturity,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def overlay_of(entry: catalog.Entry) -> Path:
    """Returns where the overlay of a technique belongs: configs/techniques/its_name.yaml."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z]{2}|[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", entry.name)
    return README.parent / "techniques" / f"{words.lower()}.yaml"


def written(name: str) -> str:
    """Returns what stands between the marks of a generated table."""
    page = README.read_text(encoding="utf-8")
    return page.partition(BEGIN.format(name))[2].partition(END.format(name))[0].strip()


def read_matrix() -> dict[tuple[str, str], str]:
    """Returns the written table of pairs: "yes", "refused" or "BUG" by (row, column)."""
    table = [line.strip("| ").split(" | ") for line in written("pairs").splitlines() if line.startswith("|")]
    columns = [cell.strip("| ") for cell in table[0]]
    return {
        (row[0], column): cell.partition(" ")[0]
        for row in table[2:]
        for column, cell in zip(columns, row[1:], strict=False)
        if cell
    }


def replace(name: str, table: str) -> None:
    """Puts a table between its marks."""
    page = README.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN.format(name))
    _, _, after = rest.partition(END.format(name))
    README.write_text(f"{before}{BEGIN.format(name)}\n{table}\n{END.format(name)}{after}", encoding="utf-8")


def train_all() -> Iterator[tuple[tuple[str, str], str]]:
    """Trains every pair, saying so as it goes."""
    todo = pairs()
    for number, (first, second) in enumerate(todo, 1):
        result = outcome(first, second)
        print(f"{number}/{len(todo)}  {first.name} + {second.name}: {result}", flush=True)
        yield (first.name, second.name), result


def main() -> int:
    """Writes both tables; returns 1 if a pair is a bug."""
    results = dict(train_all())
    replace("techniques", support())
    replace("pairs", matrix(results))
    return int(any(result.startswith(BUG) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
