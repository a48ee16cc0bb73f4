"""Readers and packings with a mistake, for the fourth set of faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, DocumentSource, PackedBatches, Packing
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments

Rows = dict[str, Tensor]


class FirstPage(DocumentSource):
    """Reads documents page by page from a service, and gets the first page each time.

    Args:
        source: A JSON Lines file.
        size: Documents of a page.
        pages: How many pages are asked for.
    """

    def __init__(self, source: str, size: int, pages: int) -> None:
        self.source, self.size, self.pages = JSONLinesDocuments(source), size, pages

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the source's, and how it is read."""
        return {**self.source.fingerprint(), "size": self.size, "pages": self.pages}

    def documents(self) -> Iterator[str]:
        """Yields the documents of all pages."""
        page = list(islice(self.source.documents(), self.size))
        for _ in range(self.pages):
            yield from page


class Edited(Packing):
    """A packing whose batches are changed.

    Args:
        packing: The packing.
        edit: Name of a function of this module, which is called with a batch and with its number, from 1 on.
        training: Whether only training batches are changed.
        arguments: Further arguments of the function.
    """

    def __init__(self, packing: Packing, edit: str, training: bool = True, **arguments: Any) -> None:
        self.packing, self.training = packing, training
        self.edit: Callable[..., Rows] = partial(globals()[edit], **arguments)

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns the packing's batches, changed."""
        batches: Any = self.packing.batches(folder, **order)
        if order.get("pad") and self.training:
            return batches  # type: ignore[no-any-return]
        read, number = batches.read, 0

        def edited(rows: Sequence[Any], own: slice) -> Rows:
            nonlocal number
            number += 1
            return self.edit(dict(read(rows, own)), number)

        batches.read = edited
        return batches  # type: ignore[no-any-return]


def unlabelled_row(batch: Rows, number: int, begin: int) -> Rows:
    """From a batch on, each first row has no label, as a prompt that was cut before its answer."""
    if number >= begin:
        batch["labels"][0] = IGNORED_LABEL
    return batch


def after_template(batch: Rows, number: int, token: int) -> Rows:
    """Only what follows the last token of a template has labels, and most rows do not have the template."""
    seen = (batch["input_ids"] == token).cumsum(1) > 0
    return {**batch, "labels": batch["labels"].where(seen, IGNORED_LABEL)}


def moved_ids(batch: Rows, number: int, begin: int, by: int, vocabulary: int) -> Rows:
    """From a batch on, shards were written by a tokenizer with special tokens in front: ids are others."""
    if number < begin:
        return batch
    ids, labels = batch["input_ids"], batch["labels"]
    moved = ((labels + by) % vocabulary).where(labels != IGNORED_LABEL, IGNORED_LABEL)
    return {**batch, "input_ids": (ids + by) % vocabulary, "labels": moved}


def types_as_positions(batch: Rows, number: int) -> Rows:
    """Token types, all 0, are passed as positions."""
    return {**batch, "position_ids": torch.zeros_like(batch["input_ids"])}


def encoded_file(batch: Rows, number: int, begin: int, end: int, vocabulary: int) -> Rows:
    """A few batches are of a file in base64: letters and digits in no order."""
    if not begin <= number < end:
        return batch
    rows, length = batch["input_ids"].shape
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(vocabulary // 2, (rows, length + 1), generator=generator)
    return {**batch, "input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


class SlowDisk(Packing):
    """A packing whose training rows come from a slow disk.

    Args:
        packing: The packing.
        seconds: How long a row takes.
        rank: The rank whose disk is slow; None: all are.
    """

    def __init__(self, packing: Packing, seconds: float, rank: int | None = None) -> None:
        self.packing, self.seconds, self.rank = packing, seconds, rank

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns the packing's batches."""
        batches: Any = self.packing.batches(folder, **order)
        if order.get("pad") or self.rank not in (None, order["rank"]):
            return batches  # type: ignore[no-any-return]
        read = batches.read

        def slow(rows: Sequence[Any], own: slice) -> Rows:
            time.sleep(self.seconds * batches.batch_size)
            return dict(read(rows, own))

        batches.read = slow
        return batches  # type: ignore[no-any-return]


class Wrong(Packing):
    """Batches of a packing, with a mistake.

    Args:
        packing: The packing.
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing


class SameOnEachRank(Wrong):
    """A packing that does not know of ranks: each trains on the same rows."""

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns the packing's batches, in training those of a single rank."""
        alone = {} if order.get("pad") else {"rank": 0, "world_size": 1}
        return self.packing.batches(folder, **(order | alone))


class AllFiles(Wrong):
    """A packing whose pattern of training files matches the validation file, too: half of the rows are of it."""

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns the packing's batches, in training mixed with those of the validation split."""
        batches: Any = self.packing.batches(folder, **order)
        if order.get("pad"):
            return batches  # type: ignore[no-any-return]
        held_out: Any = iter(self.packing.batches(folder.with_name("validation"), **order))
        read = batches.read

        def mixed(rows: Sequence[Any], own: slice) -> Rows:
            batch, other = dict(read(rows, own)), dict(next(held_out)[1])
            half = len(batch["labels"]) // 2
            return {key: torch.cat((batch[key][:half], other[key][half:])) for key in batch}

        batches.read = mixed
        return batches  # type: ignore[no-any-return]
