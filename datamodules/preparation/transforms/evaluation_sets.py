"""Reads the texts of evaluation sets: JSON Lines, Parquet, and task folders of lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import yaml
from pyarrow import parquet

from core.errors import ConfigError
from toolkit.bounded import open_inside, parse_json, read_error, read_inside

SUFFIXES = (".jsonl", ".parquet")
_MOST_LINE_BYTES = 1 << 24
_MOST_YAML_BYTES = 1 << 19
_MOST_INCLUDES = 16
_TEMPLATES = ("doc_to_decontamination_query", "doc_to_text")
_PLACEHOLDER = re.compile(r"\{\{-?\s*([A-Za-z_]\w*)")


class EvaluationSet(NamedTuple):
    """A set of items, as it was found.

    Attributes:
        name: Its name in reports: the file's, or that of the task.
        texts: Of each item the fields, joined or each alone, with the item's number from 0.
        digests: SHA-256 of each file that was read.
    """

    name: str
    texts: list[tuple[int, str]]
    digests: list[str]


class _Source(NamedTuple):
    """The files of one set, with the fields to read."""

    name: str
    files: list[Path]
    fields: Sequence[str]
    whole: bool  # whether lists of strings count, too
    task: Path | None = None


def read_sets(sets: Sequence[str], fields: Sequence[str], joined: bool) -> list[EvaluationSet]:
    """Returns the sets that some paths name.

    Args:
        sets: Files (.jsonl, .parquet), or folders with tasks of lm-evaluation-harness.
        fields: Names of the fields with text; `a.b` is field b of the object in a.
        joined: Whether the fields of an item make one text.

    Raises:
        ConfigError: If something cannot be read, or has none of the fields.
    """
    sources = [source for name in sets for source in _sources(Path(name).expanduser(), fields)]
    seen = Counter(source.name for source in sources)
    found = []
    for source in sources:
        texts = [
            text for path, start in _numbered(source.files) for text in _texts(path, start, source, joined)
        ]
        if not texts:
            raise ConfigError(_nothing(source))
        own = source.task or source.files[0]
        name = source.name if seen[source.name] == 1 else f"{own.resolve().parent.name}/{source.name}"
        read = [*source.files, *([source.task] if source.task else [])]
        found.append(EvaluationSet(name, texts, [_digest(path) for path in read]))
    return found


def _nothing(source: _Source) -> str:
    names = next((sorted(record) for path in source.files for record in _records(path)), [])
    return (
        f"Decontaminate.sets: no item of {source.files[0]} has text in {', '.join(source.fields) or 'a field'}.\n"
        f"Name those that do in `fields`. It has: {', '.join(map(str, names))[:300] or 'nothing'}."
    )


def _sources(path: Path, fields: Sequence[str]) -> Iterator[_Source]:
    if path.is_dir():
        tasks = sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")])
        sources = [source for task in tasks if (source := _task(task, fields))]
        if not sources:
            raise ConfigError(
                f"Decontaminate.sets: {path} has no task of lm-evaluation-harness (a .yaml file with `task`).\n"
                "Name the files themselves (.jsonl, .parquet), or the folder of a task with its data."
            )
        yield from sources
        return
    if path.suffix not in SUFFIXES or not path.is_file():
        what = "is not there" if not path.exists() else f"is no {' or '.join(SUFFIXES)} file"
        raise ConfigError(
            f"Decontaminate.sets: {path} {what}.\nGive such files, or folders with tasks of lm-evaluation-harness."
        )
    yield _Source(path.stem, [path], fields, True)


# --- tasks of lm-evaluation-harness -----------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML whose tags of its own (`!function`) stand for nothing: no code is imported."""


_Loader.add_multi_constructor("!", lambda *_: None)


def _task(path: Path, fields: Sequence[str]) -> _Source | None:
    """Returns what a task's file names; None: it is a group, or the common part of others."""
    values = _yaml(path)
    name = values.get("task")
    if not isinstance(name, str) or not name or path.name.startswith("_"):
        return None
    return _Source(
        name, _data_files(path, values), fields or _template_fields(path, values), bool(fields), path
    )


