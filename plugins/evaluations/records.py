"""The records of a JSON Lines file, as items of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from core.errors import ConfigError, nearest
from toolkit.evaluation import Item
from toolkit.record_lines import records


def record_items(
    source: str, fields: Sequence[str], most: int, group_by: str | None, owner: str
) -> list[Item]:
    """Returns the first records, each with these fields; its id is the file's name and the line.

    Args:
        source: A .jsonl file.
        fields: What of a record is the content of an item, and has to be there.
        most: How many records, at most.
        group_by: The field that names the group of a record; None: they have none.
        owner: The evaluation, for messages.

    Raises:
        ConfigError: If the file cannot be read, there is no record, or one lacks a field.
    """
    found = []
    for place, record in islice(records(source), most):
        for name in (*fields, *([group_by] if group_by else [])):
            if record.get(name) in (None, ""):
                what = "is empty" if name in record else "is missing"
                raise ConfigError(
                    f"{place}: the field {name!r}, which {owner} reads, {what}.{nearest(name, list(record))}\n"
                    f"Its fields: {', '.join(record)[:200]}."
                )
        group = str(record[group_by])[:80] if group_by else ""
        at = f"{Path(source).name}:{place.rpartition(':')[2]}"
        found.append(Item(at, {name: record[name] for name in fields}, group))
    if not found:
        raise ConfigError(f"{owner}: {source} has no records.")
    return found


def as_texts(value: Any) -> list[str]:
    """Returns a text, a number or a list of such as texts."""
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]
