"""Which techniques run together: trains them together and writes what configs/README.md says of it.

    python -m tests.conformance.compatibility
    python -m tests.conformance.compatibility --lists    # without training, from the written results

Rows are callbacks; columns are callbacks, and the strategies and precisions that a CPU can run. Two kinds of runs train
a tiny model for a few steps:

- Groups: under each column, as many callbacks as go together, in as few runs as their refusals allow. Each pair
  that is not refused is in one of them. Their number grows with the columns.
- Pairs: of the callbacks that act in the same hook, each with the next one. Their number grows with the callbacks.
  A callback that only observes is in no pair: the kit proves that it changes neither losses nor weights.

A pair is refused if preflight says why; any other failure is a bug.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from conformance.case import Case, tiny
from conformance.runs import run
from conformance.workshop import text, workshop, write_config
from core import catalog
from core.technique import Declaration, Feature, declaration_of
from plugins.cli.configuration.config_files import merge
from plugins.commands.docs_page import overlay_name
from toolkit import pictures

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
README, RESULTS, PICTURE = (
    CONFIGS / "README.md",
    CONFIGS / "compatibility.json",
    CONFIGS / "compatibility.png",
)
BEGIN, END = "<!-- generated: {} -->", "<!-- end: {} -->"
STEPS = 4
WORKS, REFUSED, BUG = "yes", "refused", "BUG"
OWN_STATE = {"state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint"}
"""Hooks in which a callback has to do with nothing but its own state."""

Results = dict[str, dict[str, str]]
"""Technique -> other technique or setting -> "yes", "refused" where it is declared why, or "refused: why"."""

LIGHTNING: dict[str, dict[str, Any]] = {
    "ddp, 2 ranks": {"trainer": {"strategy": "ddp", "devices": 2}},
    "ddp_find_unused_parameters_true, 2 ranks": {
        "trainer": {"strategy": "ddp_find_unused_parameters_true", "devices": 2}
    },
    "32-true": {"trainer": {"precision": "32-true"}},
    "bf16-mixed": {"trainer": {"precision": "bf16-mixed"}},
    "bf16-true": {"trainer": {"precision": "bf16-true"}},
    # AdamW's default eps is refused in 16-true; SGD keeps the column about the techniques in the rows.
    "16-true": {
        "trainer": {"precision": "16-true"},
        "model": {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.25, "momentum": 0.9}}},
    },
    "64-true": {"trainer": {"precision": "64-true"}},
}
"""Lightning's own strategies and precisions that run on a CPU, by the name of their column."""

SHORT: dict[str, dict[str, Any]] = {
    "BatchSizeRamp": {"start": 0.5, "tokens_until_full": 128, "growth": "doubling"},
    "Compile": {"backend": "eager"},
    "LRFinder": {"num_steps": 10, "then": "use"},
    "RandomRestart": {"seeds": 3, "num_steps": 3},
    "RankInvariance": {"micro_batches": 2},
}
"""Arguments for runs of a few steps, where those of the example are for longer ones, or need minutes of a compiler."""

COMPARES_PARTS = ("AdaptiveBatchSize", "GradientNoiseScale")
"""Callbacks that take a step apart, which the groups' single micro-batch and experts do not allow; the kit tries them alone."""

COMMANDS = ("commands", "datamodules")


def short(name: str) -> dict[str, Any] | None:
    """Returns a callback's arguments for runs of a few steps; None: those of its example."""
    if name != "Evaluate":
        return SHORT.get(name)
    documents = {"class_path": "TextDocuments", "init_args": {"source": str(text())}}
    arguments = {"documents": documents, "max_documents": 2}
    return {"every_n_steps": 3, "evaluations": {"text": {"class_path": "Perplexity", "init_args": arguments}}}


@dataclass(frozen=True)
class Part:
    """A technique, or a setting of Lightning's, as the tables name it.

    Attributes:
        acts_in: Hooks of training that it overrides; none where it only observes.
    """

    name: str
    overlay: dict[str, Any]
    declared: Declaration = field(default_factory=lambda: Declaration(paper=""))
    acts_in: frozenset[str] = frozenset()

    @property
    def ranks(self) -> int:
        """Number of processes that its overlay asks for."""
        return int(self.overlay.get("trainer", {}).get("devices", 1))


NOTHING = Part("one process, float32", {})
"""The column under which callbacks are trained with each other alone."""


def entries(*kinds: str) -> list[catalog.Entry]:
    """Returns leyden's own techniques of these kinds."""
    return [entry for entry in catalog.entries() if entry.package == "leyden" and entry.kind in kinds]


