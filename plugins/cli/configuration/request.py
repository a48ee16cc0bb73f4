"""The requested run: configs composed, short names resolved, merged over the checkpoint to resume."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from plugins.cli.configuration import stored_paths, trust
from plugins.cli.configuration.arguments import last, option_values, split_configs, without
from plugins.cli.configuration.class_paths import POSITIONS, entry_of, registered, resolve_names
from plugins.cli.configuration.config_files import (
    Composed,
    Layer,
    find_config,
    last_written,
    merge,
    merge_layers,
    read_layers,
)
from plugins.cli.configuration.mistakes import Keys, finder
from plugins.cli.configuration.named_callbacks import change, take_options
from plugins.cli.configuration.trust import Trust, trusting
from plugins.cli.configuration.validation_unit import stored_in_steps
from plugins.cli.configuration.yaml_texts import parse_value
from plugins.cli.runs import restarts
from toolkit import local_paths

SECTIONS = ("seed_everything", "trainer", "model", "data")


@dataclass
class Request:
    """The requested run, before jsonargparse parses it.

    Attributes:
        composed: The files' values, short names resolved, over those of the checkpoint if any.
        arguments: The remaining command line.
        checkpoint: The checkpoint to resume.
        stored: The configuration in that checkpoint.
        job: Name of the job from :func:`plugins.cli.runs.restarts.job`, if its launcher may restart it.
        offline: Whether the run is only checked, for machines that are not here.
        trust: Which modules the user lets the configuration import from.
        folder: The run folder to resume in; None: a new one.
    """

    composed: Composed
    arguments: list[str]
    checkpoint: Path | None
    stored: dict[str, Any]
    job: str | None = None
    offline: bool = False
    trust: Trust = field(default_factory=Trust)
    folder: Path | None = None


def prepare(arguments: list[str], job: str | None = None) -> Request:
    """Reads the configs, finds the checkpoint, composes both, and imports the techniques that are named.

    Args:
        arguments: The command line after the subcommand.
        job: Name of the job; after a restart it resumes from its last checkpoint.
    """
    trusted, arguments = trust.take_option(arguments)
    names, words = split_configs(arguments)
    layers = read_layers(names)
    beside = trust.beside((find_config(name) for name in names), [layer.values for layer in layers], words)
    written = last(words, "trainer.default_root_dir") or last_written(layers, "trainer", "default_root_dir")
    root = Path(local_paths.require_local_path(written or _default_root(names), "trainer.default_root_dir"))
    named = bool(written) or any("techniques/" not in name for name in names)
    wanted = _wanted(layers, words)
    if checkpoint := _checkpoint(wanted, root, named, job):
        stored = _stored(checkpoint, written, root)
        words = [*without(words, "ckpt_path"), f"--ckpt_path={checkpoint}"]
    else:
        stored = _Stored(None, root)
    composed, rest = _composed(layers, words, stored.values)
    if checkpoint:
        stored_paths.check(composed, rest, checkpoint, wanted)
    composed.values.setdefault("trainer", {}).setdefault("default_root_dir", str(stored.root))
    if job:
        rest += restarts.shape(stored.record, stored.values, composed.values, rest)
    whole = Trust(trusted, beside)
    with trusting(whole):
        _load(composed, rest, checkpoint)
    return Request(composed, rest, checkpoint, stored.values, job, folder=stored.folder, trust=whole)


def of_checkpoint(values: dict[str, Any], arguments: list[str], checkpoint: Path) -> Request:
    """Returns the request of a command that runs a checkpoint with what it took of the stored configuration.

    Args:
        values: What it took.
        arguments: The user's, over them.
        checkpoint: The checkpoint.
    """
    composed, rest = _composed([], [*arguments, f"--ckpt_path={checkpoint}"], values)
    _load(composed, rest, checkpoint)
    folder = _resumes_in(checkpoint, None) or checkpoint.parent
    return Request(composed, rest, checkpoint, {}, folder=folder, trust=trust.active())


def _load(composed: Composed, arguments: list[str], checkpoint: Path | None) -> None:
    """Imports the techniques that are named, after a look at what is not to be imported."""
    trust.check(composed.values, _origin(composed, checkpoint))
    for entry in registered(_words(composed.values, arguments)):
        entry.load()


def _wanted(layers: list[Layer], arguments: list[str]) -> str:
    """Returns the checkpoint that the user names; "" for none."""
    option = last(arguments, "ckpt_path")
    if option == "":
        raise ConfigError("--ckpt_path is empty: give last, a checkpoint or a run folder, or leave it out.")
    return option or last_written(layers, "ckpt_path") or ""


def _checkpoint(wanted: str, root: Path, named: bool, job: str | None) -> Path | None:
    """Returns the checkpoint to resume; None for a new run.

    Args:
        wanted: The checkpoint that the user names, or "".
        root: What the run's folder is named after.
        named: Whether a config of a run, or the user, names that folder; otherwise `last` is looked for in all runs.
        job: What the launcher calls the job.
    """
    below = root if named else Path("runs")
    if job and (found := restarts.checkpoint(job, root, wanted, below)):
        return found
    if not wanted:
        return None
    from plugins.checkpoints.finding import resolve

    try:
        return resolve(wanted, below, runs=not named, resumes=True)
    except (OSError, ValueError) as error:  # a name that is too long, or that no file can have
        raise ConfigError(f"--ckpt_path {wanted[:200]} cannot be read: {error.args[-1]}.") from error


@dataclass
class _Stored:
    """The run of a checkpoint.

    Attributes:
        folder: The run folder to resume in; None: a new one.
        root: What run folders are named after.
        record: The checkpoint's record.
        values: The configuration in it.
    """

    folder: Path | None
    root: Path
    record: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def _stored(checkpoint: Path, written: str | None, root: Path) -> _Stored:
    """Returns the run of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        written: The folder that the user names, if any.
        root: What folders are named after without a checkpoint.
    """
    from plugins.checkpoints.checkpoint import parse_config
    from plugins.checkpoints.checkpoint import record as record_of

    record = record_of(checkpoint)
    stored = parse_config(record["config"], checkpoint) if record.get("config") else {}
    stored = {key: value for key, value in stored.items() if key in SECTIONS}
    stored = stored_in_steps(stored, record)
    folder = _resumes_in(checkpoint, written)
    root = _root_of(stored, folder, root) if not written else root
    if folder is not None:
        stored_paths.check_links(folder)
    stored_paths.rebase(stored, folder)
    if isinstance(stored.get("trainer"), dict):
        stored["trainer"]["default_root_dir"] = str(root)
    return _Stored(folder, root, record, stored)


def _check_sections(composed: Composed) -> None:
    for section in ("trainer", "model"):
        if not isinstance(value := composed.values.get(section, {}), dict):
            place = composed.positions.get((section,), "--config")
            raise ConfigError(f"{place}: {section} is a section (`name: value` lines), not {value!r}.")


def _origin(composed: Composed, checkpoint: Path | None) -> Callable[[Keys], str]:
    """Returns a function that gives the place of a value; what no file of the user holds is the checkpoint's."""
    nearest_place = finder(composed.positions)

    def where(keys: Keys) -> str:
        own = checkpoint is None or keys in composed.positions
        return nearest_place(keys) if own else f"{checkpoint} (stored config), {'.'.join(map(str, keys))}"

    return where


