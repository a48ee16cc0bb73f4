"""Turns documents into a folder of tokens: read, transform, split, train the tokenizer, encode, write."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from core import catalog
from core.contracts import DocumentSource, Engine, Reader, Tokenizer, TokenWriter, Transform
from core.data.prepared import check_shares
from core.errors import ConfigError
from core.files import durable
from core.technique import technique
from datamodules.preparation.engine_worker import over_tasks
from datamodules.preparation.manifest import FORMAT, Totals, write_manifest
from datamodules.preparation.preparation_task import JSONEncoder, Pipeline, PreparationTask, Tally, text_hash
from datamodules.preparation.source_files import undivided
from datamodules.preparation.survey_task import survey

PARTS, TOKENIZER, VOCABULARY = "parts", "tokenizer.json", "vocabulary.json"
_TRAINING_BYTES = 1 << 30
"""A tokenizer is trained on tasks, spread over the source, of about so many bytes altogether."""
_TEMPORARY = "preparing-"
_STALE_SECONDS = 24 * 3600

Watch = Callable[[Iterator[dict[str, Any]], int], Iterator[dict[str, Any]]]


@technique(paper="own work: split by a hash of the text; tasks and folders published by one rename")
@dataclass
class TokenPreparation:
    """Runs the stages from documents to a folder of tokens: for `prepare`, and for a run that finds none.

    The folder holds train/ and validation/ (what the writer wrote), tokenizer.json and manifest.json, which is
    written last. The source is cut into tasks, each of which writes its own shards: what comes out depends
    neither on the engine nor on interruptions.

    Documents are split by a hash of their text behind the stages: equal ones stay together, and one that is
    added moves no other. If need be, the smallest hash is held out and the largest trained on: no split is empty.

    Args:
        documents: The text.
        tokenizer: Trained on the training documents (of about 1 GiB of a larger source), then used on all.
        writer: Stores the token ids of a split.
        validation_fraction: Share of the documents that is held out.
        stages: What is done with documents before they are encoded, in this order.
        max_reject_fraction: Share of the source's documents that may be unusable; 0: the first one stops it.
        engine: Where tasks are worked on; None: in this process.

    Example:
        # TokenPreparation is run by the data module, on the stages that stand here
        data:
          class_path: PretrainDataModule
          init_args:
            source: ~/notes
            reader: TextDocuments
            stages: [{class_path: Normalise}]
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 4096}}
            writer: TokenShards
    """

    documents: DocumentSource
    tokenizer: Tokenizer
    writer: TokenWriter
    validation_fraction: float = 0.05
    stages: Sequence[Transform] = ()
    max_reject_fraction: float = 0.0
    engine: Engine | None = None

    def cached(self, cache_dir: Path, label: str) -> Path:
        """Returns the finished folder, named after text and options, written now if it was not there.

        Several processes may do this at once: one wins, and the others take its folder.

        Args:
            cache_dir: Where the folder is.
            label: Names the text to people.

        Raises:
            ConfigError: If there are fewer than two different documents, or nothing can be written.
        """
        identity = {"options": self.options(), "reader": dict(self.documents.fingerprint())}
        folder = cache_dir / _digest(identity)[:16]
        if (folder / "manifest.json").exists():
            return folder
        begin = time.perf_counter()
        print(f"Preparing {label}: once, later runs find it in {folder}", file=sys.stderr, flush=True)
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            _remove_stale(cache_dir)
            temporary = cache_dir / f"{_TEMPORARY}{uuid.uuid4().hex}"
            try:
                temporary.mkdir()
                totals = self.run(temporary, label)
                _publish(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except OSError as error:
            raise ConfigError(
                f"{error.filename or cache_dir}: {durable.reason(error)}.\nPrepared data goes to "
                f"data.cache_dir={cache_dir}, which must be writable and have room."
            ) from error
        told = f"{totals.documents:,} documents, {totals.tokens:,} tokens"
        print(f"Prepared {told} in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        return folder

    def run(self, folder: Path, label: str, watch: Watch = lambda records, number: records) -> Totals:
        """Writes a folder, or finishes one that was begun with the same tasks and options.

        Args:
            folder: An empty folder, or one that an earlier call has begun.
            label: Names the text to people.
            watch: Passes the records of finished tasks on, as they come; told the number of tasks.

        Raises:
            ConfigError: If the source is at fault, too much of it is unusable, or no document is kept.
        """
        parts = folder / PARTS
        parts.mkdir(exist_ok=True)
        over = partial(over_tasks, self.engine, parts)
        conclusions = survey(self._pipeline({}), self.tasks, parts, over)
        pipeline = self._pipeline(conclusions)
        bound = self._bound(pipeline)
        vocabulary, trained = self._train_tokenizer(pipeline, bound, folder)
        here = trained and self.engine is None  # then encoding takes all cores
        encode = self.tokenizer.encode_batch if here else JSONEncoder(folder / TOKENIZER)
        sizes = vocabulary["vocab_size"], vocabulary["end_of_text_id"]
        work = PreparationTask(pipeline, encode, self.writer, *sizes, bound, parts)
        seen = Totals(len(self.stages))
        for record in watch(over(work, self.tasks), len(self.tasks)):
            seen.add(record)
            seen.check_rejects(self.max_reject_fraction, final=False)
        stages = [{"name": type(stage).__name__} | _described(stage) for stage in self.stages]
        head = {"source": label, **self._identity(), **vocabulary, "stages": stages}
        return write_manifest(folder, parts, len(self.tasks), self.writer, head, self.max_reject_fraction)

    def plan(self) -> dict[str, Any]:
        """Returns what a begun folder must have been begun with to be gone on with, as JSON values."""
        return json.loads(
            json.dumps({"format": FORMAT, "options": self.options(), "tasks": self.tasks}, default=str)
        )

    def options(self) -> dict[str, Any]:
        """Returns what decides the tokens, but for the text, as JSON values."""
        return {
            "format": FORMAT,
            "reader": {"class": _class(self.documents), **self._reader.options()},
            "stages": [_described(stage) for stage in self.stages],
            "tokenizer": {"class": _class(self.tokenizer), **self.tokenizer.fingerprint()},
            "writer": {"class": _class(self.writer), **vars(self.writer)},
            "validation_fraction": self.validation_fraction,
        }

    @cached_property
    def tasks(self) -> list[dict[str, Any]]:
        """The pieces of the source, numbered."""
        return [task | {"number": number} for number, task in enumerate(self._reader.tasks())]

    @cached_property
    def _reader(self) -> Reader:
        return self.documents if isinstance(self.documents, Reader) else undivided(self.documents)

    def _pipeline(self, conclusions: dict[int, Path]) -> Pipeline:
        return Pipeline(self._reader, self.stages, conclusions, self.max_reject_fraction == 0)

    def _identity(self) -> dict[str, Any]:
        """Returns a digest of what decides the tokens: files by name and size, wherever they are and since when."""
        unchanged = [
            [
                {k: v for k, v in piece.items() if k not in ("path", "changed_ns")}
                for piece in task.get("pieces", [])
            ]
            for task in self.tasks
        ]
        return {"format": FORMAT, "digest": _digest({"options": self.options(), "pieces": unchanged})}

    def _texts(self, pipeline: Pipeline, tasks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        tally = Tally(len(self.stages))
        for task in tasks:
            for batch in pipeline.batches(task, tally):
                yield from batch["text"].to_pylist()

    def _bound(self, pipeline: Pipeline) -> int:
        """Returns the hash below which documents are held out; reads until there is one on either side."""
        bound = int(self.validation_fraction * 2**64)
        least, most = 2**64, -1
        for text in self._texts(pipeline, self.tasks):
            place = text_hash(text.encode())
            least, most = min(least, place), max(most, place)
            if least < bound <= most:
                return bound
        if most == -1:
            raise ConfigError(
                f"{self._label()}: there is no text: all documents are blank, unusable, or dropped by a stage."
            )
        if least == most:
            raise ConfigError(
                "data.source holds a single document: training and validation need different ones.\n"
                'Cut the text into several files, or into the lines of a .jsonl file: {"text": "..."}.'
            )
        return min(max(bound, least + 1), most)

    def _label(self) -> str:
        pieces = [piece["path"] for task in self.tasks for piece in task.get("pieces", []) if "path" in piece]
        return f"data.source ({', '.join(pieces[:2])}{', ...' if len(pieces) > 2 else ''})"

    def _train_tokenizer(self, pipeline: Pipeline, bound: int, folder: Path) -> tuple[dict[str, int], bool]:
        """Writes tokenizer.json unless it is there; returns the vocabulary's sizes, and whether it was written."""
        path = folder / PARTS / VOCABULARY
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8")), False
        size = sum(piece.get("bytes", 0) for task in self.tasks for piece in task.get("pieces", []))
        step = -(-size // _TRAINING_BYTES) or 1
        texts = self._texts(pipeline, self.tasks[::step])
        self.tokenizer.prepare(text for text in texts if text_hash(text.encode()) >= bound)
        durable.write(folder / TOKENIZER, self.tokenizer.to_json())
        sizes = {"vocab_size": self.tokenizer.vocab_size, "end_of_text_id": self.tokenizer.end_of_text_id}
        durable.write(path, json.dumps(sizes))
        return sizes, True


def build(
    reader: Callable[[str], DocumentSource],
    tokenizer: Tokenizer,
    writer: TokenWriter,
    source: str = "python-docs",
    validation_fraction: float = 0.05,
    stages: Sequence[Transform] = (),
    max_reject_fraction: float = 0.0,
    engine: Engine | None = None,
) -> TokenPreparation:
    """Returns what the options of `PretrainDataModule` of these names describe, with `LocalEngine` by default.

    Raises:
        ConfigError: If a share is out of range, or there is no such source.
    """
    check_shares(validation_fraction, max_reject_fraction)
    engine = engine or catalog.find("LocalEngine", "stages").load()()
    documents = reader(source)
    return TokenPreparation(
        documents, tokenizer, writer, validation_fraction, stages, max_reject_fraction, engine
    )


def _class(stage: Any) -> str:
    return f"{type(stage).__module__}.{type(stage).__qualname__}"


def _described(stage: Transform) -> dict[str, Any]:
    return {"class": _class(stage), "version": stage.version, **stage.fingerprint()}


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def _publish(temporary: Path, folder: Path) -> None:
    """Gives a finished folder its name once it is on disk: whatever happens, nobody sees half of it."""
    durable.sync_all(temporary)
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / "manifest.json").exists():  # else another process was first, with the same
            raise
    durable.sync(folder.parent)


def _remove_stale(cache_dir: Path) -> None:
    """Removes what killed runs left behind, once it has not changed for a day."""
    for folder in cache_dir.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # it may be finished, and renamed, at this moment
            newest = max(path.lstat().st_mtime for path in [folder, *folder.rglob("*")])
            if newest < time.time() - _STALE_SECONDS:
                shutil.rmtree(folder)