def declaration(entry: catalog.Entry) -> Declaration:
    """Returns what a technique declares."""
    return declaration_of(entry.load()) or Declaration(paper="")


@cache
def needs_other_data(entry: catalog.Entry) -> bool:
    """Returns whether a callback needs data, or an objective, that the tiny run has not; the kit tries it alone."""
    if "data" in Case(entry).overlay:
        return True
    usual = {
        feature
        for name in ("PretrainDataModule", "CausalLM")
        for feature in declaration(catalog.find(name)).offers
    }
    return any(
        all(
            offer.kind in ("datamodules", "objectives")
            or (offer.kind == "callbacks" and needs_other_data(offer))
            for offer in catalog.offers(need.name)
        )
        for need in declaration(entry).needs
        if isinstance(need, Feature) and need.name not in usual
    )


@cache  # asked for each column
def callbacks() -> tuple[Part, ...]:
    """Returns the rows: without callbacks that need data of their own."""
    found = []
    for entry in entries("callbacks"):
        if needs_other_data(entry) or entry.name in COMPARES_PARTS:
            continue
        target, declared = entry.load(), declaration(entry)
        hooks = {name for name in dir(Callback) if getattr(target, name) is not getattr(Callback, name)}
        acts_in = (
            set() if declared.observer else {name for name in hooks if not name.startswith("_")} - OWN_STATE
        )
        overlay = Case(entry, short(entry.name)).overlay
        found.append(Part(entry.name, overlay, declared, frozenset(acts_in)))
    return tuple(found)


def columns() -> list[Part]:
    """Returns the columns beside the callbacks."""
    cases = [Case(entry) for entry in entries("strategies", "precision")]
    own = [Part(c.entry.name, c.overlay, declaration(c.entry)) for c in cases if not c.absent()]
    return [Part(name, overlay) for name, overlay in LIGHTNING.items()] + own


def all_pairs() -> list[tuple[Part, Part]]:
    """Returns every pair once."""
    return [*itertools.combinations(callbacks(), 2), *itertools.product(callbacks(), columns())]


def refusal(first: Part, second: Part) -> str:
    """Returns why two parts declare that they do not go together; empty where they do."""
    for one, other in ((first, second), (second, first)):
        if other.name in one.declared.conflicts:
            return one.declared.conflicts[other.name]
    both = set(first.declared.owns) & set(second.declared.owns)
    return f"both control the {' and the '.join(sorted(both)).replace('_', ' ')}" if both else ""


def neighbours(parts: Sequence[Part]) -> list[tuple[Part, Part]]:
    """Returns the pairs that are trained by themselves: in each hook, each part with the next that acts in it."""
    found = {}
    for hook in sorted(set().union(*(part.acts_in for part in parts))):
        for first, second in itertools.pairwise(part for part in parts if hook in part.acts_in):
            if not refusal(first, second):
                found[first.name, second.name] = first, second
    return list(found.values())


def refused_pairs() -> list[tuple[Part, Part]]:
    """Returns the pairs that declare that they do not go together."""
    return [pair for pair in all_pairs() if refusal(*pair)]


def groups(column: Part) -> list[list[Part]]:
    """Returns sets of callbacks that go together and with a column; each pair that goes together is in one."""
    pool = [part for part in callbacks() if not refusal(part, column)]
    found: list[list[Part]] = []
    left = {frozenset((a.name, b.name)) for a, b in itertools.combinations(pool, 2) if not refusal(a, b)}
    if column is not NOTHING:  # only the callback and the column need to meet
        left = {frozenset((part.name,)) for part in pool}
    while left:
        seed = sorted(min(left, key=sorted))
        group: list[Part] = []
        # those that have not met yet come first
        waiting = set().union(*left)
        for part in sorted(pool, key=lambda part: (part.name not in seed, part.name not in waiting)):
            if not any(refusal(part, other) for other in group):
                group.append(part)
        names = {part.name for part in group}
        left = {pair for pair in left if not pair <= names}
        found.append([part for part in pool if part.name in names])
    return found


def names_in(overlay: Mapping[str, Any]) -> list[str]:
    """Returns the names of an overlay's callbacks."""
    trainer = overlay.get("trainer", {})
    chosen = [*trainer.get("callbacks", []), *trainer.get("callbacks+", [])]
    paths = (one if isinstance(one, str) else one["class_path"] for one in chosen)
    return [path.rpartition(".")[2] for path in paths]


