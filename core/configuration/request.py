"""What the user asked for: configs composed, short names resolved, over the checkpoint to go on from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core import catalog
from core.configuration.arguments import last, option_values, split_configs, without
from core.configuration.config_files import Composed, compose, merge, parse_value
from core.configuration.named_callbacks import change, take_options
from core.errors import ConfigError
from core.runs import restarts

POSITIONS: dict[str, tuple[str, ...]] = {
    "trainer.callbacks": ("callbacks",),
    "trainer.strategy": ("strategies",),
    "trainer.plugins": ("precision", "checkpoints"),
    "trainer.logger": ("loggers",),
    "model.network": ("networks",),
    "model.objective": ("objectives",),
    "model.optimizer": ("optimizers",),
    "model.lr_scheduler": ("schedules",),
    "data": ("datamodules",),
}
"""Where short names of which kinds may stand as plain strings, without `class_path`."""

SECTIONS = ("seed_everything", "trainer", "model", "data")


@dataclass
class Request:
    """What the user asked for, before jsonargparse has seen it.

    Attributes:
        composed: The files' values, short names resolved, over those of the checkpoint if any.
        arguments: The remaining command line.
        checkpoint: The file to go on from.
        stored: The configuration in that checkpoint.
        job: What the launcher calls the job that is run, if it may start it again.
        elsewhere: Whether the run is only checked, for machines that are not here.
    """

    composed: Composed
    arguments: list[str]
    checkpoint: Path | None
    stored: dict[str, Any]
    job: str | None = None
    elsewhere: bool = False


def prepare(arguments: list[str], job: str | None = None) -> Request:
    """Composes the configs, finds the checkpoint, resolves short names and imports what they name.

    Args:
        arguments: The command line after the subcommand.
        job: What the launcher calls the job; if it was started before, it goes on from its last checkpoint.
    """
    names, words = split_configs(arguments)
    # Not strict: what a change by name means, the checkpoint tells.
    found, rest = _composed(names, words, {}, strict=False)
    root = Path(last(rest, "trainer.default_root_dir") or _default_root(found.values, names))
    checkpoint, stored, record = None, {}, {}
    if last(rest, "ckpt_path") == "":
        raise ConfigError("--ckpt_path is empty: give last, a checkpoint or a run folder, or leave it out.")
    runs = [name for name in names if "techniques/" not in name]
    below = root if runs or last(rest, "trainer.default_root_dir") else Path("runs")
    wanted = str(last(rest, "ckpt_path") or found.values.get("ckpt_path") or "")
    if job:
        checkpoint = restarts.checkpoint(job, root, wanted, below)
    if wanted and checkpoint is None:
        from core.checkpoints.checkpoint import resolve

        checkpoint = resolve(wanted, below)
    if checkpoint:
        from core.checkpoints import checkpoint as checkpoints

        record = checkpoints.record(checkpoint)
        stored = checkpoints.stored_config(checkpoint)
        stored = {key: value for key, value in stored.items() if key in SECTIONS}
        if not names:
            root = Path(_default_root(stored, names))
    composed, rest = _composed(names, words, stored)
    composed.values.pop("ckpt_path", None)
    if checkpoint:
        rest = [*without(rest, "ckpt_path"), f"--ckpt_path={checkpoint}"]
    for section in ("trainer", "model"):
        if not isinstance(value := composed.values.get(section, {}), dict):
            place = composed.positions.get((section,), "--config")
            raise ConfigError(f"{place}: {section} is a section (`name: value` lines), not {value!r}.")
    composed.values.setdefault("trainer", {}).setdefault("default_root_dir", str(root))
    if job:
        rest += restarts.shape(record, stored, composed.values, rest)
    for entry in catalog.registered(_words(composed.values, rest)):
        entry.load()
    return Request(composed, rest, checkpoint, stored, job)


def _composed(
    names: list[str], arguments: list[str], below: dict[str, Any], strict: bool = True
) -> tuple[Composed, list[str]]:
    changes, places, arguments = take_options(arguments, parse_value)
    composed = compose(names, below, strict)
    if changes:
        change(composed.values, composed.positions, changes, places, merge, strict=strict)
    resolve_names(composed.values)
    return composed, _move_positions(composed, arguments)


def _move_positions(composed: Composed, arguments: list[str]) -> list[str]:
    """Moves `--model.network=GPT` and the like into the config; resolves `--trainer.callbacks+=X` in place."""
    result, moved = list(arguments), set()
    for at, count, key, value in option_values(arguments):
        kinds = POSITIONS.get(key.removesuffix("+"), ())
        entry = _entry(value, kinds) if kinds else None
        if entry is None:
            continue
        if key.endswith("+"):
            result[at : at + count] = [f"--{key}={entry.class_path}", *[""] * (count - 1)]
            continue
        nested: dict[str, Any] = {"class_path": entry.class_path}
        for part in reversed(key.split(".")):
            nested = {part: nested}
        merge(composed.values, nested)
        composed.positions[tuple(key.split("."))] = f"--{key}"
        moved |= set(range(at, at + count))
    return [word for index, word in enumerate(result) if index not in moved and word]


def _entry(name: Any, kinds: tuple[str, ...]) -> catalog.Entry | None:
    for kind in kinds:
        if any(entry.kind == kind and entry.name == name for entry in catalog.entries()):
            return catalog.find(name, kind)
    return None


def resolve_names(values: dict[str, Any]) -> None:
    """Replaces short names by full paths, at every `class_path` and at the known positions, in place."""
    for position, kinds in POSITIONS.items():
        *parents, key = position.split(".")
        holder: Any = values
        for parent in parents:
            holder = holder.get(parent) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and key in holder:
            items = holder[key] if isinstance(holder[key], list) else [holder[key]]
            found = [_named(item, kinds) for item in items]
            holder[key] = found if isinstance(holder[key], list) else found[0]
    catalog.qualify(values)


def _named(item: Any, kinds: tuple[str, ...]) -> Any:
    if isinstance(item, dict) and isinstance(item.get("class_path"), str):
        entry = _entry(item["class_path"], kinds)
        return {**item, "class_path": entry.class_path} if entry else item
    entry = _entry(item, kinds) if isinstance(item, str) else None
    return {"class_path": entry.class_path} if entry else item


def _words(value: Any, arguments: list[str]) -> set[str]:
    """Returns what may be a name: whole values of the configs (not words of a text), words of the arguments."""
    leaves = [leaf if isinstance(leaf, list) else [leaf] for _, leaf in _leaves(value, "")]
    words = [word for line in arguments for word in re.findall(r"[A-Za-z_][\w.]*", line)]
    return {*words, *(str(item) for items in leaves for item in items)}


def _default_root(values: dict[str, Any], names: list[str]) -> str:
    written = (
        values.get("trainer", {}).get("default_root_dir") if isinstance(values.get("trainer"), dict) else None
    )
    return written or f"runs/{Path(names[0]).stem if names else 'run'}"


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value that differs between a checkpoint's configuration and the run's."""
    old, new = dict(_leaves(stored, "")), dict(_leaves(current, ""))
    return [
        f"{key}: {new.get(key, '(absent)')} (the checkpoint has {old.get(key, '(absent)')})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{key}.{index}")
    else:
        yield key, value
