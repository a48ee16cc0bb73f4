"""Records of labelled text: what the data modules for fine-tuning share."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from core import durable
from core.contracts import Reject, Tokenizer, raise_reject
from core.data.token_datamodule import TokenDataModule, default_cache_dir
from core.errors import ConfigError, nearest
from datamodules.preparation.split import Split, text_hash
from datamodules.records.chats import WrongRecord, texts_of
from datamodules.records.encoding import TextEncoder
from datamodules.records.record_batches import RecordBatches, batches_of
from datamodules.records.record_files import Placed, Record, RecordFiles
from datamodules.records.record_store import Encoded, RecordStore, RecordWriter
from toolkit.bounded import parse_json, read_error, read_inside

FORMAT = 1
"""Raised whenever the same records and options give other tokens."""

MANIFEST = "manifest.json"
AT_ONCE = 512
"""Records that are encoded together."""

SPLITS = ("train", "validation", "test")
TOO_LONG = ("drop", "cut")


class RecordDataModule(TokenDataModule, ABC):
    """Records that are encoded once, into a folder of `cache_dir`, and dealt out as rows of `sequence_length`.

    Batches depend on the global batch size alone, and the position is a number of records: see
    :class:`TokenDataModule`. A subclass says what a record is.

    Args:
        source: The records: a path, a folder or a glob of .jsonl, .json, .tsv and .parquet files, or a folder of
            `save_to_disk` of Hugging Face datasets.
        tokenizer: Turns texts into token ids. One that is trained is trained on all texts of the training records.
        validation_source: Records for validation; None: `validation_fraction` of those of `source`.
        test_source: Records for `test`; None: `test_fraction` of those of `source`.
        validation_fraction: Share of the records that is held out for validation, between 0 and 1.
        test_fraction: Share that is held out for `test`, of other records; 0: `test` takes the validation split.
        group_by: Field whose value keeps records together in one split, such as a user or a document; None: only equal
            records stay together.
        max_reject_fraction: Share of the records that may be unusable; they are left out, and listed in rejects.jsonl
            of the folder. 0: the first one is an error.
        too_long: What is done with records longer than a row: `drop`, or `cut`, which takes their first tokens.
        cache_dir: Folder of the encoded records; by default `$XDG_CACHE_HOME/leyden` or `~/.cache/leyden`.
        sequence_length: Tokens in a row.
        batch_size: Rows in a micro-batch, on each rank.
        shuffle: Whether each epoch takes the training records in a new order.
        seed: Seed of these orders.
        num_workers: Processes that read ahead, on each rank; 0 is fastest for most.

    Raises:
        ConfigError: If a value is out of range, or there is no such file.
    """

    sequences = 1
    """Sequences of a record."""

    values = 0
    """Numbers that are stored of a record."""

    notes = False
    """Whether a text is stored with each record."""

    pack = False
    """Whether several records share a row; else there is one a row, with others of similar length."""

    columns: tuple[str, ...] | None = None
    """Names of the fields of .tsv files that have no line that names them."""

    folder: Path | None = None

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        validation_source: str | None = None,
        test_source: str | None = None,
        validation_fraction: float = 0.05,
        test_fraction: float = 0.0,
        group_by: str | None = None,
        max_reject_fraction: float = 0.0,
        too_long: str = "drop",
        cache_dir: str | None = None,
        sequence_length: int = 256,
        batch_size: int = 8,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(sequence_length, batch_size, shuffle, seed, num_workers)
        if too_long not in TOO_LONG:
            raise ConfigError(
                f"data.too_long is {too_long!r}; it is drop or cut.{nearest(too_long, TOO_LONG)}"
            )
        if not 0 < validation_fraction < 1 and validation_source is None:
            raise ConfigError(f"data.validation_fraction is {validation_fraction}; it is between 0 and 1.")
        held_out = (0.0 if validation_source else validation_fraction) + (
            0.0 if test_source else test_fraction
        )
        if test_fraction < 0 or not 0 <= held_out < 1:
            raise ConfigError(
                f"data.test_fraction is {test_fraction}; it is at least 0, and less than what validation leaves."
            )
        if not 0 <= max_reject_fraction < 1:
            raise ConfigError(
                f"data.max_reject_fraction is {max_reject_fraction}; it is at least 0 and below 1."
            )
        self.tokenizer, self.group_by = tokenizer, group_by
        self.cut_long, self.max_reject_fraction = too_long == "cut", max_reject_fraction
        sources = {"train": source, "validation": validation_source, "test": test_source}
        self.sources = {split: name for split, name in sources.items() if name is not None}
        shares = {"validation": validation_fraction, "test": test_fraction}
        self.shares = {split: share for split, share in shares.items() if share and split not in self.sources}
        self.cache_dir = Path(os.path.expanduser(cache_dir or default_cache_dir()))
        self._stores: dict[str, RecordStore] = {}

    def files_of(self, source: str) -> RecordFiles:
        """Returns the records of a source.

        Raises:
            ConfigError: If there is no such file.
        """
        return RecordFiles(source, self.columns)

    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """Returns what decides how a record is encoded, as JSON values: part of the folder's name."""

    def begin(self, encoder: TextEncoder, records: Iterable[Placed]) -> None:
        """Prepares for encoding.

        Args:
            encoder: With the tokenizer.
            records: All training records.

        Raises:
            ConfigError: If the tokenizer does not fit.
        """

    def learnt(self) -> Mapping[str, Any]:
        """Returns what :meth:`begin` found in the records, as JSON values, for the manifest."""
        return {}

    @abstractmethod
    def encode(self, record: Record) -> Any:
        """Returns what :meth:`finish` makes an encoded record of.

        Raises:
            WrongRecord: If the record cannot be used.
        """

    @abstractmethod
    def finish(self, encoder: TextEncoder, found: Sequence[Any]) -> Iterator[Encoded]:
        """Yields the encoded record of each result of :meth:`encode`; one without a sequence is left out."""

    def prepare_data(self) -> None:
        """Encodes the records unless that has been done.

        Raises:
            ConfigError: If a record cannot be used, or nothing can be written.
        """
        files = {split: self.files_of(source) for split, source in self.sources.items()}
        identity = {
            "format": FORMAT,
            "class": type(self).__name__,
            "tokenizer": [type(self.tokenizer).__name__, dict(self.tokenizer.fingerprint())],
            "files": {split: of.fingerprint() for split, of in files.items()},
            "splits": [self.shares, self.group_by, self.max_reject_fraction],
            "options": dict(self.options()),
        }
        text = json.dumps(identity, sort_keys=True, default=str)
        self.folder = self.cache_dir / hashlib.sha256(text.encode()).hexdigest()[:16]
        if (self.folder / MANIFEST).exists():
            return
        temporary = self.cache_dir / f"preparing-{uuid.uuid4().hex}"
        try:
            temporary.mkdir(parents=True)
            self._write(temporary, files)
            durable.sync_all(temporary)
            with suppress(OSError):  # another process was first, with the same content
                temporary.rename(self.folder)
            durable.sync(self.cache_dir)
        except OSError as error:
            raise ConfigError(
                f"{error.filename or self.cache_dir}: {durable.write_error(error)}.\nEncoded records go to "
                f"data.cache_dir={self.cache_dir}, which must be writable and have room."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _write(self, folder: Path, files: Mapping[str, RecordFiles]) -> None:
        split = self._split(files["train"])
        rejects = _Rejects(folder / "rejects.jsonl", self.max_reject_fraction)

        def training() -> Iterator[Placed]:
            quiet = files["train"].records(lambda *_: None)
            return (placed for placed in quiet if split.side(self._place(placed[1])) == 0)

        self.tokenizer.prepare(text for _, record in training() for text in texts_of(record))
        tokenizer_json = self.tokenizer.to_json()
        durable.write(folder / "tokenizer.json", tokenizer_json)
        encoder = TextEncoder(tokenizer_json, self.tokenizer.end_of_text_id)
        self.begin(encoder, training())
        writers = {
            name: RecordWriter(folder / name, self.sequences, self.values, self.notes)
            for name in SPLITS
            if name == "train" or name in self.sources or name in self.shares
        }
        for name, of in files.items():
            records = of.records(rejects)
            while placed := list(islice(records, AT_ONCE)):
                sides = [
                    SPLITS[split.side(self._place(record))] if name == "train" else name
                    for _, record in placed
                ]
                for side, found in self._encoded(encoder, placed, sides, rejects):
                    writers[side].add(found)
        for writer in writers.values():
            writer.close()
        kept = {name: writer.records for name, writer in writers.items()}
        rejects.finish(sum(kept.values()), sum(of.size() for of in files.values()))
        if empty := [name for name, count in kept.items() if not count]:
            raise ConfigError(
                f"{self.sources.get(empty[0], self.sources['train'])}: no record is left for {empty[0]}.{rejects.first}"
            )
        sizes: dict[str, Any] = {
            "vocab_size": self.tokenizer.vocab_size,
            "end_of_text_id": self.tokenizer.end_of_text_id,
        }
        sizes |= {"train_tokens": writers["train"].tokens, "records": kept, "rejected": dict(rejects.counts)}
        durable.write(
            folder / MANIFEST,
            json.dumps(sizes | {"options": dict(self.options()), "learnt": dict(self.learnt())}, default=str),
        )
        said = ", ".join(f"{count:,} for {name}" for name, count in kept.items())
        print(f"Encoded {self.sources['train']}: {said}{rejects.summary()}", file=sys.stderr, flush=True)

    def _encoded(
        self, encoder: TextEncoder, placed: Sequence[Placed], sides: Sequence[str], rejects: _Rejects
    ) -> Iterator[tuple[str, Encoded]]:
        usable, places = [], []
        for (place, record), side in zip(placed, sides, strict=True):
            try:
                if self.group_by and side == "train" and record.get(self.group_by) is None:
                    raise WrongRecord(
                        f'the object has no field "{self.group_by}"', "data.group_by splits by it"
                    )
                usable.append(self.encode(record))
                places.append((place, side))
            except WrongRecord as error:
                rejects("", place, error.reason, error.details)
        for (place, side), found in zip(places, self.finish(encoder, usable), strict=True):
            if found.sequences:
                yield side, found
            else:
                rejects("", place, "nothing in it is trained on", "")

    def _split(self, files: RecordFiles) -> Split:
        """Returns the split of the records by a hash, of the group's value or of the record; no split is empty."""
        bound, test_bound = (
            int(share * 2**64) for share in np.cumsum([self.shares.get(name, 0.0) for name in SPLITS[1:]])
        )
        split = Split(bound, test_bound=test_bound)
        if not self.shares:
            return split
        reject: Reject = raise_reject if self.max_reject_fraction == 0 else (lambda *_: None)
        places = np.unique(
            np.fromiter((self._place(record, where) for where, record in files.records(reject)), np.uint64)
        )
        sides = {split.side(int(place)) for place in places}
        wanted = {0, *(SPLITS.index(name) for name in self.shares)}
        if wanted <= sides:
            return split
        if len(places) < len(wanted):
            what = f"values of {self.group_by!r}" if self.group_by else "records"
            raise ConfigError(
                f"{self.sources['train']} has {len(places)} different {what}: {len(wanted)} splits need different ones.\n"
                "Add records, or name others for validation: data.validation_source."
            )
        first = int(places[0]) + 1 if "validation" in self.shares else 0
        second = int(places[1 if first else 0]) + 1 if "test" in self.shares else first
        return Split(first, test_bound=second)

    def _place(self, record: Record, where: str | None = None) -> int:
        """Returns the hash that decides on a record's split."""
        if self.group_by is None:
            return text_hash(json.dumps(record, sort_keys=True, default=str).encode())
        if record.get(self.group_by) is None:
            if where is None or self.max_reject_fraction:
                return 0
            hint = nearest(self.group_by, set(record))
            raise ConfigError(
                f'{where}: the object has no field "{self.group_by}", by which data.group_by splits.{hint}\n'
                f"Its fields: {', '.join(record)[:300]}."
            )
        return text_hash(json.dumps(record[self.group_by], sort_keys=True, default=str).encode())

    def setup(self, stage: str | None = None) -> None:
        """Maps the encoded records: the same ones on every rank.

        Raises:
            ConfigError: If this process does not see what rank 0 encoded, or all records are too long.
        """
        super().setup(stage)
        if self.trainer is not None and self.trainer.world_size > 1:
            name = self.trainer.strategy.broadcast(self.folder.name if self.folder else "")
            self.folder = self.cache_dir / name
        elif self.folder is None:
            self.prepare_data()
        assert self.folder is not None
        try:
            manifest = parse_json(read_inside(self.folder, MANIFEST))
            self.tokenizer_json = read_inside(self.folder, "tokenizer.json").decode()
            self.vocab_size, self.end_of_text_id = manifest["vocab_size"], manifest["end_of_text_id"]
            self.train_tokens = manifest["train_tokens"]
            self._stores = {split: RecordStore(self.folder / split) for split in manifest["records"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = read_error(error) if isinstance(error, OSError | ValueError) else f"it lacks {error}"
            raise ConfigError(
                f"The encoded records are missing or damaged on this machine: {what}.\nEvery machine needs the same files in "
                f"data.source. If {self.folder} is there, delete it and run again."
            ) from error
        self.manifest = manifest
        self.test_split = "test" if "test" in self._stores else "validation"
        if self.trainer is None or self.trainer.is_global_zero:
            self._say_too_long()

    def _say_too_long(self) -> None:
        """Says how many records are too long for a row.

        Raises:
            ConfigError: If none is left.
        """
        for split, store in self._stores.items():
            long = int((store.lengths.max(axis=1) > self.sequence_length).sum())
            left_out = store.number_of_documents - self.fitting(split)
            if long:
                done = f"{left_out:,} are left out" + (
                    f", {long - left_out:,} are cut" if self.cut_long else ""
                )
                said = f"{split}: {long:,} of {store.number_of_documents:,} records are longer than {self.sequence_length} tokens: {done}."
                if left_out == store.number_of_documents:
                    raise ConfigError(
                        f"{said}\nRaise data.sequence_length, the longest has {int(store.lengths.max()):,} tokens; or set data.too_long=cut."
                    )
                print(said, file=sys.stderr, flush=True)

    def fitting(self, split: str) -> int:
        """Returns how many records of a split can be used in rows of `sequence_length`."""
        return self.packed(split, sequence_length=self.sequence_length, batch_size=1).fits(
            self.sequence_length
        )

    def packed(self, split: str, **order: Any) -> RecordBatches:
        """Returns the batches of a split."""
        return batches_of(self._stores[split], self.pack, cut_long=self.cut_long, **order)


class _Rejects:
    """Collects what cannot be used.

    Args:
        path: File of the list.
        most: Share of the records that may be unusable; 0: none.
    """

    def __init__(self, path: Path, most: float) -> None:
        self.path, self.most = path, most
        self.counts: Counter[str] = Counter()
        self.lost = 0
        self.listed: list[dict[str, str]] = []

    def __call__(self, source: str, place: str, reason: str, details: str = "", lost: int = 0) -> None:
        if self.most == 0:
            raise_reject(source, place, reason, details)
        self.counts[reason] += 1
        self.lost += lost
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"place": place, "reason": reason, "details": details}) + "\n")
        if not self.listed:
            self.listed.append({"place": place, "reason": reason, "details": details})

    @property
    def first(self) -> str:
        """The first one, for a message."""
        return "".join(
            f"\nThe first that cannot be used: {one['place']}: {one['reason']}: {one['details']}"
            for one in self.listed
        )

    def finish(self, kept: int, size: int) -> None:
        """Raises a ConfigError if too many records were rejected, or too many of the `size` bytes of all files."""
        rejected = sum(self.counts.values())
        if rejected > self.most * (kept + rejected) or self.lost > self.most * size:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.counts.most_common(4))
            raise ConfigError(
                f"{rejected:,} of {kept + rejected:,} records cannot be used, more than data.max_reject_fraction={self.most}: "
                f"{reasons}.{self.first}"
            )

    def summary(self) -> str:
        """Returns what was rejected, for a line."""
        return "".join(f"; {count:,} left out: {reason}" for reason, count in self.counts.most_common())
