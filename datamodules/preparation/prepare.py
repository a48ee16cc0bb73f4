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

from core.configuration.command_parser import Parser
from core.data.prepared import is_remote
from core.errors import ConfigError
from core.technique import technique

_OURS = ("manifest.json", "report.md", "report.json", "lengths.png", "rejects.jsonl", "tokenizer.json", "train",
         "validation", "parts")  # fmt: skip
"""What a prepared folder holds besides plan.json; the manifest first: without it nobody takes the rest for whole."""


@technique(paper="own work: idempotent tasks, each published by one rename; the manifest is written last")
def prepare(arguments: list[str]) -> int:
    """Turns text into tokens on disk: --config NAME_OR_FILE; interrupted, the same command goes on.

    The config is that of a run: its section `data` says what is read and with which stages. Train on the result
    with --data.source=DIR.

    Example:
        python -m core prepare --config data/text --data.source=~/corpus --output prepared/corpus
    """
    parser = Parser(
        prog="python -m core prepare",
        description=prepare.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--config", "-c", action="append", required=True, help="a config; several compose")
    parser.add_argument("--output", metavar="DIR", help="where to write; by default prepared/NAME_OF_CONFIG")
    parser.add_argument("--overwrite", action="store_true", help="replace what another configuration wrote")
    parser.add_argument("--data.KEY", metavar="VALUE", help="changes an option of the config, as in `fit`")
    options, rest = parser.parse_known_args(arguments)
    folder = _output(options.output or f"prepared/{Path(options.config[0]).stem}")
    preparation, source = _built(options.config, rest)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _claimed(folder):
            _prepare(preparation, source, folder, options.overwrite)
    except OSError as error:
        from core.files import durable

        raise ConfigError(
            f"{error.filename or folder}: {durable.reason(error)}.\nWhat is done so far is kept: mend it (make "
            "room, say), and run the same again."
        ) from error
    return 0


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


def _prepare(preparation: Any, source: str, folder: Path, overwrite: bool) -> None:
    from datamodules.preparation.preparation_progress import watched
    from datamodules.preparation.preparation_report import figures, write_report

    plan = preparation.plan()
    _take(folder, plan, overwrite)
    begin = time.perf_counter()
    if (folder / "manifest.json").exists():
        print(f"{folder} is finished already.", file=sys.stderr)
        shutil.rmtree(folder / "parts", ignore_errors=True)
    else:
        print(f"Preparing {source} in {folder}: {len(plan['tasks']):,} tasks", file=sys.stderr, flush=True)
        preparation.run(folder, source, watched)
    write_report(folder)
    told = figures(json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    documents, tokens = (
        told[f"train_{what}"] + told[f"validation_{what}"] for what in ("documents", "tokens")
    )
    print(f"{documents:,} documents, {tokens:,} tokens in {time.perf_counter() - begin:.1f} s")
    if rejected := sum(told["rejected"].values()):
        print(f"{rejected:,} documents could not be used: {folder}/rejects.jsonl")
    print(
        f"Report: {folder}/report.md\nTrain on it: python -m core fit --config quickstart --data.source={folder}"
    )


def _built(names: list[str], arguments: list[str]) -> tuple[Any, str]:
    """Builds the preparation that the section `data` of the composed configs describes; its source, too."""
    from jsonargparse import ArgumentError, ArgumentParser

    from core import catalog
    from core.configuration.arguments import option_values
    from core.configuration.building import Builder
    from core.configuration.class_check import ClassChecker
    from core.configuration.config_files import compose
    from core.configuration.mistakes import explain, finder, laid_over
    from core.configuration.request import resolve_names
    from core.preflight import check
    from core.selection import Run, selection
    from datamodules.preparation.token_preparation import build

    composed = compose(names)
    resolve_names(composed.values)
    told = [(key, value) for _, _, key, value in option_values(arguments)]
    for key, _ in told:
        if not key.startswith("data."):
            raise ConfigError(
                f"--{key}: prepare takes options of the section data, such as --data.source=~/corpus."
            )
    values, places = laid_over(composed.values, composed.positions, told)
    data = values.get("data") if isinstance(values.get("data"), dict) else {}
    given = dict(data.get("init_args") or {})
    parser = ArgumentParser(exit_on_error=False)
    known = set(parser.add_function_arguments(build, fail_untyped=True))
    if (
        not data.get("class_path", "").endswith("PretrainDataModule")
        or not given.keys() <= known | _OF_READING
    ):
        explain(composed.values, composed.positions, told)
        raise ConfigError(
            f"{names[-1]}: `data:` is not a PretrainDataModule; prepare needs one (configs/data/text.yaml)."
        )
    chosen = {key: value for key, value in given.items() if key in known}
    for entry in catalog.registered(_names(chosen)):
        entry.load()
    ClassChecker(finder(places)).section(build, chosen, ("data", "init_args"))
    builder = Builder()
    parser.add_instantiator(builder, object)
    try:
        parsed = parser.parse_object(chosen)
        plain = {"data": {"init_args": parsed.as_dict()}}
        check(Run(selection(plain), plain, places))
        return build(**vars(parser.instantiate(parsed))), str(chosen.get("source", ""))
    except ConfigError:
        raise
    except (ArgumentError, TypeError, ValueError) as error:
        if builder.failed is not None and isinstance(builder.failed[1], ConfigError):
            raise builder.failed[1] from error
        explain(composed.values, composed.positions, told)
        raise ConfigError("\n".join(str(error).splitlines()[:6])) from error


_OF_READING = {"packing", "cache_dir", "cache_bytes", "storage_options", "sequence_length", "batch_size", "shuffle",
               "seed", "num_workers"}  # fmt: skip
"""Options of PretrainDataModule that have no say in what is written; others are looked up, which takes seconds."""


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
    from core.files import durable

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