def _yaml(path: Path, depth: int = 0) -> dict[str, Any]:
    try:
        content = read_inside(path.parent, path.name)
        if len(content) > _MOST_YAML_BYTES:
            raise ValueError(f"it has more than {_MOST_YAML_BYTES >> 10} KiB")
        values = yaml.load(content, _Loader)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Decontaminate.sets: {path}: {read_error(error)}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"Decontaminate.sets: {path} is no YAML: {str(error)[:200]}") from error
    values = values if isinstance(values, dict) else {}
    included = values.get("include")
    if isinstance(included, str) and depth < _MOST_INCLUDES:
        return _yaml(path.parent / Path(included).name, depth + 1) | values
    return values


def _data_files(path: Path, values: Mapping[str, Any]) -> list[Path]:
    """Returns the files of the split that is evaluated; without their names all data beside the task's file."""
    options = values.get("dataset_kwargs")
    named = options.get("data_files") if isinstance(options, dict) else None
    if isinstance(named, dict):
        splits = [values.get("test_split") or values.get("validation_split")]
        named = next((named[split] for split in splits if split in named), list(named.values()))
    listed = [one for group in (named if isinstance(named, list) else [named]) for one in _flat(group)]
    if not listed:
        files = sorted(file for file in path.parent.iterdir() if file.suffix in SUFFIXES)
    else:
        files = [
            path.parent / one if (path.parent / one).exists() else path.parent / Path(one).name
            for one in listed
        ]
    bad = [file for file in files if file.suffix not in SUFFIXES or not file.is_file()]
    if bad or not files:
        raise ConfigError(
            f"Decontaminate.sets: the task in {path} has no data here: {bad[0] if bad else 'no .jsonl or .parquet file'}.\n"
            "Nothing is downloaded. Put its data beside the .yaml file, or name the data themselves, with `fields`."
        )
    return files


def _flat(group: Any) -> list[str]:
    return [one for one in (group if isinstance(group, list) else [group]) if isinstance(one, str)]


def _template_fields(path: Path, values: Mapping[str, Any]) -> list[str]:
    """Returns the names of the fields in a task's template, which is not executed."""
    for key in _TEMPLATES:
        template = values.get(key)
        if isinstance(template, str):
            names = _PLACEHOLDER.findall(template)
            if not names and template.isidentifier():
                names = [template]
            if names:
                return list(dict.fromkeys(names))
    raise ConfigError(
        f"Decontaminate.sets: {path} names no field in {' or '.join(_TEMPLATES)} (functions and expressions are not "
        "executed).\nName the fields with the text in `fields`."
    )


# --- records ----------------------------------------------------------------------------------------------------------


def _numbered(files: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    """Yields each file with the number of its first item; those of files behind each other go on."""
    start = 0
    for path in files:
        yield path, start
        if path != files[-1]:
            start += sum(1 for _ in _records(path))


def _texts(path: Path, start: int, source: _Source, joined: bool) -> Iterator[tuple[int, str]]:
    for number, record in enumerate(_records(path), start):
        values = [text for name in source.fields for text in _strings(_value(record, name), source.whole)]
        for text in ["\n".join(values)] if joined and values else values:
            yield number, text


def _value(record: Any, name: str) -> Any:
    first, _, rest = name.partition(".")
    if not isinstance(record, dict):
        return None
    return record[name] if name in record else _value(record.get(first), rest) if rest else None


def _strings(value: Any, whole: bool) -> list[str]:
    if isinstance(value, list) and whole:
        return [one for one in value if isinstance(one, str)]
    return [value] if isinstance(value, str) else []


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the items of a file."""
    try:
        if path.suffix == ".parquet":
            with open_inside(path.parent, path.name) as stream:
                for batch in parquet.ParquetFile(stream).iter_batches():
                    yield from batch.to_pylist()
            return
        with open_inside(path.parent, path.name) as stream:
            number = 0
            while line := stream.readline(_MOST_LINE_BYTES + 1):
                number += 1
                if not line.isspace():
                    yield _parsed(path, number, line.removeprefix(b"\xef\xbb\xbf"))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        what = read_error(error) if isinstance(error, OSError | ValueError) else str(error)
        raise ConfigError(f"Decontaminate.sets: {path}: {what[:200]}.\nMend it, or get it again.") from error


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        if len(line) > _MOST_LINE_BYTES:
            raise ValueError(f"it has more than {_MOST_LINE_BYTES >> 20} MiB")
        record = parse_json(line, unique=False)
        if not isinstance(record, dict):
            raise ValueError(f"it is a {type(record).__name__}, not an object with fields")
    except ValueError as error:
        raise ConfigError(
            f"Decontaminate.sets: {path}, line {number}: {str(error)[:200]}.\nMend it, or get it again."
        ) from error
    return record


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
