"""Records of a user's file, or of a small sample that comes with this package."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.errors import ConfigError, nearest
from toolkit.bounded import read_error, read_inside
from toolkit.evaluation import Item
from toolkit.record_lines import records

SAMPLES = Path(__file__).parent / "samples"
"""Sentences of this project's own: a dozen or two of each kind, to try an evaluation with and not to judge a model by."""

KINDS = {str: "a text", bool: "true or false"}


def read_items(
    file: str | None, sample: str, fields: Mapping[str, type], owner: str, group: str = "group"
) -> list[Item]:
    """Returns the records of a file as items, named by their numbers, with the fields as content.

    Args:
        file: JSON Lines, or CSV with a head line; None: the sample.
        sample: Name of the sample.
        fields: Name -> type of what each record has to have; texts must not be blank.
        owner: The evaluation's argument, for messages.
        group: The field with the name of a record's group, which may be missing.

    Raises:
        ConfigError: If the file cannot be read, is empty, or a record lacks a field.
    """
    found = []
    for number, record in enumerate(_records(file, sample, fields, owner), 1):
        label = record.get(group)
        content = [record[name] for name in fields]
        found.append(Item(str(number), content, label if isinstance(label, str) else ""))
    return found


def _records(file: str | None, sample: str, fields: Mapping[str, type], owner: str) -> list[dict[str, Any]]:
    """Returns the checked records."""
    path = Path(file).expanduser() if file else SAMPLES / sample
    try:
        given = list(_table(path) if path.suffix == ".csv" else records(str(path)))
    except ConfigError as error:
        raise ConfigError(f"{owner}: {error}") from error
    if not given:
        raise ConfigError(f"{owner}: {path} has no records.")
    for place, record in given:
        for name, kind in fields.items():
            value = record.get(name)
            if not isinstance(value, kind) or (isinstance(value, str) and not value.strip()):
                hint = "" if name in record else nearest(name, list(record))
                raise ConfigError(f"{owner}: {place}: the field {name!r} has to be {KINDS[kind]}.{hint}")
    return [record for _, record in given]


def _table(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = read_inside(path.parent, path.name).decode("utf-8-sig")
        for number, row in enumerate(csv.DictReader(io.StringIO(text, newline="")), 1):
            yield f"{path}, record {number}", row
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error) if isinstance(error, csv.Error) else read_error(error)
        raise ConfigError(f"{path}: {reason}") from error