def together(group: Sequence[Part]) -> Part:
    """Returns several parts as one."""
    overlay: dict[str, Any] = {}
    for part in group:
        merge(overlay, copy.deepcopy(part.overlay))
    # One may come with another, such as with what it reads, that has a part of its own.
    once = dict(zip(names_in(overlay), overlay["trainer"].pop("callbacks"), strict=True))
    overlay["trainer"]["callbacks+"] = list(once.values())  # behind those of the tiny run
    assert len(once) >= len(group)
    return Part(f"{len(group)} callbacks from {group[0].name}", overlay)


def outcome(first: Part, second: Part) -> str:
    """Trains with both; returns "yes", "refused: why" or "BUG: what"."""
    label = re.sub(r"\W+", "-", f"{first.name}-{second.name}")
    folder = workshop() / f"pair-{label}"
    values = tiny([first.overlay, second.overlay])
    data = {"source": str(text()), "cache_dir": str(workshop() / "prepared")}
    recorder = {"class_path": "conformance.recorder.Recorder", "init_args": {"folder": str(folder)}}
    merge(values, {"data": {"init_args": data}})
    trainer = {"max_steps": STEPS, "default_root_dir": str(folder), "enable_progress_bar": True}
    merge(values, {"trainer": trainer})
    merge(values, {"trainer": {"callbacks+": [recorder]}})
    ranks = max(first.ranks, second.ranks)
    done = run(["fit", f"--config={write_config(f'pair-{label}', values)}"], folder, ranks=ranks)
    if done.code == 2 and "This selection cannot run" in done.error_text:
        problems = re.findall(r"^- (.*)", done.error_text, re.MULTILINE)
        return f"{REFUSED}: {'; '.join(problems)}"
    if done.code:
        return f"{BUG}: exit code {done.code}: {done.error_text[-500:]}"
    losses = done.record["losses"]
    good = len(losses) == STEPS and all(map(math.isfinite, losses))
    return WORKS if good else f"{BUG}: losses {losses}"


def train_group(group: Sequence[Part], column: Part) -> tuple[str, dict[str, str]]:
    """Trains a group under a column, without those that preflight refuses for what the column is.

    Returns:
        The outcome, and for each callback "yes" or "refused: why".
    """
    found: dict[str, str] = {}
    while True:
        left = [part for part in group if part.name not in found]
        result = outcome(together(left), column)
        if not result.startswith(REFUSED) or column is NOTHING:
            return result, found | {part.name: result for part in left}
        for problem in re.split(
            r"; (?=\w+ \()", result.removeprefix(f"{REFUSED}: ")
        ):  # a reason may have a semicolon
            name, _, why = problem.partition(": ")
            name = name.partition(" ")[0]
            bringing = [part.name for part in left if name in (part.name, *names_in(part.overlay))]
            if not bringing:
                return f"{BUG}: {result}", found
            found |= dict.fromkeys(bringing, f"{REFUSED}: {why}")


def train_all() -> tuple[Results, list[str]]:
    """Trains all groups, and all pairs that are trained by themselves; returns the results and the bugs."""
    results: Results = {part.name: {} for part in callbacks()}
    bugs = []

    def note(what: str, result: str) -> None:
        print(f"{what}: {result}", flush=True)
        if result.startswith(BUG):
            bugs.append(f"{what}: {result}")

    for first, second in refused_pairs():
        result = outcome(first, second)
        results[first.name][second.name] = REFUSED
        note(f"{first.name} + {second.name}", result if result.startswith(REFUSED) else f"{BUG}: {result}")
    for group in groups(NOTHING):
        result, _ = train_group(group, NOTHING)
        note(", ".join(part.name for part in group), result)
        for first, second in itertools.combinations(group, 2):
            results[first.name][second.name] = result
    for column in columns():
        for group in groups(column):
            result, each = train_group(group, column)
            note(f"{', '.join(part.name for part in group)} under {column.name}", result)
            for name, one in each.items():
                results[name][column.name] = one
    for first, second in neighbours(callbacks()):
        note(f"{first.name} + {second.name}", outcome(first, second))
    return {name: dict(sorted(row.items())) for name, row in results.items()}, bugs


