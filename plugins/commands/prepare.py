"""The command `prepare`: text to tokens, in several processes, once and for all."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.config_files import compose, find_config
from plugins.cli.configuration.trust import Trust, beside, take_option, trusting
from toolkit.prepared import is_remote, splits_of
from toolkit.sizes import readable

_OURS = (
    "manifest.json",
    "report.md",
    "report.html",
    "report.json",
    "lengths.png",
    "rejects.jsonl",
    "documents.parquet",
    "tokenizer.json",
    "train",
    "validation",
    "test",
    "parts",
)
"""What a prepared folder holds besides plan.json; the manifest first: without it the folder counts as unfinished."""


@technique(paper="own work: idempotent tasks, each published by one rename; the manifest is written last")
def prepare(arguments: list[str]) -> int:
    """Turns text into tokens on disk: --config NAME_OR_FILE; if interrupted, the same command continues.

    The config is that of a run: its section `data` names what is read and the data techniques (reader, tokenizer, ...). Train on the result
    with --data.source=DIR.

    Example:
        python -m core prepare --config data/text --data.source=~/corpus --output prepared/corpus
    """
    options, rest, trusted = _options(arguments)
    folder = _output(options.output or f"prepared/{Path(options.config[0]).stem}")
    own = beside(map(find_config, options.config), compose(options.config).values, rest)
    with trusting(Trust(trusted, own)):
        preparation, source = built(options.config, rest)
    if options.dry_run:
        return _show(preparation, source, folder)
    fresh = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _claimed(folder):
            try:
                _prepare(preparation, source, folder, options.overwrite)
            except ConfigError:
                if fresh and not _begun(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        from core import durable

        raise ConfigError(
            f"{error.filename or folder}: {durable.write_error(error)}.\nWhat is done so far is kept: correct this (free "
            "space, say), and run the same command again."
        ) from error
    return 0


def _options(arguments: list[str]) -> tuple[argparse.Namespace, list[str], tuple[str, ...]]:
    """Returns the command's own options, the others, and the modules that configs may import from."""
    parser = Parser(
        prog="python -m core prepare",
        description=prepare.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--config", "-c", action="append", required=True, help="a config; several compose")
    parser.add_argument("--output", metavar="DIR", help="where to write; by default prepared/NAME_OF_CONFIG")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and by whom")
    parser.add_argument("--overwrite", action="store_true", help="replace what another configuration wrote")
    parser.add_argument("--data.KEY", metavar="VALUE", help="changes an option of the config, as in `fit`")
    parser.add_argument(
        "--trust", metavar="MODULE", help="let the config import from a module; may be repeated"
    )
    trusted, arguments = take_option(arguments)
    options, rest = parser.parse_known_args(arguments)
    return options, rest, trusted


def _output(name: str) -> Path:
    """Returns the folder to write, which is on this machine: a task is published by renaming it."""
    if is_remote(name):
        raise ConfigError(
            f"--output is {name}: prepare writes folders of this machine. Upload what it wrote, the manifest last:"
            f"\n  aws s3 sync --exclude manifest.json prepared/corpus {name}"
            f"\n  aws s3 cp prepared/corpus/manifest.json {name.rstrip('/')}/manifest.json"
            "\n(or `rclone copy`), and train on it with --data.source."
        )
    return Path(name).expanduser()


def _show(preparation: Any, source: str, folder: Path) -> int:
    """Prints what would be done; writes nothing."""
    tasks = preparation.plan()["tasks"]
    size = sum(piece.get("bytes", 0) for task in tasks for piece in task.get("pieces", []))
    print(f"# {source}: {len(tasks):,} tasks, {readable(size)}, to {folder}")
    print(preparation.engine.describe(len(tasks)))
    return 0


def _prepare(preparation: Any, source: str, folder: Path, overwrite: bool) -> None:
    plan = preparation.plan()
    _take(folder, plan, overwrite)
    begin = time.perf_counter()
    if (folder / "manifest.json").exists():
        print(f"{folder} is finished already.", file=sys.stderr)
        shutil.rmtree(folder / "parts", ignore_errors=True)
    else:
        print(f"Preparing {source} in {folder}: {len(plan['tasks']):,} tasks", file=sys.stderr, flush=True)
    figures = preparation.finish(folder, source)
    documents, tokens = (
        sum(figures[f"{split}_{what}"] for split in splits_of(figures)) for what in ("documents", "tokens")
    )
    print(f"{documents:,} documents, {tokens:,} tokens in {time.perf_counter() - begin:.1f} s")
    print(f"Tokens for {figures['shares']}")
    if least := figures.get("validation_tails_from_bytes"):
        print(f"Documents are few or unequal: the last part of each of {least:,} bytes and more is held out.")
    if skipped := figures.get("skipped"):
        print(f"Skipped: {', '.join(f'{reason} ({count:,})' for reason, count in skipped.items())}")
    if rejected := sum(figures["rejected"].values()):
        print(f"{rejected:,} documents could not be used: {folder}/rejects.jsonl")
    if left_out := figures.get("left_out"):
        listing = ", ".join(f"{reason} ({count:,})" for reason, count in left_out.items())
        print(f"Not read: {listing}")
    print(
        f"Report: {folder}/report.html\nTrain on it: python -m core fit --config quickstart --data.source={folder}"
    )


def built(names: list[str], arguments: list[str]) -> tuple[Any, str]:
    """Builds the preparation that the section `data` of the composed configs describes; its source, too."""
    from jsonargparse import ArgumentError, ArgumentParser

    from core import catalog
    from plugins.cli.configuration.builder import Builder
    from plugins.cli.configuration.class_check import ClassChecker
    from plugins.cli.configuration.class_paths import registered
    from plugins.cli.configuration.mistakes import explain, finder, laid_over
    from plugins.cli.preflight import check
    from plugins.cli.selection import selection
    from toolkit.selection import Run

    build = catalog.offering("token_preparation", "data").load().build
    composed, changes = composed_config(names, arguments)
    values, places = laid_over(composed.values, composed.positions, changes)
    parser = ArgumentParser(exit_on_error=False)
    known = set(parser.add_function_arguments(build, fail_untyped=True))
    chosen = _chosen(values, known)
    if chosen is None:
        explain(composed.values, composed.positions, changes)
        raise ConfigError(
            f"{names[-1]}: `data:` is not a PretrainDataModule; prepare needs one (configs/data/text.yaml)."
        )
    for entry in registered(_names(chosen)):
        entry.load()
    checker = ClassChecker(finder(places))
    checker.section(build, chosen, ("data", "init_args"))
    builder = Builder()
    parser.add_instantiator(builder, object)
    try:
        parsed = parser.parse_object(chosen)
        plain = {"data": {"init_args": parsed.as_dict()}}
        checker.section(build, plain["data"]["init_args"], ("data", "init_args"))
        check(Run(selection(plain), plain, places))
        return build(**vars(parser.instantiate(parsed))), str(chosen.get("source", ""))
    except ConfigError:
        raise
    except (ArgumentError, TypeError, ValueError) as error:
        if builder.failed is not None and isinstance(builder.failed[1], ConfigError):
            raise builder.failed[1] from error
        explain(composed.values, composed.positions, changes)
        raise ConfigError("\n".join(str(error).splitlines()[:6])) from error


def composed_config(names: list[str], arguments: list[str]) -> tuple[Any, list[tuple[str, Any]]]:
    """Returns the composed configs with full class paths, and what the command line lays over them.

    Raises:
        ConfigError: If an option is not of the section `data`.
    """
    from plugins.cli.configuration.arguments import option_values
    from plugins.cli.configuration.class_paths import resolve_names

    composed = compose(names)
    resolve_names(composed.values)
    changes = [(key, value) for _, _, key, value in option_values(arguments)]
    for key, _ in changes:
        if not key.startswith("data."):
            raise ConfigError(
                f"--{key}: prepare takes options of the section data, such as --data.source=~/corpus."
            )
    return composed, changes


def _chosen(values: Mapping[str, Any], known: set[str]) -> dict[str, Any] | None:
    """Returns the options of the section `data` that say how to prepare; None if it is another data module's."""
    section = values.get("data")
    data: Mapping[str, Any] = section if isinstance(section, dict) else {}
    given = dict(data.get("init_args") or {})
    if not data.get("class_path", "").endswith("PretrainDataModule") or given.keys() - known - _OF_READING:
        return None
    return {key: value for key, value in given.items() if key in known}


_OF_READING = {
    "packing",
    "cache_dir",
    "cache_bytes",
    "storage_options",
    "sequence_length",
    "batch_size",
    "shuffle",
    "seed",
    "num_workers",
}
"""Options of PretrainDataModule that do not change what is written; others are looked up, which takes seconds."""


def _names(value: Any) -> set[str]:
    if isinstance(value, Mapping | list):
        items = value.values() if isinstance(value, Mapping) else value
        return set().union(*map(_names, items))
    return {value} if isinstance(value, str) else set()


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Keeps other processes from writing to the folder; the kernel forgets it when this one ends."""
    import fcntl
    import os

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another process is preparing {folder}. Wait for it, or choose another --output."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _take(folder: Path, plan: Mapping[str, Any], overwrite: bool) -> None:
    """Makes sure that what the folder holds was begun with the same plan, or that it is empty; notes the plan.

    Raises:
        ConfigError: If it holds something else.
    """
    from core import durable

    path, old = folder / "plan.json", None
    if path.exists():
        with suppress(ValueError):
            old = json.loads(path.read_text(encoding="utf-8"))
        if old != plan and not overwrite:
            raise ConfigError(
                f"{folder} was written with another configuration or source:\n{_difference(old, plan)}\n"
                "Choose another --output, or replace it with --overwrite."
            )
    elif any(not file.match(f".{path.name}.*.tmp") for file in folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty, and not a folder that prepare has written (it has no plan.json).\nChoose another "
            "--output."
        )
    for left in [*folder.glob("*.tmp"), *folder.glob("*/*.tmp")]:  # of a killed run; the folder is ours
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    if old == plan:
        return
    for name in _OURS:
        target = folder / name
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    durable.write(path, json.dumps(plan, indent=1) + "\n")


def _begun(folder: Path) -> bool:
    """Returns whether a folder holds anything that would have to be done again: a tokenizer, a map of all documents, a task."""
    return any(path.suffix != ".tmp" for path in (folder / "parts").glob("*"))


def _difference(old: Any, new: Mapping[str, Any]) -> str:
    """Returns up to four lines: which options differ, or which files."""
    if not isinstance(old, dict) or not isinstance(old.get("options"), dict):
        return "  its plan.json is damaged"
    before, after = _flat(old["options"]), _flat(new["options"])
    lines = [
        f"  {key}: {after.get(key, '(absent)')} (the folder has {before.get(key, '(absent)')})"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if not lines:
        known = [_pieces(plan) for plan in (old, new)]
        changed = sorted({json.loads(piece).get("path", "the text") for piece in known[0] ^ known[1]})
        lines = [f"  {path} has changed since, has come or gone" for path in changed]
    return "\n".join(lines[:4] or ["  its tasks"])


def _pieces(plan: Mapping[str, Any]) -> set[str]:
    return {
        json.dumps(piece, sort_keys=True) for task in plan["tasks"] for piece in task.get("pieces", [task])
    }


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {
            k: v for name, item in value.items() for k, v in _flat(item, f"{key}.{name}".strip(".")).items()
        }
    if isinstance(value, list):
        return _flat(dict(enumerate(value)), key)
    return {key: value}
