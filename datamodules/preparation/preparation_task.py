"""One task of a preparation: reads a piece of the source and writes its documents' tokens, in any process."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from core.contracts import Reader, TokenWriter, Transform, raise_reject
from core.errors import ConfigError
from core.files import durable

SPLITS = ("train", "validation")
RECORD, COUNTS, REJECTS = "record.json", "counts.npy", "rejects.jsonl"

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass
class Pipeline:
    """A reader and the stages behind it, as every process runs them.

    Args:
        reader: The source.
        stages: In their order.
        conclusions: Index of a stage that surveys -> the file that it concluded with.
        strict: Whether the first input that cannot be read stops the run.
    """

    reader: Reader
    stages: Sequence[Transform] = ()
    conclusions: dict[int, Path] = field(default_factory=dict)
    strict: bool = True

    def batches(
        self, task: Mapping[str, Any], tally: Tally, until: int | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        """Yields a task's documents behind the first `until` stages, or behind all; never an empty batch."""
        stages = self.stages[:until]
        for index, stage in enumerate(stages):
            if stage.surveys:
                stage.learn(self.conclusions[index])
        for batch in self.reader.read(task, raise_reject if self.strict else tally.reject):
            kept = _without_blanks(batch, tally)
            for index, stage in enumerate(stages):
                if len(kept):
                    kept = stage.apply(kept, tally.drop(index))
            if len(kept):
                yield kept


def _without_blanks(batch: pyarrow.RecordBatch, tally: Tally) -> pyarrow.RecordBatch:
    full = [not (not text or text.isspace()) for text in batch["text"].to_pylist()]
    if all(full):
        return batch
    tally.blank += full.count(False)
    return batch.filter(pyarrow.array(full))


class Tally:
    """Counts what becomes of a task's documents."""

    def __init__(self, stages: int) -> None:
        self.rejected: list[dict[str, str]] = []
        self.blank = 0
        self.dropped: list[Counter[str]] = [Counter() for _ in range(stages)]
        self.splits = {split: Counter(documents=0, tokens=0) for split in SPLITS}
        self.sources: dict[str, Counter[str]] = defaultdict(Counter)
        self.lengths: Counter[int] = Counter()

    def reject(self, source: str, place: str, reason: str, details: str) -> None:
        """Notes input that cannot be used."""
        self.rejected.append({"source": source, "place": place, "reason": reason, "details": details})

    def drop(self, stage: int) -> Callable[[str, int], None]:
        """Returns what counts the documents that a stage drops."""

        def count(reason: str, number: int) -> None:
            self.dropped[stage][reason] += number

        return count

    def add(self, split: str, source: str, size: int, tokens: int) -> None:
        """Counts a document: its text in bytes, and its tokens, the end-of-text id included."""
        self.splits[split].update(documents=1, tokens=tokens)
        self.sources[source].update(documents=1, tokens=tokens, bytes=size)
        self.lengths[tokens.bit_length() - 1] += 1

    def record(self) -> dict[str, Any]:
        """Returns the counts as JSON values; `lengths` has n at k for n documents of 2**k to 2**(k+1)-1 tokens."""
        return {
            "splits": self.splits,
            "sources": self.sources,
            "lengths": {str(key): self.lengths[key] for key in sorted(self.lengths)},
            "rejected": Counter(line["reason"] for line in self.rejected),
            "first_rejected": self.rejected[:1],
            "blank": self.blank,
            "dropped": self.dropped,
        }


