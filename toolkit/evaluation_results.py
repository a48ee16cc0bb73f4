"""Results of evaluations: measuring them on all ranks, and the files that they are stored in.

A folder `step-00001000` holds `results.json`, and of each set `NAME.jsonl`, with the sums of each item, and `NAME.png` where the
evaluation draws a picture.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from core import durable
from core.errors import ConfigError
from toolkit import pictures
from toolkit.bounded import parse_json, read_error, read_inside
from toolkit.resampling import Interval, intervals

if TYPE_CHECKING:  # it imports torch, which those that read results alone do not need
    from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured

__all__ = [
    "ALONE",
    "FOLDER",
    "RESULTS",
    "Ranks",
    "Results",
    "SetResult",
    "check_items",
    "check_names",
    "completed",
    "digest",
    "evaluate",
    "flat_figures",
    "read_items",
    "read_results",
    "write_results",
]

FOLDER = "evaluation"
"""Folder of evaluations in a run folder."""

RESULTS = "results.json"
"""Of a step's folder; written last."""

MOST_GROUPS = 20
"""Groups whose figures are computed: those with the most items."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Ranks(NamedTuple):
    """The ranks that share the items.

    Attributes:
        rank: This one's number.
        size: How many there are.
        gather: Returns the values of all of them, on each.
        agree: Returns the first fault of any rank of the run, on each; "": there is none. Ranks with the same share need each other.
    """

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]
    agree: Callable[[str], str] = str


ALONE = Ranks(0, 1, lambda value: [value])
"""One process."""


@dataclass(frozen=True)
class SetResult:
    """What an evaluation found.

    Attributes:
        evaluation: Class path.
        items: How many items there were.
        figures: Name -> value with its interval.
        groups: Name -> figures of its items; empty where all items are of one group.
        rows: Of each item `id`, `digest`, `group`, `sums`, and what is shown of it. Empty where only results.json was read.
        picture: PNG; None: there is none.
    """

    evaluation: str
    items: int
    figures: Mapping[str, Interval]
    groups: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    picture: bytes | None = None


@dataclass(frozen=True)
class Results:
    """Evaluations of one network.

    Attributes:
        step: Optimizer steps that it was trained for.
        tokens: Label tokens; None: not known.
        tokenizer: The first 16 digits of the SHA-256 of its tokenizer: losses per token compare where it is the same.
        checkpoint: Where it is stored; empty: it was evaluated during the run.
        sets: Name -> result.
    """

    step: int
    tokens: int | None
    tokenizer: str
    checkpoint: str
    sets: Mapping[str, SetResult]


def check_names(evaluations: Mapping[str, Evaluation], owner: str) -> None:
    """Raises a ConfigError if there are no evaluations, or one has a name that cannot be a file's and a figure's."""
    if not evaluations:
        raise ConfigError(f"{owner}.evaluations is empty: name at least one, such as `books: Perplexity`.")
    for name in evaluations:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{owner}.evaluations: {name[:80]!r} cannot be a name. Take letters, digits, '-', '_' and '.', 64 at most."
            )


def check_items(evaluations: Mapping[str, Evaluation], model: EvaluatedModel) -> None:
    """Reads the items of all evaluations, so that mistakes show before hours of work.

    Raises:
        ConfigError: If one cannot be read, or does not fit the model.
    """
    for name, evaluation in evaluations.items():
        try:
            evaluation.items(model)
        except ConfigError as error:
            raise ConfigError(f"evaluation {name}: {error}") from error


def evaluate(name: str, evaluation: Evaluation, model: EvaluatedModel, ranks: Ranks = ALONE) -> SetResult:
    """Measures an evaluation, each rank its share of the items; returns the same on every rank.

    Raises:
        ConfigError: On every rank, if one of them cannot measure an item.
    """
    from toolkit.evaluation import Measured

    items: list[Item] = []
    own: list[tuple[dict[str, float], dict[str, Any]]] = []
    fault = ""
    try:
        items = list(evaluation.items(model))
    except ConfigError as error:
        # of a file that one machine cannot read: others would wait for this rank in the network
        fault = str(error)
    if fault := ranks.agree(fault):
        raise ConfigError(f"evaluation {name}: {fault}")
    try:
        mine = items[ranks.rank :: ranks.size]
        own = [_checked(one, item) for one, item in zip(evaluation.measure(model, mine), mine, strict=True)]
    except ConfigError as error:
        fault = str(error)
    found = ranks.gather((fault, own))
    if faults := [said for said, _ in found if said]:
        raise ConfigError(f"evaluation {name}: {faults[0]}")
    measured = [Measured({})] * len(items)
    for rank, (_, part) in enumerate(found):
        measured[rank :: ranks.size] = [Measured(*one) for one in part]
    sums = [one.sums for one in measured]
    drawn = evaluation.draw(items, measured) if items and not ranks.rank else None
    kind = type(evaluation)
    return SetResult(
        f"{kind.__module__}.{kind.__qualname__}",
        len(items),
        intervals(sums, kind.figures),
        {
            group: intervals(
                [one for one, item in zip(sums, items, strict=True) if item.group == group], kind.figures
            )
            for group in _groups(items)
        },
        [
            {"id": item.id, "digest": item.digest, "group": item.group, "sums": dict(one.sums), **one.shown}
            for item, one in zip(items, measured, strict=True)
        ],
        None if drawn is None else pictures.as_png(drawn),
    )


def _checked(measured: Measured, item: Item) -> tuple[dict[str, float], dict[str, Any]]:
    sums = {name: float(value) for name, value in measured.sums.items()}
    for name, value in sums.items():
        if not math.isfinite(value):
            raise ConfigError(f"{name} of the item {item.id[:80]} is {value}: have the weights diverged?")
    return sums, dict(measured.shown)


def _groups(items: Sequence[Item]) -> list[str]:
    """Returns the groups with the most items, as they come; none where there is only one."""
    counted = Counter(item.group for item in items)
    named = {group for group, _ in counted.most_common(MOST_GROUPS + 1) if group}
    return [group for group in counted if group in named][:MOST_GROUPS] if len(counted) > 1 else []


def flat_figures(results: Mapping[str, SetResult]) -> dict[str, float]:
    """Returns figures by the names that they are logged under: `eval/SET/FIGURE` and `eval/SET/GROUP/FIGURE`."""
    found: dict[str, float] = {}
    for name, result in results.items():
        found |= {f"eval/{name}/{figure}": one.value for figure, one in result.figures.items()}
        for group, figures in result.groups.items():
            found |= {f"eval/{name}/{group}/{figure}": one.value for figure, one in figures.items()}
    return found


# -- files --------------------------------------------------------------------------------------------------------


def digest(text: str) -> str:
    """Returns the first 16 digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_results(results: Results, folder: Path) -> Path:
    """Writes results into the folder of their step within a folder of evaluations, and `results.csv` of all steps there.

    Raises:
        ConfigError: If they cannot be written.
    """
    place = folder / f"step-{results.step:08d}"
    try:
        for name, one in results.sets.items():
            lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in one.rows)
            durable.write(place / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))
            if one.picture is not None:
                durable.write(place / f"{name}.png", one.picture)
        durable.write(place / RESULTS, json.dumps(_as_json(results), ensure_ascii=False, indent=1) + "\n")
        durable.write(folder / "results.csv", _as_csv(read_results(folder)))
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {durable.write_error(error)}.") from error
    return place


