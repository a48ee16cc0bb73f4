"""One task of a preparation: reads a piece of the source and writes the tokens of its documents, in any process."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from core import durable
from core.contracts import TokenWriter
from core.errors import ConfigError
from datamodules.preparation.diversity import SAMPLE, DiversitySample
from datamodules.preparation.document_table import DOCUMENTS, DocumentTable
from datamodules.preparation.pipeline import Pipeline, Tally
from datamodules.preparation.split import SPLITS, Split, keys_of

RECORD, COUNTS, REJECTS = "record.json", "counts.npy", "rejects.jsonl"

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass
class PreparationTask:
    """Reads, transforms, splits, encodes and writes one task's documents to a folder of its own.

    The folder `parts/NUMBER` is renamed into place when everything in it is on disk: a task is either finished or not
    there at all. Running it again gives the same bytes.

    Args:
        pipeline: Reader and transforms.
        encode: Returns the ids of each text.
        writer: Stores the ids.
        vocab_size: Number of ids.
        end_of_text_id: Appended to each document.
        split: Decides what is held out for validation and tests.
        parts: Parent of the tasks' folders.
        leading: Ids that begin each document, such as that of a BOS token.
        sampled: Share of the documents whose diversity is measured for the report; 0: there is none.
    """

    pipeline: Pipeline
    encode: Encode
    writer: TokenWriter
    vocab_size: int
    end_of_text_id: int
    split: Split
    parts: Path
    leading: tuple[int, ...] = ()
    sampled: float = 0.0

    def __call__(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the task unless it is finished; returns its record."""
        part = self.parts / f"{task['number']:06}"
        found = part.exists()
        if not found:
            temporary = self.parts / f"{part.name}.{uuid.uuid4().hex}.tmp"  # unique among all machines
            try:
                self._write(task, temporary)
                durable.sync_all(temporary)
                temporary.rename(part)
                durable.sync(self.parts)
            except OSError as error:
                if not part.exists():  # otherwise another process finished the same task first
                    where = error.filename or temporary
                    raise ConfigError(
                        f"{where}: {durable.write_error(error)}.\nWhat is done so far is kept: make room, and run the "
                        "same again."
                    ) from error
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        if self.pipeline.kept:
            self.pipeline.kept.remove(task["number"])
        return read_record(part) | {"found": found, "number": task["number"]}

    def _write(self, task: Mapping[str, Any], folder: Path) -> None:
        folder.mkdir()
        tally = Tally(len(self.pipeline.transforms))
        held_out: list[list[np.ndarray]] = [[] for _ in SPLITS[1:]]
        counts = np.zeros((2, self.vocab_size), np.int64)  # of training and validation
        sample = DiversitySample(folder / SAMPLE, self.sampled)
        with DocumentTable(folder / DOCUMENTS) as table:
            training = self._training(task, tally, counts, held_out, table, sample)
            if (first := next(training, None)) is not None:
                self._store(chain([first], training), folder / "train")
        for split, documents in zip(SPLITS[1:], held_out, strict=True):
            if documents:
                self._store(documents, folder / split)
        record = tally.record() | {"files": _digests(folder)}
        np.save(folder / COUNTS, counts)
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in tally.rejects]
        (folder / REJECTS).write_text("".join(lines), encoding="utf-8")
        (folder / RECORD).write_text(json.dumps(record), encoding="utf-8")

    def _store(self, documents: Iterable[np.ndarray], folder: Path) -> None:
        folder.mkdir()
        self.writer.write(documents, folder, self.vocab_size)  # type: ignore[arg-type]

    def _training(
        self,
        task: Mapping[str, Any],
        tally: Tally,
        counts: np.ndarray,
        held_out: list[list[np.ndarray]],
        table: DocumentTable,
        sample: DiversitySample,
    ) -> Iterator[np.ndarray]:
        """Yields the ids of training documents, appends those of the other splits to `held_out`, and counts tokens."""
        for batch in self.pipeline.batches(task, tally):
            cut = [
                (split, part, row)
                for row, (text, key) in enumerate(zip(batch["text"].to_pylist(), keys_of(batch), strict=True))
                for split, part in self.split.parts(text, key)
            ]
            found: list[list[np.ndarray]] = [[] for _ in SPLITS]
            stored = [self._stored(encoded) for encoded in self.encode([part for _, part, _ in cut])]
            sources, names = batch["source"].to_pylist(), batch["id"].to_pylist()
            sample.add((names[row], sources[row], part) for split, part, row in cut if not split)
            for (split, part, row), ids in zip(cut, stored, strict=True):
                found[split].append(ids)
                tally.add(SPLITS[split], sources[row], len(part.encode()), len(ids))
            rows, sizes = [row for *_, row in cut], [len(ids) for ids in stored]
            tally.describe(batch, rows, sizes)
            table.add(batch, rows, [split for split, *_ in cut], sizes)
            for frequencies, group in zip(counts, found[: len(counts)], strict=True):
                if group:
                    frequencies += np.bincount(np.concatenate(group), minlength=len(frequencies))
            for documents, more in zip(held_out, found[1:], strict=True):
                documents += more
            yield from found[0]

    def _stored(self, encoded: list[int]) -> np.ndarray:
        """Returns a document's ids between those that begin and end it, in the type in which they are stored."""
        ids = np.array([*self.leading, *encoded, self.end_of_text_id], np.uint32)
        if ids.max() >= self.vocab_size:
            raise ConfigError(
                f"The tokenizer gives the id {ids.max():,} with a vocab_size of {self.vocab_size:,}, which its ids "
                "must lie below.\nCorrect its vocab_size, or use another tokenizer."
            )
        return ids.astype(np.uint16) if self.vocab_size <= 1 << 16 else ids


def read_record(part: Path) -> dict[str, Any]:
    """Returns the record of a finished task.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        return json.loads((part / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{part / RECORD} is damaged: {error}\nDelete {part} and run the same again."
        ) from error


def _digests(folder: Path) -> dict[str, Any]:
    """Returns size and SHA-256 of each token file, by its path in the folder."""
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in sorted(folder.glob("*/*"))}


def file_digest(path: Path) -> dict[str, Any]:
    """Returns size and SHA-256 of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": digest}
