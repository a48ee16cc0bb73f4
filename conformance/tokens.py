"""Proofs for what stores tokens and what reads them as batches: token writers and packings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp

from conformance.case import Case
from conformance.data import POSITIONS, build
from conformance.proof import proof, require
from conformance.workshop import workshop
from core.contracts import IGNORED_LABEL, PackedBatches, Packing, TokenWriter

LENGTHS = (5, 1, 30, 2, 12, 7, 64, 1, 3, 19) * 4
T, BATCH = 8, 4

Rows = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Input ids and labels of each row."""


def documents(first: int = 0) -> Iterator[list[int]]:
    """Yields documents of different lengths whose ids count up from `first`, so that each tells its place."""
    for length in LENGTHS:
        yield list(range(first, first + length))
        first += length


def written(case: Case, first: int = 0) -> Path:
    """Returns a new folder with the documents, written by the writer of the case's configuration."""
    folder = Path(mkdtemp(dir=workshop()))
    writer: TokenWriter = case.build(*POSITIONS[TokenWriter])
    count = writer.write(documents(first), folder, first + sum(LENGTHS))
    require(count == sum(LENGTHS), f"`write` returned {count} for {sum(LENGTHS)} tokens")
    return folder


def rows(batches: PackedBatches, count: int | None = None) -> list[Rows]:
    """Returns the rows of each batch, of `count` batches or until they end."""
    found = []
    for _, batch in islice(batches, count):
        pairs = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        found.append([(tuple(inputs), tuple(labels)) for inputs, labels in pairs])
    return found


@proof("data", contract="TokenWriter")
def what_it_writes_is_read_back(case: Case) -> None:
    """Every token that a writer is given is read back, in order, also ids that take more than 16 bits."""
    packing: Packing = case.build(*POSITIONS[Packing])
    for first in (0, 100_000):
        batches = packing.batches(written(case, first), sequence_length=1, batch_size=1, pad=True)
        pairs = [pair for batch in rows(batches) for pair in batch]
        found = [inputs[0] for inputs, _ in pairs] + [pairs[-1][1][0]]
        expected = [token for document in documents(first) for token in document]
        apart = next((n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
        require(
            found == expected,
            f"{len(found)} tokens for {len(expected)}; token {apart} is {found[apart : apart + 1]}, "
            f"not {expected[apart : apart + 1]}",
        )


@proof("data", contract="TokenWriter")
def writes_the_same_bytes(case: Case) -> None:
    """A writer makes the same files of the same documents."""
    one, other = (_contents(written(case)) for _ in range(2))
    different = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    require(not different, f"written twice, {', '.join(different)} is not the same")


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@proof("data", contract="Packing")
def labels_are_the_next_tokens(case: Case) -> None:
    """A packing labels each position with the token that follows it, or not at all, and no token twice."""
    packing: Packing = build(case, Packing)
    options = {"sequence_length": T, "batch_size": BATCH}
    for shuffle in (False, True):
        batches = packing.batches(written(case), **options, shuffle=shuffle, pad=True)
        found = rows(batches)
        require(len(found) == len(batches), f"{len(found)} batches, `len` says {len(batches)}")
        labels = []
        for inputs, row in (pair for batch in found for pair in batch):
            require(
                len(inputs) == len(row) <= T, f"a row has {len(inputs)} ids and {len(row)} labels, T is {T}"
            )
            wrong = [(i, n) for i, n in zip(inputs, row, strict=True) if n not in (i + 1, IGNORED_LABEL)]
            require(not wrong, f"token {wrong and wrong[0][0]} is labelled {wrong and wrong[0][1]}")
            labels += [label for label in row if label != IGNORED_LABEL]
        require(len(labels) == len(set(labels)), "a token is a label twice in one epoch")
        require(labels, "there is no label")


@proof("data", contract="Packing")
def ranks_share_each_batch(case: Case) -> None:
    """Two ranks of half the batch size together read the rows that one reads, over the end of an epoch."""
    packing: Packing = build(case, Packing)
    folder = written(case)
    one, *two = (
        packing.batches(
            folder, sequence_length=T, batch_size=BATCH // size, rank=rank, world_size=size, shuffle=True
        )
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    require(len(one) == len(two[0]) == len(two[1]), "the number of batches depends on the number of ranks")
    count = 2 * len(one) + 1
    found = zip(rows(one, count), *(rows(half, count) for half in two), strict=True)
    for number, (whole, *halves) in enumerate(found):
        shared = sorted(halves[0] + halves[1])
        require(sorted(whole) == shared, f"batch {number} holds other rows on two ranks")


@proof("data", contract="Packing")
def a_pass_can_begin_anywhere(case: Case) -> None:
    """A pass that begins at the cursor after a batch, read back from JSON, gives the batches that follow."""
    packing: Packing = build(case, Packing)
    folder = written(case)
    options = {"sequence_length": T, "batch_size": BATCH, "shuffle": True, "seed": 3}
    batches = packing.batches(folder, **options)  # type: ignore[arg-type]
    count = 2 * len(batches)
    cursors = [cursor for cursor, _ in islice(batches, count)]
    whole = rows(batches, count)
    for number in (0, len(batches) - 1, len(batches)):
        later = packing.batches(folder, **options)  # type: ignore[arg-type]
        later.cursor = json.loads(json.dumps(cursors[number]))
        found = rows(later, count - number - 1)
        require(
            found == whole[number + 1 :], f"from the cursor after batch {number} on it gives other batches"
        )
    labels = [label for batch in rows(batches, 2 * count) for _, row in batch for label in row if label >= 0]
    each = len(set(labels))
    require(labels[:each] != labels[each : 2 * each], "two epochs are in the same order, though it shuffles")
