"""Data whose rows come from several sources, and can say which."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from core.contracts import PackedBatches
from core.errors import ConfigError
from toolkit.document_places import TABLE

__all__ = ["SOURCES", "HasSources", "MarksDocuments", "mark_stored_sources"]

SOURCES = "source_ids"
"""Key of a batch, (B, T) int64: the place in `source_tokens` of the source that a row is from; -1: padding."""

MOST, OTHERS = 50, "others"


@runtime_checkable
class HasSources(Protocol):
    """A data module that mixes sources.

    Attributes:
        source_tokens: Name of each source -> its training tokens, those of one epoch.
    """

    source_tokens: Mapping[str, int]

    def mark_sources(self) -> None:
        """Adds `source_ids` to all batches; called before there are loaders."""


@runtime_checkable
class MarksDocuments(Protocol):
    """Packed batches that can add `source_ids` by the document of each token."""

    def mark_documents(self, sources: np.ndarray) -> bool:
        """Adds them from the next batch on; returns whether it does.

        Args:
            sources: The number of the source of each document of the split, (documents,). Of another number of documents, nothing
                is added.
        """
        ...


def mark_stored_sources(data: Any) -> list[str]:
    """Makes a data module add `source_ids` to all batches, where its prepared folder was made from several sources.

    Args:
        data: The data module, after its `setup` and before there are loaders.

    Returns:
        The names of the sources, those with most tokens first; above 50, the rest of them is one, "others". None if there is one
        source, or the folder has no table of its documents.

    Raises:
        ConfigError: If the table cannot be read.
    """
    folder = getattr(data, "folder", None)
    if folder is None or not Path(folder, TABLE).is_file():
        return []
    names, splits = _read(Path(folder, TABLE))
    if len(names) > 1:
        vars(data)["packed"] = partial(_packed, data.packed, splits)  # in the place of the method
    return names if len(names) > 1 else []


def _packed(packed: Any, splits: Mapping[str, np.ndarray], split: str, **order: Any) -> PackedBatches:
    batches: PackedBatches = packed(split, **order)
    if isinstance(batches, MarksDocuments) and not batches.mark_documents(splits[split]):
        rank_zero_warn(
            f"{TABLE} does not have one row for each document of the {split} split: its sources are left out."
        )
    return batches


def _read(path: Path) -> tuple[list[str], dict[str, np.ndarray]]:
    """Returns the names of the sources, and for each split the number of the source of each document."""
    import pyarrow
    from pyarrow import parquet

    tokens: dict[str, int] = {}
    found: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    numbers: dict[str, int] = {}
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["split", "source", "tokens"]):
                for split, source, size in zip(
                    *(column.to_pylist() for column in batch.columns), strict=True
                ):
                    found[split].append(numbers.setdefault(str(source), len(numbers)))
                    tokens[str(source)] = tokens.get(str(source), 0) + size
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    names = sorted(numbers, key=lambda name: (-tokens[name], name))
    if len(names) > MOST:
        names = [*names[: MOST - 1], OTHERS]
    places = {name: place for place, name in enumerate(names)}
    place_of = np.array([places.get(name, len(names) - 1) for name in numbers], np.int32)
    return names, {split: place_of[np.array(of_split, np.int64)] for split, of_split in found.items()}
