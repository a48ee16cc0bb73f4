"""Reader and transforms as one pipeline of documents, and the counts of what becomes of them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow

from core.contracts import Reader, Reject, Transform, raise_reject
from datamodules.preparation.flow import SHOWN, Example, Flow, merged
from datamodules.preparation.kept_documents import KeptDocuments, kept_in
from datamodules.preparation.readers.opened_files import printable
from datamodules.preparation.split import SPLITS
from toolkit.arrow_columns import flags
from toolkit.skipped_input import SkipsInput
from toolkit.transform_counts import KeepsCounts

MOST_LISTED = 10_000
"""Most rejected documents of a task that are listed; all are counted."""

DESCRIBED = ("language", "license")
"""Columns of metadata by whose values tokens are counted."""

_MOST_VALUES, _MOST_SHOWN = 1000, 100
"""Values of such a column that are counted apart in a task, and characters of each: anybody may have written them."""


def example(text: str, name: str) -> Example:
    """Returns a document as an example, chosen by a hash of its id and text."""
    digest = hashlib.blake2b(f"{name}\0{text}".encode(), digest_size=8).hexdigest()
    return digest, printable(name), text[:SHOWN]


@dataclass
class Pipeline:
    """A reader and the transforms after it, as every process runs them.

    Args:
        reader: The source.
        transforms: In their order.
        reduced: Index of a transform that needs all documents -> the file with what its `reduce` wrote.
        strict: Whether the first input that cannot be read stops the run.
        kept: Where documents are kept before a transform that sees all; None: they are read again each time.
    """

    reader: Reader
    transforms: Sequence[Transform] = ()
    reduced: dict[int, Path] = field(default_factory=dict)
    strict: bool = True
    kept: KeptDocuments | None = None

    def batches(
        self, task: Mapping[str, Any], tally: Tally, until: int | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        """Yields a task's documents after the first `until` transforms (None: all); never an empty batch."""
        transforms = list(enumerate(self.transforms[:until]))
        kept_here = self.kept.open(task["number"], len(transforms)) if self.kept else None
        if kept_here is None:
            documents = self._read(task, tally)
        else:
            begin, file = kept_here
            documents, transforms = kept_in(file, tally.restore), transforms[begin:]
        counting = {index for index, transform in transforms if isinstance(transform, KeepsCounts)}
        for index, transform in transforms:
            if transform.needs_all_documents:
                transform.load(self.reduced[index])
        for kept in documents:
            for index, transform in transforms:
                if len(kept):
                    kept = transform.apply(kept, tally.drop(index, kept))
                    tally.flow.count(index + 1, kept)
                    if index in counting:
                        tally.counted[index].update(transform.take_counts())  # type: ignore[attr-defined]
            if len(kept):
                yield kept

    def _read(self, task: Mapping[str, Any], tally: Tally) -> Iterator[pyarrow.RecordBatch]:
        """Yields a task's documents as the reader gives them, without blank ones."""
        for batch in self.reader.read(task, self._reject(tally)):
            full = _without_blanks(batch, tally)
            tally.flow.count(0, full)
            yield full

    def _reject(self, tally: Tally) -> Reject:
        """Returns what the reader calls with input that cannot be used, or that it skips."""
        reject = raise_reject if self.strict else tally.reject
        if not isinstance(self.reader, SkipsInput):
            return reject
        skipped = frozenset(self.reader.skipped)

        def rejected(source: str, place: str, reason: str, details: str, lost: int = 0) -> None:
            if reason in skipped:
                tally.skipped[reason] += 1
            else:
                reject(source, place, reason, details, lost)

        return rejected


def _without_blanks(batch: pyarrow.RecordBatch, tally: Tally) -> pyarrow.RecordBatch:
    full = [not (not text or text.isspace()) for text in batch["text"].to_pylist()]
    if all(full):
        return batch
    tally.blank += full.count(False)
    return batch.filter(flags(full))