def support() -> str:
    """Returns the table of what each technique needs and owns."""
    head = ("technique", "kind", "overlay", "needs", "alone in control of", "maturity")
    lines = [f"| {' | '.join(head)} |", "| --- |" * 1 + " --- |" * (len(head) - 1)]
    for entry in entries(*(kind for kind in catalog.KINDS if kind not in COMMANDS)):
        said = declaration(entry)
        overlay = overlay_of(entry)
        cells = (
            entry.name,
            entry.kind,
            f"techniques/{overlay.stem}" if overlay.is_file() else "",
            ", ".join(str(need) for need in said.needs),
            ", ".join(owned.replace("_", " ") for owned in said.owns),
            said.maturity,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def refusals(results: Results) -> str:
    """Returns what each technique is refused with, and why, as a list; what two share is said of both."""
    found: dict[str, dict[str, set[str]]] = {}

    def add(name: str, other: str, why: str) -> None:
        found.setdefault(name, {}).setdefault(why, set()).add(other)

    own = entries(*(kind for kind in catalog.KINDS if kind not in COMMANDS))
    names = {entry.name for entry in own}
    for entry in own:
        for other, why in declaration(entry).conflicts.items():
            add(entry.name, other, why)
            if other in names:
                add(other, entry.name, why)
    for first, second in all_pairs():
        _, _, why = look_up(results, first.name, second.name).partition(f"{REFUSED}: ")
        owned = refusal(first, second) if second.name not in first.declared.conflicts else ""
        if why or (owned and first.name not in second.declared.conflicts):
            add(first.name, second.name, why or owned)
            if second.name in names:
                add(second.name, first.name, why or owned)
    lines = []
    for name, reasons in sorted(found.items()):
        lines.append(f"- **{name}**")
        lines += [f"  - {', '.join(sorted(others))}: {why}" for why, others in sorted(reasons.items())]
    return "\n".join(lines)


def draw(results: Results) -> bytes:
    """Returns a picture of all pairs, as PNG."""
    rows = [part.name for part in callbacks()]
    names = [*rows, *(part.name for part in columns())]
    figure = pictures.new_figure(11, 7)
    axes = figure.add_subplot()
    colours = {WORKS: "#8cc98c", REFUSED: "#c0392b", "": "#eeeeee"}
    for y, row in enumerate(rows):
        for x, column in enumerate(names):
            result = look_up(results, row, column).partition(":")[0]
            axes.add_patch(_square(x, y, colours[result]))
            if result == REFUSED:
                axes.text(x, y, "x", ha="center", va="center", color="white", fontsize=9)
    axes.axvline(len(rows) - 0.5, color="black", linewidth=1)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="left", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_aspect("equal")
    axes.set_xlabel("green: trained together; red: refused before the run starts, with the reason")
    return pictures.as_png(figure)


def _square(x: int, y: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, color=colour, linewidth=0)


def look_up(results: Mapping[str, Mapping[str, str]], first: str, second: str) -> str:
    """Returns the result of a pair; empty where there is none."""
    return results.get(first, {}).get(second) or results.get(second, {}).get(first, "")


def read_results() -> Results:
    """Returns the written results."""
    found: Results = json.loads(RESULTS.read_text(encoding="utf-8"))["pairs"]
    return found


def overlay_of(entry: catalog.Entry) -> Path:
    """Returns where the overlay of a technique belongs: configs/techniques/its_name.yaml."""
    return CONFIGS / "techniques" / f"{overlay_name(entry.name)}.yaml"


def written(name: str) -> str:
    """Returns what is between the marks of a generated part of configs/README.md."""
    page = README.read_text(encoding="utf-8")
    return page.partition(BEGIN.format(name))[2].partition(END.format(name))[0].strip()


def replace(name: str, table: str) -> None:
    """Puts a generated part between its marks."""
    page = README.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN.format(name))
    _, _, after = rest.partition(END.format(name))
    README.write_text(f"{before}{BEGIN.format(name)}\n{table}\n{END.format(name)}{after}", encoding="utf-8")


def planned() -> Iterator[tuple[Part, Part]]:
    """Yields the groups and the pairs that are trained."""
    for column in (NOTHING, *columns()):
        yield from ((together(group), column) for group in groups(column))
    yield from neighbours(callbacks())


def main() -> int:
    """Writes results, lists and picture; returns 1 if there is a bug."""
    results, bugs = (read_results(), []) if "--lists" in sys.argv else train_all()
    if not bugs:
        RESULTS.write_text(json.dumps({"pairs": results}, indent=1) + "\n", encoding="utf-8")
        replace("techniques", support())
        replace("refusals", refusals(results))
        PICTURE.write_bytes(draw(results))
    print(f"{len(list(planned()))} runs for {len(all_pairs())} pairs.", *bugs, sep="\n")
    return int(bool(bugs))


if __name__ == "__main__":
    sys.exit(main())