def _resumes_in(checkpoint: Path, written: str | None) -> Path | None:
    """Returns the run folder of a checkpoint; None if the user names another, or the checkpoint is in none."""
    from plugins.checkpoints.finding import is_run_of
    from plugins.cli.runs.run_folder import of_checkpoint

    folder = of_checkpoint(checkpoint)
    return folder if folder is not None and (not written or is_run_of(folder, Path(written))) else None


def _root_of(stored: Mapping[str, Any], folder: Path | None, default: Path) -> Path:
    """Returns what a resumed run's folder is named after: as the checkpoint says, if the checkpoint is in that folder."""
    from plugins.checkpoints.finding import is_run_of

    if folder is None:
        return default
    recorded = _written_root(stored)
    return Path(recorded) if recorded and is_run_of(folder, Path(recorded)) else folder


def _composed(layers: list[Layer], arguments: list[str], below: dict[str, Any]) -> tuple[Composed, list[str]]:
    """Returns the configs over `below`, short names resolved, and the arguments that are left."""
    changes, places, arguments = take_options(arguments, parse_value)
    composed = merge_layers(layers, below)
    if changes:
        change(composed.values, composed.positions, changes, places, merge, missing=composed.missing)
    resolve_names(composed.values)
    rest = _move_positions(composed, arguments)
    if composed.missing:
        raise ConfigError(composed.missing[0])
    composed.values.pop("ckpt_path", None)
    _check_sections(composed)
    return composed, rest


def _move_positions(composed: Composed, arguments: list[str]) -> list[str]:
    """Moves `--model.network=GPT` and the like into the config; resolves `--trainer.callbacks+=X` in place."""
    result, moved = list(arguments), set()
    for at, count, key, value in option_values(arguments):
        kinds = POSITIONS.get(key.removesuffix("+"), ())
        entry = entry_of(value, kinds) if kinds else None
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
        earlier = {(start, words) for start, words, name, _ in option_values(arguments[:at]) if name == key}
        moved |= {i for start, words in (*earlier, (at, count)) for i in range(start, start + words)}
    return [word for index, word in enumerate(result) if index not in moved and word]


def _words(value: Any, arguments: list[str]) -> set[str]:
    """Returns what may be a name: whole values of the configs (not words of a text), words of the arguments."""
    leaves = [leaf if isinstance(leaf, list) else [leaf] for _, leaf in _leaves(value, "")]
    words = [word for line in arguments for word in re.findall(r"[A-Za-z_][\w.]*", line)]
    return {*words, *(str(item) for items in leaves for item in items)}


def _written_root(values: Mapping[str, Any]) -> str | None:
    trainer = values.get("trainer")
    written = trainer.get("default_root_dir") if isinstance(trainer, Mapping) else None
    return str(written) if written else None


def _default_root(names: list[str]) -> str:
    return f"runs/{Path(names[0]).stem if names else 'run'}"


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
