"""Labels of records: names of classes, numbers, several classes of a record, a class for each word."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.errors import ConfigError, nearest
from datamodules.packing.grouped import Row
from datamodules.records.chats import WrongRecord, field
from datamodules.records.record_batches import Arrays
from datamodules.records.record_store import RecordStore

MOST_CLASSES = 1 << 16


def name_of(label: Any) -> str:
    """Returns the name of a label as it is in a file: a text, a whole number, or true and false."""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, str | int):
        return str(label)
    raise WrongRecord("a label is neither a text nor a whole number", f"it is {label!r}"[:100])


def found_names(labels: Iterable[Any], field: str) -> list[str]:
    """Returns the names of all labels: numbers in their order, or names in that of the alphabet.

    Raises:
        ConfigError: If there are fewer than two of them, or too many.
    """
    names = {name_of(label) for label in labels}
    if not 2 <= len(names) <= MOST_CLASSES:
        raise ConfigError(
            f'The field "{field}" of the training records has {len(names):,} different labels; classes are 2 to {MOST_CLASSES:,}.\n'
            "Numbers are learnt with data.task=values; name the field with data.label_field."
        )
    if all(name.removeprefix("-").isdigit() for name in names):
        return sorted(names, key=int)
    return sorted(names)


class LabelNames:
    """The classes, by name or number.

    Args:
        names: In the order of their ids.
        positions: Whether a number that is no name is the id of a class.
    """

    def __init__(self, names: Sequence[str], positions: bool) -> None:
        self.names, self.positions = list(names), positions
        self._ids = {name: number for number, name in enumerate(names)}

    def id(self, label: Any) -> int:
        """Returns the id of a label.

        Raises:
            WrongRecord: If there is no such class.
        """
        name = name_of(label)
        if name in self._ids:
            return self._ids[name]
        if self.positions and name.isdigit() and int(name) < len(self.names):
            return int(name)
        shown = ", ".join(self.names[:12])
        raise WrongRecord(
            "an unknown label", f"{name[:60]!r}; known are {shown}.{nearest(name, set(self.names))}"
        )


def number_of(record: Mapping[str, Any], name: str) -> float:
    """Returns a field that is a number, or the text of one.

    Raises:
        WrongRecord: If it is none, or not finite.
    """
    value = record.get(name)
    try:
        number = float(field(record, name, (str, int, float)))
    except ValueError:
        number = float("nan")
    if not np.isfinite(number):
        raise WrongRecord(f'the field "{name}" is no number', f"it is {value!r}"[:100])
    return number


@dataclass
class AtLabels:
    """Adds to a batch what belongs to the records of its labels.

    Args:
        name: Key of the tensor: (B, T), or (B, T, K) for K numbers of a record; 0 where there is no label.
        table: Number of each class; None: the record's own numbers.
        single: Whether a record has one number, and the tensor no dimension for it.
    """

    name: str
    table: np.ndarray | None = None
    single: bool = True

    def __call__(self, store: RecordStore, rows: Sequence[Row], batch: Arrays) -> Arrays:
        """Returns the batch with one array more, float32."""
        labels, documents = batch["labels"], batch["document_ids"]
        found = np.zeros((*labels.shape, 1 if self.single else store.width), np.float32)
        for line, row in enumerate(rows):
            for number, (record, _) in enumerate(row):
                here = (documents[line] == number) & (labels[line] >= 0)
                found[line, here] = (
                    store.values(record) if self.table is None else self.table[labels[line, here]][:, None]
                )
        return batch | {self.name: found[..., 0] if self.single else found}


def class_weights(counts: np.ndarray) -> np.ndarray:
    """Returns the weight of each class that makes all weigh alike, and a record 1 on average: n / (C n_c)."""
    return counts.sum() / (len(counts) * np.maximum(counts, 1))