def _as_json(results: Results) -> dict[str, Any]:
    def limits(figures: Mapping[str, Interval]) -> dict[str, list[float | None]]:
        return {name: [None if math.isnan(one) else one for one in found] for name, found in figures.items()}

    sets = {
        name: {
            "evaluation": one.evaluation,
            "items": one.items,
            "figures": limits(one.figures),
            "groups": {group: limits(figures) for group, figures in one.groups.items()},
        }
        for name, one in results.sets.items()
    }
    own = {name: getattr(results, name) for name in ("step", "tokens", "tokenizer", "checkpoint")}
    return {"format": 1, **own, "sets": sets}


def read_results(folder: Path) -> list[Results]:
    """Returns the results in a folder of evaluations, by step, without their items; empty where there are none.

    Raises:
        ConfigError: If a file is damaged.
    """
    found = [_read(place) for place in sorted(folder.glob("step-*")) if (place / RESULTS).is_file()]
    return sorted(found, key=lambda one: one.step)


def _read(place: Path) -> Results:
    try:
        content = parse_json(read_inside(place, RESULTS))
        if odd := [name for name in content["sets"] if not _NAME.fullmatch(name)]:
            raise ValueError(f"{odd[0]!r:.80} is no name of a set")
        sets = {
            name: SetResult(
                str(one["evaluation"]),
                int(one["items"]),
                _intervals(one["figures"]),
                {str(group): _intervals(figures) for group, figures in one["groups"].items()},
            )
            for name, one in content["sets"].items()
        }
        tokens = None if content["tokens"] is None else int(content["tokens"])
        return Results(
            int(content["step"]), tokens, str(content["tokenizer"]), str(content["checkpoint"]), sets
        )
    except OSError as error:
        raise ConfigError(f"{place / RESULTS}: {read_error(error)}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{place / RESULTS} is not as Evaluate writes it: {error!r:.200}. Evaluate again."
        ) from error