@dataclass
class JSONEncoder:
    """Encodes as the tokenizer of a tokenizer.json does, loaded at first use, in each process anew."""

    path: Path

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.path.read_text(encoding="utf-8"))
        tokenizer.encode_special_tokens = True  # no part of the JSON: what spells one in a text is text
        return tokenizer

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        return [
            encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return JSONEncoder, (self.path,)


@dataclass
class PreparationTask:
    """Reads, transforms, splits, encodes and writes one task's documents to a folder of its own.

    The folder, `parts/NUMBER`, appears by one rename, when everything in it is on disk: a task is done or not
    begun. Doing it again gives the same bytes.

    Args:
        pipeline: Reader and stages.
        encode: Texts -> their ids.
        writer: Stores the ids.
        vocab_size: Number of ids.
        end_of_text_id: Put behind each document.
        bound: Documents with a hash below it are held out for validation; see :func:`text_hash`.
        parts: The folder of the tasks' folders.
    """

    pipeline: Pipeline
    encode: Encode
    writer: TokenWriter
    vocab_size: int
    end_of_text_id: int
    bound: int
    parts: Path

    def __call__(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Does the task unless it is done; returns its record."""
        part = self.parts / f"{task['number']:06}"
        found = part.exists()
        if not found:
            temporary = self.parts / f"{part.name}.{uuid.uuid4().hex}.tmp"  # on any machine no other's
            try:
                self._write(task, temporary)
                durable.sync_all(temporary)
                temporary.rename(part)
                durable.sync(self.parts)
            except OSError as error:
                if not part.exists():  # else another process was first, with the same
                    where = error.filename or temporary
                    raise ConfigError(
                        f"{where}: {durable.reason(error)}.\nWhat is done so far is kept: make room, and run the "
                        "same again."
                    ) from error
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return read_record(part) | {"found": found}

    def _write(self, task: Mapping[str, Any], folder: Path) -> None:
        folder.mkdir()
        tally, held_out = Tally(len(self.pipeline.stages)), []
        counts = np.zeros((2, self.vocab_size), np.int64)
        training = self._training(task, tally, counts, held_out)
        if (first := next(training, None)) is not None:
            self._store(chain([first], training), folder / "train")
        if held_out:
            self._store(held_out, folder / "validation")
        record = tally.record() | {"files": _digests(folder)}
        np.save(folder / COUNTS, counts)
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in tally.rejected]
        (folder / REJECTS).write_text("".join(lines), encoding="utf-8")
        (folder / RECORD).write_text(json.dumps(record), encoding="utf-8")

    def _store(self, documents: Iterable[np.ndarray], folder: Path) -> None:
        folder.mkdir()
        self.writer.write(documents, folder, self.vocab_size)  # type: ignore[arg-type]

    def _training(
        self, task: Mapping[str, Any], tally: Tally, counts: np.ndarray, held_out: list[np.ndarray]
    ) -> Iterator[np.ndarray]:
        """Yields the training documents' ids, counts all, and collects those that are held out."""
        for batch in self.pipeline.batches(task, tally):
            texts = batch["text"].to_pylist()
            found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
            for text, source, encoded in zip(
                texts, batch["source"].to_pylist(), self.encode(texts), strict=True
            ):
                raw = text.encode()
                split = int(text_hash(raw) < self.bound)
                found[split].append(self._stored(encoded))
                tally.add(SPLITS[split], source, len(raw), len(encoded) + 1)
            for frequencies, group in zip(counts, found, strict=True):
                if group:
                    frequencies += np.bincount(np.concatenate(group), minlength=len(frequencies))
            held_out += found[1]
            yield from found[0]

    def _stored(self, encoded: list[int]) -> np.ndarray:
        """Returns a document's ids with the end-of-text id, as they are stored."""
        ids = np.array([*encoded, self.end_of_text_id], np.uint32)
        if ids.max() >= self.vocab_size:
            raise ConfigError(
                f"The tokenizer gives the id {ids.max():,} with a vocab_size of {self.vocab_size:,}, which its ids "
                "must lie below.\nMend its vocab_size, or take another tokenizer."
            )
        return ids.astype(np.uint16) if self.vocab_size <= 1 << 16 else ids


def text_hash(text: bytes) -> int:
    """Returns a text's place among all, from 0 to 2**64 - 1: equal texts have the same."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def read_record(part: Path) -> dict[str, Any]:
    """Returns what a finished task noted.

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
    """Returns size and SHA-256 of each file of tokens, by its name below the folder."""
    found = {}
    for path in sorted(folder.glob("*/*")):
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = {"bytes": stream.tell(), "sha256": digest}
    return found