class Tally:
    """Counts the documents of a task: kept, rejected, skipped, dropped and blank."""

    def __init__(self, transforms: int) -> None:
        self.rejected: Counter[str] = Counter()
        self.rejects: list[dict[str, str]] = []  # the first ones
        self.skipped: Counter[str] = Counter()
        self.lost_bytes = 0
        self.blank = 0
        self.dropped: list[Counter[str]] = [Counter() for _ in range(transforms)]
        self.counted: list[Counter[str]] = [Counter() for _ in range(transforms)]
        self.examples: list[dict[str, list[Example]]] = [defaultdict(list) for _ in range(transforms)]
        self.flow = Flow(transforms)
        self.splits = {split: Counter(documents=0, tokens=0, bytes=0) for split in SPLITS}
        self.sources: dict[str, Counter[str]] = defaultdict(Counter)
        self.lengths: Counter[int] = Counter()
        self.described: dict[str, Counter[str]] = {}

    def reject(self, source: str, place: str, reason: str, details: str, lost: int = 0) -> None:
        """Counts input that cannot be used; `lost` is the number of bytes of the source's files lost with it."""
        self.rejected[reason] += 1
        self.lost_bytes += lost
        if len(self.rejects) < MOST_LISTED:
            line = {
                "source": source,
                "place": printable(place),
                "reason": reason,
                "details": printable(details),
            }
            self.rejects.append(line)

    def drop(self, transform: int, batch: pyarrow.RecordBatch) -> Callable[..., None]:
        """Returns a function that counts the documents that a transform drops of a batch, and keeps some of them."""

        def count(reason: str, rows: int | Sequence[int], shown: Sequence[str] | None = None) -> None:
            if isinstance(rows, int):
                self.dropped[transform][reason] += rows
                return
            self.dropped[transform][reason] += len(rows)
            texts, names = batch["text"], batch["id"]
            found = [example(texts[row].as_py(), names[row].as_py()) for row in rows]
            if shown is not None:
                found = [(*one[:2], text[:SHOWN]) for one, text in zip(found, shown, strict=True)]
            self.examples[transform][reason] = merged(self.examples[transform][reason], found)

        return count

    def add(self, split: str, source: str, size: int, tokens: int) -> None:
        """Counts a document: size of its text in bytes, and its tokens including the end-of-text id."""
        self.splits[split].update(documents=1, tokens=tokens, bytes=size)
        self.sources[source].update(documents=1, tokens=tokens, bytes=size)
        self.lengths[tokens.bit_length() - 1] += 1

    def describe(self, batch: pyarrow.RecordBatch, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Counts tokens of documents by language and license, where a reader or transform gives these.

        Args:
            batch: What they were read as.
            rows: The row in the batch of each.
            tokens: Tokens of each.
        """
        for name in DESCRIBED:
            if name in batch.schema.names:
                values, counts = batch[name].to_pylist(), self.described.setdefault(name, Counter())
                for row, number in zip(rows, tokens, strict=True):
                    value = "unknown" if values[row] is None else printable(str(values[row])[:_MOST_SHOWN])
                    counts[value if value in counts or len(counts) < _MOST_VALUES else "others"] += number

    def record(self) -> dict[str, Any]:
        """Returns the counts as JSON values; `lengths[k]` counts documents of 2**k to 2**(k+1)-1 tokens."""
        return {
            "splits": self.splits,
            "sources": self.sources,
            "described": self.described,
            "lengths": {str(key): self.lengths[key] for key in sorted(self.lengths)},
            "rejected": self.rejected,
            "first_rejected": self.rejects[:1],
            "lost_bytes": self.lost_bytes,
            "skipped": self.skipped,
            "blank": self.blank,
            "dropped": self.dropped,
            "counted": self.counted,
            "examples": self.examples,
            "flow": self.flow.record(),
        }

    def state(self) -> dict[str, Any]:
        """Returns all counts as JSON values, for :meth:`restore`."""
        return self.record() | {"rejects": self.rejects}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Adds what another tally has counted before any document was stored."""
        for name, counts in vars(self).items():
            if isinstance(counts, Counter):
                counts.update(state.get(name, {}))  # earlier versions counted less
        self.rejects += state["rejects"]
        self.lost_bytes += state["lost_bytes"]
        self.blank += state["blank"]
        for index in range(len(self.dropped)):
            self.dropped[index].update(state["dropped"][index])
            self.counted[index].update(state["counted"][index])
            for reason, some in state["examples"][index].items():
                self.examples[index][reason] = merged(self.examples[index][reason], some)
        self.flow.add(state["flow"])
