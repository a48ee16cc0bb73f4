"""Turns documents into a folder of tokens: read, transform, split, train the tokenizer, encode, write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Implementation

from core import catalog, durable
from core.contracts import (
    DocumentSource,
    Engine,
    Reader,
    TokenFolder,
    Tokenizer,
    TokenPreparer,
    TokenWriter,
    Transform,
)
from core.errors import ConfigError, deprecated
from core.technique import technique
from datamodules.preparation.cached_folder import cached_folder
from datamodules.preparation.diversity import sampled_share
from datamodules.preparation.engines.engine_worker import over_tasks, return_memory
from datamodules.preparation.kept_documents import KeptDocuments, places
from datamodules.preparation.manifest import FORMAT, Totals, shares, source_bytes, write_manifest
from datamodules.preparation.map_task import map_reduce
from datamodules.preparation.pipeline import Pipeline, Tally
from datamodules.preparation.preparation_report import figures, write_report
from datamodules.preparation.preparation_task import PreparationTask
from datamodules.preparation.readers.file_reader import SingleTaskReader
from datamodules.preparation.split import Split, chosen_groups, chosen_split, keys_of
from datamodules.preparation.tokenizers.json_encoder import JSONEncoder
from datamodules.preparation.tokenizers.library_tokenizer import LibraryTokenizer
from datamodules.remote.litdata_folder import refuse_tokens
from datamodules.remote.remote_folder import open_remote
from toolkit.generation.prompts import leading_ids
from toolkit.prepared import (
    PLAN,
    is_remote,
    prepared_folder,
    read_manifest,
    read_tokenizer,
    split_folder,
    splits_of,
    stored_vocab_size,
)

PARTS, TOKENIZER, VOCABULARY, SPLIT = "parts", "tokenizer.json", "vocabulary.json", "split.json"
_TRAINING_BYTES = 1 << 30
"""Bytes of text, about, that a tokenizer is trained on: tasks evenly spaced over the source."""

Watch = Callable[[Iterator[dict[str, Any]], int], Iterator[dict[str, Any]]]


@technique(
    paper="own work: split by a hash of the text; tasks and folders published by one rename",
    offers=("token_preparation",),
)
@dataclass
class TokenPreparation(TokenPreparer):
    """Turns documents into a folder of tokens: for `prepare`, and for a run without prepared data.

    The folder holds train/, validation/ and, with a `test_fraction`, test/ (the writer's output), tokenizer.json and
    manifest.json, which is written last. The source is cut into tasks, each of which writes its own shards: the result depends neither on the
    engine nor on interruptions.

    Documents are split by a hash of their transformed text: equal documents stay together, and adding one moves no
    other. If that holds out less than half or more than twice of the wanted share, because documents are few or very
    unequal, the tail of each long document is held out instead; such a text then counts as two documents.

    Args:
        documents: The source of the text.
        tokenizer: Trained on the training documents (of about 1 GiB of a larger source), then used on all.
        writer: Stores the token ids of a split.
        validation_fraction: Share of the text that is held out for validation.
        transforms: Transforms that are applied to documents before they are encoded, in this order.
        max_reject_fraction: Share of the source's documents that may be unusable; 0: the first one is an error.
        engine: Runs the tasks; None: this process.
        test_fraction: Share of the text that is held out for `test`, of other documents; 0: no such split.

    Raises:
        ConfigError: If a share is out of range.

    Example:
        # the data module runs TokenPreparation with the parts named here
        data:
          class_path: PretrainDataModule
          init_args:
            source: ~/notes
            reader: TextDocuments
            transforms: [{class_path: Normalise}]
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 4096}}
            writer: TokenShards
    """

    documents: DocumentSource
    tokenizer: Tokenizer
    writer: TokenWriter
    validation_fraction: float = 0.05
    transforms: Sequence[Transform] = ()
    max_reject_fraction: float = 0.0
    engine: Engine | None = None
    test_fraction: float = 0.0

    def __post_init__(self) -> None:
        self.check_shares(self.validation_fraction, self.max_reject_fraction, self.test_fraction)

    @staticmethod
    def check_shares(
        validation_fraction: float, max_reject_fraction: float, test_fraction: float = 0.0
    ) -> None:
        """Raises a ConfigError if one of the shares that `data` takes is out of range."""
        if not 0 < validation_fraction < 1:
            raise ConfigError(f"data.validation_fraction is {validation_fraction}; it is between 0 and 1.")
        if not 0 <= test_fraction < 1 - validation_fraction:
            raise ConfigError(
                f"data.test_fraction is {test_fraction}; it is at least 0, and below 1 - data.validation_fraction = "
                f"{1 - validation_fraction:g}."
            )
        if not 0 <= max_reject_fraction < 1:
            raise ConfigError(
                f"data.max_reject_fraction is {max_reject_fraction}; it is at least 0 and below 1."
            )

    @staticmethod
    def vocab_size_of(source: Any) -> int | None:
        """Returns the number of token ids of a folder on this machine; None for text, 0 for a remote folder."""
        return 0 if is_remote(source) else stored_vocab_size(source)

    @staticmethod
    def find(
        source: str, cache_dir: Path, cache_bytes: int | None, storage_options: Mapping[str, Any] | None
    ) -> Path | None:
        """Returns the prepared folder that `data.source` names, or the local copy of a remote one; None for text.

        Raises:
            ConfigError: If the folder is not finished or cannot be read.
        """
        if is_remote(source):
            return open_remote(source, cache_dir, cache_bytes, storage_options)
        if (folder := prepared_folder(source)) is None:
            refuse_tokens(source)
        return folder

    @staticmethod
    def describe(folder: Path) -> TokenFolder:
        """Returns what is stored in a prepared folder.

        Raises:
            ConfigError: If it is damaged.
        """
        manifest = read_manifest(folder)
        return TokenFolder(
            manifest["vocab_size"],
            manifest["end_of_text_id"],
            manifest["train_tokens"],
            manifest["unigram_loss"],
            read_tokenizer(folder, manifest),
            manifest.get("test_tokens", 0),
        )

    @staticmethod
    def split_folder(folder: Path, split: str) -> Path:
        """Returns the folder of the tokens of "train", "validation" or "test".

        Raises:
            ConfigError: If it is a symbolic link that leads out of the prepared folder.
        """
        return split_folder(folder, split)

    def finish(self, folder: Path, label: str) -> dict[str, Any]:
        """Writes a folder or finishes it, with progress on stderr and a report; returns the report's figures.

        Args:
            folder: As for :meth:`run`; nothing is prepared if it has a manifest.
            label: Names the text to people.

        Returns:
            The figures, and under "shares" the sizes of the splits as text.
        """
        from datamodules.preparation.preparation_progress import watched

        if not (folder / "manifest.json").exists():
            sizes = [source_bytes([task]) for task in self.tasks]
            self.run(folder, label, partial(watched, sizes=sizes))
        write_report(folder)
        found = figures(json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
        return found | {"shares": shares({split: found[f"{split}_tokens"] for split in splits_of(found)})}

    @staticmethod
    def build(
        reader: Callable[[str], DocumentSource],
        tokenizer: Tokenizer,
        writer: TokenWriter,
        source: str = "python-docs",
        validation_fraction: float = 0.05,
        transforms: Sequence[Transform] = (),
        max_reject_fraction: float = 0.0,
        engine: Engine | None = None,
        stages: Sequence[Transform] = (),
        test_fraction: float = 0.0,
    ) -> TokenPreparation:
        """Returns what the options of `PretrainDataModule` of these names describe, with `LocalEngine` by default.

        `stages` is the former name of `transforms`.

        Raises:
            ConfigError: If a share is out of range, or there is no such source.
        """
        TokenPreparation.check_shares(validation_fraction, max_reject_fraction, test_fraction)
        engine = engine or catalog.find("LocalEngine", "data").load()()
        if stages:
            deprecated("data.stages", "data.transforms")
        transforms = [*stages, *transforms]
        return TokenPreparation(
            reader(source),
            tokenizer,
            writer,
            validation_fraction,
            transforms,
            max_reject_fraction,
            engine,
            test_fraction,
        )

    def cached(self, cache_dir: Path, label: str) -> Path:
        """Returns the finished folder, named by a hash of text and options; writes it if it is missing.

        Several processes may do this at once, also on several machines; see :func:`cached_folder`.

        Args:
            cache_dir: Parent of the folder.
            label: Name of the text, for messages.

        Raises:
            ConfigError: If there are fewer than two different documents, or nothing can be written.
        """
        identity = {"options": self.options(), "reader": dict(self.documents.fingerprint())}
        names = [type(part).__name__ for part in self.transforms]
        return cached_folder(cache_dir, _digest(identity)[:16], label, names, self.run)

    def run(self, folder: Path, label: str, watch: Watch = lambda records, number: records) -> Totals:
        """Writes a folder, or finishes one that was started with the same tasks and options.

        Args:
            folder: An empty folder, or one that an earlier call has started.
            label: Name of the text, for messages.
            watch: Called with the records of finished tasks and the number of tasks; yields the records, for
                example to show progress.

        Raises:
            ConfigError: If the source cannot be read, too much of it is unusable, or no document is kept.
        """
        parts = folder / PARTS
        parts.mkdir(exist_ok=True)
        over = partial(over_tasks, self.engine, parts)
        reduced = map_reduce(self._pipeline({}, parts), self.tasks, parts, over)
        pipeline = self._pipeline(reduced, parts)
        split = self._chosen_split(pipeline, parts / SPLIT)
        vocabulary, trained = self._train_tokenizer(pipeline, split, folder)
        in_process = trained and self.engine is None  # then encoding uses all cores
        in_text = isinstance(self.tokenizer, LibraryTokenizer) and self.tokenizer.special_tokens_in_text
        in_workers = self.tokenizer.encoder() or JSONEncoder(folder / TOKENIZER, in_text)
        encode = self.tokenizer.encode_batch if in_process else in_workers
        sizes = vocabulary["vocab_size"], vocabulary["end_of_text_id"]
        leading = tuple(vocabulary.get("leading_ids", ()))
        size = source_bytes(self.tasks)
        sampled = sampled_share(size) if (folder / PLAN).exists() else 0.0  # a run's cache has no report
        work = PreparationTask(pipeline, encode, self.writer, *sizes, split, parts, leading, sampled)
        seen = Totals(len(self.transforms), size)
        for record in watch(over(work, self.tasks), len(self.tasks)):
            seen.add(record)
            seen.check_rejects(self.max_reject_fraction, final=False)
        transforms = [{"name": type(part).__name__} | _described(part) for part in self.transforms]
        head = {"source": label, **self._identity(), **vocabulary, "transforms": transforms}
        if split.tails_from is not None:
            head["validation_tails_from_bytes"] = split.tails_from
        return write_manifest(folder, parts, self.tasks, self.writer, head, self.max_reject_fraction)

    def plan(self) -> dict[str, Any]:
        """Returns the plan of the folder, as JSON values: only a folder with an equal plan can be resumed."""
        tasks = [{key: value for key, value in task.items() if key != "left_out"} for task in self.tasks]
        return json.loads(
            json.dumps({"format": FORMAT, "options": self.options(), "tasks": tasks}, default=str)
        )

    def options(self) -> dict[str, Any]:
        """Returns everything but the text that determines the tokens, as JSON values."""
        return {
            "format": FORMAT,
            "reader": {"class": _class(self.documents), **self._reader.options()},
            # the former name: digests and plans of folders that were prepared with it stay the same
            "stages": [_described(part) for part in self.transforms],
            "tokenizer": {"class": _class(self.tokenizer), **self.tokenizer.fingerprint()},
            "writer": {"class": _class(self.writer), **vars(self.writer)},
            "validation_fraction": self.validation_fraction,
        } | ({"test_fraction": self.test_fraction} if self.test_fraction else {})

    @cached_property
    def tasks(self) -> list[dict[str, Any]]:
        """The pieces of the source, numbered."""
        return [task | {"number": number} for number, task in enumerate(self._reader.tasks())]

    @cached_property
    def _reader(self) -> Reader:
        return self.documents if isinstance(self.documents, Reader) else SingleTaskReader(self.documents)

    def _pipeline(self, reduced: dict[int, Path], parts: Path) -> Pipeline:
        kept = KeptDocuments(parts, places(self.transforms))
        return Pipeline(self._reader, self.transforms, reduced, self.max_reject_fraction == 0, kept)

    def _identity(self) -> dict[str, Any]:
        """Returns a digest of what determines the tokens; independent of the files' folder and time of change."""
        unchanged = [
            [
                {k: v for k, v in piece.items() if k not in ("path", "changed_ns")}
                for piece in task.get("pieces", [])
            ]
            for task in self.tasks
        ]
        return {"format": FORMAT, "digest": _digest({"options": self.options(), "pieces": unchanged})}

    def _chosen_split(self, pipeline: Pipeline, path: Path) -> Split:
        """Returns the split, read from a file if an earlier run has chosen it."""
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            return Split(**found | {"groups": {int(key): side for key, side in found["groups"].items()}})
        split = self._split(pipeline)
        durable.write(path, json.dumps(vars(split)))
        return split

    def _split(self, pipeline: Pipeline) -> Split:
        tally = Tally(len(self.transforms))
        documents = self._documents(pipeline, self.tasks, tally)
        first = next(documents, None)
        begin = [] if first is None else [first]
        shares = self.validation_fraction, self._label(), self.test_fraction
        try:
            if first is not None and first[1] is not None:
                return chosen_groups(chain(begin, documents), *shares)
            return chosen_split((text for text, _ in chain(begin, documents)), *shares)
        except ConfigError as error:
            more = [f"{count:,} skipped: {reason}." for reason, count in tally.skipped.most_common(3)]
            if tally.rejects:
                one = tally.rejects[0]
                found = f"{sum(tally.rejected.values()):,} could not be used"
                more.append(f"{found}, for example {one['place']}: {one['reason']}.")
            raise ConfigError("\n".join([str(error), *more])) from error

    def _documents(
        self, pipeline: Pipeline, tasks: Sequence[Mapping[str, Any]], tally: Tally | None = None
    ) -> Iterator[tuple[str, str | None]]:
        """Yields text and split key of each document."""
        tally = tally or Tally(len(self.transforms))
        for task in tasks:
            for batch in pipeline.batches(task, tally):
                yield from zip(batch["text"].to_pylist(), keys_of(batch), strict=True)

    def _label(self) -> str:
        pieces = [piece["path"] for task in self.tasks for piece in task.get("pieces", []) if "path" in piece]
        return f"data.source ({', '.join(pieces[:2])}{', ...' if len(pieces) > 2 else ''})"

    def _train_tokenizer(self, pipeline: Pipeline, split: Split, folder: Path) -> tuple[dict[str, Any], bool]:
        """Writes tokenizer.json unless it exists; returns vocab_size, end_of_text_id and, where there are some, the ids
        that begin a document; and whether it was written.
        """
        path = folder / PARTS / VOCABULARY
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8")), False
        step = -(-source_bytes(self.tasks) // _TRAINING_BYTES) or 1
        documents = self._documents(pipeline, self.tasks[::step])
        self.tokenizer.prepare(
            part for document in documents for side, part in split.parts(*document) if side == 0
        )
        return_memory()  # otherwise this process keeps it while the workers need memory
        text = self.tokenizer.to_json()
        durable.write(folder / TOKENIZER, text)
        sizes: dict[str, Any] = {"vocab_size": self.tokenizer.vocab_size}
        sizes["end_of_text_id"] = self.tokenizer.end_of_text_id
        if leading := leading_ids(Implementation.from_str(text)):
            sizes["leading_ids"] = leading
        durable.write(path, json.dumps(sizes))
        return sizes, True


def _class(part: Any) -> str:
    """Returns what plans and digests call the class of a part: without the subfolder of its file in this package.

    Data prepared before the file moved to a subfolder stays valid.
    """
    module, home = type(part).__module__, "datamodules.preparation"
    if module.startswith(f"{home}."):
        module = f"{home}.{module.rpartition('.')[2]}"
    return f"{module}.{type(part).__qualname__}"


def _described(part: Transform) -> dict[str, Any]:
    return {"class": _class(part), "version": part.version, **part.fingerprint()}


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
