"""Proofs for transforms, which change or drop documents: each document alone decides, in whatever process."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow

from conformance.case import Case
from conformance.data import build, tells_apart, variants
from conformance.proof import proof, require
from conformance.runs import in_subprocess
from conformance.workshop import VARIED, WORDS, workshop
from core.contracts import Transform

Row = tuple[Any, ...]
Result = tuple[list[Row], Counter[str]]
"""The rows that are left, and how many were dropped for each reason."""

COLUMNS = ["text", "source", "id", "date"]
"""The last is metadata, not known of each document: transforms leave it as it is."""

SIZES = (1, 7, 1000)
"""Rows of a batch; the last holds complete pieces."""


def rows() -> list[Row]:
    """Returns documents, short and long ones, with duplicates here and there and unusual characters."""
    texts = [" ".join(WORDS[(n * step) % len(WORDS)] for step in range(n % 50 + 1)) for n in range(100)]
    texts += [*VARIED, *texts[90:95], texts[95] + " more"]
    return [
        (text, f"source-{number % 3}", f"file:{number}", f"2024-{number % 12 + 1:02}" if number % 5 else None)
        for number, text in enumerate(texts)
    ]


def pieces(size: int) -> list[list[pyarrow.RecordBatch]]:
    """Returns the documents as two pieces of a source, in batches of `size` rows."""
    parts = rows()[:60], rows()[60:]
    return [[_batch(part[at : at + size]) for at in range(0, len(part), size)] for part in parts]


def _batch(some: Sequence[Row]) -> pyarrow.RecordBatch:
    columns = [pyarrow.array(column, pyarrow.large_string()) for column in zip(*some, strict=True)]
    return pyarrow.record_batch(columns, COLUMNS)


def conclusion(transform: Transform) -> Path | None:
    """Lets a transform that has to see all documents first see them; returns the file that its `reduce` writes."""
    if not transform.needs_all_documents:
        return None
    folder = Path(mkdtemp(dir=workshop()))
    findings = [folder / str(number) for number in range(2)]
    for path, batches in zip(findings, pieces(SIZES[-1]), strict=True):
        transform.map(iter(batches), path)
    transform.reduce(findings, folder / "conclusion")
    return folder / "conclusion"


def applied(transform: Transform, learned: Path | None, size: int = SIZES[-1]) -> Result:
    """Returns what a transform makes of the documents."""
    if learned is not None:
        transform.load(learned)
    dropped: Counter[str] = Counter()
    left: list[Row] = []
    for batch in (batch for piece in pieces(size) for batch in piece):

        def drop(
            reason: str, rows: int | Sequence[int], shown: Sequence[str] | None = None, batch: Any = batch
        ) -> None:
            number = _number(rows, batch)
            dropped[reason] += number
            require(
                shown is None or len(shown) == number,
                f"`drop` was called with {number} rows and other texts to show",
            )

        found = transform.apply(batch, drop)
        require(
            found.schema.names[: len(COLUMNS)] == COLUMNS,
            f"a batch has the columns {', '.join(found.schema.names)}, not {', '.join(COLUMNS)} and those it adds",
        )
        left += zip(*(found[name].to_pylist() for name in found.schema.names), strict=True)
    return left, +dropped


def _number(rows: int | Sequence[int], batch: pyarrow.RecordBatch) -> int:
    if isinstance(rows, int):
        return rows
    require(
        len(set(rows)) == len(rows) and all(0 <= row < len(batch) for row in rows),
        f"`drop` was called with the rows {list(rows)[:5]} of a batch of {len(batch)}",
    )
    return len(rows)


def apply_to_all(transform: Transform) -> Result:
    """Returns what a transform makes of the documents after it has seen them all, if it has to."""
    return applied(transform, conclusion(transform))


@proof("data", contract="Transform")
def looks_at_each_document_alone(case: Case) -> None:
    """The same documents are left, changed in the same way, whatever batches they come in."""
    transform = build(case, Transform)
    learned = conclusion(transform)
    usual = applied(transform, learned)
    for size in SIZES:
        _same(applied(transform, learned, size), usual, f"in batches of {size} and of {SIZES[-1]}")


@proof("data", contract="Transform")
def leaves_names_and_order(case: Case) -> None:
    """The documents that are left keep source, id, metadata and order, and the dropped ones are counted."""
    left, dropped = apply_to_all(build(case, Transform))
    waiting: Iterator[Any] = iter(row[1:] for row in rows())
    for _, *others in left:
        known = tuple(others[: len(COLUMNS) - 1])
        require(
            known in waiting,  # takes the next ones up to it
            f"{', '.join(map(str, known))} is no row of the input, or not in its place",
        )
    require(all(isinstance(text, str) for text, *_ in left), "a text is not a string")
    missing = len(rows()) - len(left)
    require(dropped.total() == missing, f"{missing} rows are gone, {dropped.total()} were reported to `drop`")
    require(all(isinstance(reason, str) and reason for reason in dropped), "a reason is no text, or empty")


@proof("data", contract="Transform")
def does_the_same_in_another_process(case: Case) -> None:
    """A new instance, and one that is sent to another process, give the same result."""
    transform = build(case, Transform)
    learned = conclusion(transform)
    usual = applied(transform, learned)
    _same(applied(build(case, Transform), learned), usual, "of a second instance, and of the first")
    path = Path(mkdtemp(dir=workshop())) / "result"
    in_subprocess(_noted, pickle.dumps(build(case, Transform)), learned, path)
    _same(pickle.loads(path.read_bytes()), usual, "in another process, and in this one")


def _noted(pickled: bytes, learned: Path | None, path: Path) -> None:
    path.write_bytes(pickle.dumps(applied(pickle.loads(pickled), learned)))


@proof("data", contract="Transform")
def its_fingerprint_tells_results_apart(case: Case) -> None:
    """The fingerprint is JSON, the same for the same arguments, and another where the result is."""
    tells_apart(case, Transform, apply_to_all, variants(case, Transform))


def _same(found: Result, usual: Result, where: str) -> None:
    (one, lost), (other, lost_usually) = found, usual
    apart = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    require(
        apart is None,
        f"{where}, row {apart} is {_shown(one, apart)} and {_shown(other, apart)}",
    )
    require(len(one) == len(other), f"{where}, {len(one)} and {len(other)} rows are left")
    require(lost == lost_usually, f"{where}, {dict(lost)} and {dict(lost_usually)} are dropped")


def _shown(rows: Sequence[Row], index: int | None) -> str:
    return repr(rows[index or 0])[:120]