def _intervals(figures: Mapping[str, Any]) -> dict[str, Interval]:
    return {
        str(name): Interval(*(math.nan if one is None else float(one) for one in found))
        for name, found in figures.items()
    }


def read_items(folder: Path, step: int, name: str) -> list[dict[str, Any]]:
    """Returns the items of a set of a step, as :attr:`SetResult.rows` has them.

    Raises:
        ConfigError: If the file is damaged.
    """
    path = folder / f"step-{step:08d}" / f"{name}.jsonl"
    try:
        text = read_inside(path.parent, path.name).decode()
        rows = [parse_json(line.encode()) for line in text.split("\n") if line]
        for row in rows:
            row["sums"] = {str(key): float(value) for key, value in row["sums"].items()}
            _ = row["id"], row["digest"], row["group"]
        return rows
    except OSError as error:
        raise ConfigError(f"{path}: {read_error(error)}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not as Evaluate writes it: {error!r:.200}. Evaluate again.") from error


def completed(results: Results, folder: Path) -> Results:
    """Returns results of a checkpoint with the other sets that its run has of the same step.

    These are of the run itself, or of an earlier evaluation of a checkpoint of this name.

    Args:
        results: Of the checkpoint.
        folder: Of the evaluations of its run.

    Raises:
        ConfigError: If a file is damaged.
    """
    same = [
        one
        for one in read_results(folder)
        if (one.step, one.tokenizer) == (results.step, results.tokenizer)
        and Path(one.checkpoint).name in ("", Path(results.checkpoint).name)
    ]
    stored = {name: one for known in same for name, one in known.sets.items() if name not in results.sets}
    kept = {
        name: replace(
            one,
            rows=read_items(folder, results.step, name),
            picture=_picture(folder, results.step, name),
        )
        for name, one in stored.items()
    }
    return replace(results, sets=kept | dict(results.sets))


def _picture(folder: Path, step: int, name: str) -> bytes | None:
    try:
        return read_inside(folder / f"step-{step:08d}", f"{name}.png")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: the picture of {name}: {read_error(error)}") from error


def _as_csv(results: Sequence[Results]) -> str:
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(("step", "tokens", "set", "group", "figure", "value", "low", "high", "items"))
    for one in results:
        for name, found in one.sets.items():
            for group, figures in {"": found.figures, **found.groups}.items():
                items = "" if group else found.items
                for figure, interval in figures.items():
                    limits = ("" if math.isnan(value) else repr(value) for value in interval)
                    tokens = "" if one.tokens is None else one.tokens
                    table.writerow((one.step, tokens, name, group, figure, *limits, items))
    return file.getvalue()
