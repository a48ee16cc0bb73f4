"""What datatrove's filters decide on the quality corpus, to compare ours with."""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pyarrow

from tests.support.datatrove_decisions import OFF, TABLE
from tests.support.quality_corpus import documents


@cache
def texts() -> list[str]:
    """Returns the corpus; it is the one that datatrove read."""
    found = documents()
    assert hashlib.sha256("\0".join(found).encode()).hexdigest() == table()["documents"]
    return found


@cache
def table() -> dict[str, Any]:
    """Returns the stored decisions."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def configurations(name: str) -> list[dict[str, Any]]:
    """Returns what a filter of datatrove decided with each of its configurations."""
    return [one for one in table()["decisions"] if one["filter"] == name]


def name_of(one: Mapping[str, Any]) -> str:
    """Returns a name of a configuration, for pytest."""
    options = {
        key: value for key, value in one["options"].items() if value != OFF[one["filter"]].get(key, "")
    }
    return "-".join(f"{key}={value}" for key, value in options.items()) or "defaults"


def translated(
    options: Mapping[str, Any], names: Mapping[str, str], off: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns our arguments for those of datatrove; `off` has theirs that leave a rule out, where not None."""
    return {names[key]: None if key in off and value == off[key] else value for key, value in options.items()}


def theirs(one: Mapping[str, Any]) -> list[str | None]:
    """Returns datatrove's reason for each document; None: kept."""
    reasons = [None, *one["reasons"][1:]]
    return [reasons[ord(character) - ord("0")] for character in one["documents"]]


def differing(
    ours: Callable[[str], str | None], one: Mapping[str, Any], reasons: Mapping[str, str | None]
) -> list[tuple[int, str | None, str | None]]:
    """Returns the documents of which our reason is not theirs, with both.

    Args:
        ours: Our `reason`.
        one: A configuration of datatrove.
        reasons: Ours for each of theirs.
    """
    pairs = enumerate(zip(map(ours, texts()), theirs(one), strict=True))
    named = ((at, own, their and reasons[their]) for at, (own, their) in pairs)
    return [(at, own, their) for at, own, their in named if own != their]


def batch(some: list[str]) -> pyarrow.RecordBatch:
    """Returns texts as a batch of documents."""
    return pyarrow.record_batch(
        {"text": some, "source": ["s"] * len(some), "id": list(map(str, range(len(some))))}
    )
