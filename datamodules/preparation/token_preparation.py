"""Turns documents into a folder of tokens, once: read, split, train the tokenizer, encode, write."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np

from core.contracts import DocumentSource, Tokenizer, TokenWriter
from core.errors import ConfigError
from core.technique import technique
from datamodules.packing.token_store import TokenStore

FORMAT = 2
"""Version of what a prepared folder holds; part of its digest."""

_BATCH = 32  # documents that are encoded together
_TEMPORARY = "preparing-"
_STALE_SECONDS = 24 * 3600


@technique(paper="own work: split by a hash of the text; published by one rename")
@dataclass
class TokenPreparation:
    """Runs the stages from documents to a folder of tokens, once for the same text and options.

    The folder holds train/ and validation/ (what the writer wrote), tokenizer.json and manifest.json. It
    is named after a digest of the text and of all options that decide the tokens.

    Documents are split by a hash of their text: equal ones stay together, and one that is added moves no
    other. If need be, the smallest hash is held out and the largest trained on: no split is empty.

    Args:
        documents: The text.
        tokenizer: Trained on the training documents, then used on all.
        writer: Stores the token ids of a split.
        validation_fraction: Share of the documents that is held out.
        cache_dir: Where the folder goes.

    Example:
        # TokenPreparation is run by the data module, on the stages that stand here
        data:
          class_path: PretrainDataModule
          init_args:
            source: ~/notes
            reader: TextDocuments
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 4096}}
            writer: TokenShards
    """

    documents: DocumentSource
    tokenizer: Tokenizer
    writer: TokenWriter
    validation_fraction: float
    cache_dir: Path

    def run(self, label: str) -> Path:
        """Returns the finished folder, written now if it was not there; `label` names the text to people.

        Several processes may do this at once: one wins, and the others take its folder.

        Raises:
            ConfigError: If there are fewer than two different documents, or nothing can be written.
        """
        digest = self._digest()
        folder = self.cache_dir / digest[:16]
        if (folder / "manifest.json").exists():
            return folder
        begin = time.perf_counter()
        print(f"Preparing {label}: once, later runs find it in {folder}", file=sys.stderr, flush=True)
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.cache_dir)
            temporary = self.cache_dir / f"{_TEMPORARY}{uuid.uuid4().hex}"
            try:
                counts = self._write(temporary, {"digest": digest, "source": label})
                _publish(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except OSError as error:
            raise ConfigError(
                f"{error.filename or self.cache_dir}: {error.strerror or error}.\nPrepared data goes to "
                f"data.cache_dir={self.cache_dir}, which must be writable and have room."
            ) from error
        print(f"Prepared {counts} in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        return folder

    def _digest(self) -> str:
        stages = (self.documents, self.tokenizer, self.writer)
        options = {
            "format": FORMAT,
            "classes": [f"{type(stage).__module__}.{type(stage).__qualname__}" for stage in stages],
            "reader": dict(self.documents.fingerprint()),
            "tokenizer": dict(self.tokenizer.fingerprint()),
            "writer": vars(self.writer),
            "validation_fraction": self.validation_fraction,
        }
        return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()

    def _write(self, folder: Path, manifest: dict[str, Any]) -> str:
        held_out = self._split()
        splits = {"train": ~held_out, "validation": held_out}
        self.tokenizer.prepare(self._chosen(splits["train"], "Training the tokenizer"))
        manifest["vocab_size"] = vocab_size = self.tokenizer.vocab_size
        manifest["end_of_text_id"] = self.tokenizer.end_of_text_id
        for split, mask in splits.items():
            (folder / split).mkdir(parents=True)
            ids = self._encode(self._chosen(mask, f"Tokenising the {split} split"))
            manifest[f"{split}_documents"] = int(mask.sum())
            manifest[f"{split}_tokens"] = self.writer.write(ids, folder / split, vocab_size)
        manifest["unigram_loss"] = unigram_loss(
            *(TokenStore(folder / split).counts(vocab_size) for split in splits)
        )
        (folder / "tokenizer.json").write_text(self.tokenizer.to_json(), encoding="utf-8")
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        tokens = manifest["train_tokens"] + manifest["validation_tokens"]
        return f"{len(held_out):,} documents, {tokens:,} tokens"

    def _split(self) -> np.ndarray:
        """Returns which documents are held out for validation, as booleans."""
        hashes = np.fromiter(map(_hash, self.documents.documents()), np.uint64)
        if len(hashes) == 0 or hashes.min() == hashes.max():
            raise ConfigError(
                "data.source holds a single document: training and validation need different ones.\n"
                'Cut the text into several files, or into the lines of a .jsonl file: {"text": "..."}.'
            )
        held_out = hashes < np.uint64(self.validation_fraction * 2**64)
        return (held_out | (hashes == hashes.min())) & (hashes != hashes.max())

    def _chosen(self, mask: np.ndarray, what: str) -> Iterable[str]:
        """Yields the documents that the mask picks, under a progress bar where there is a terminal."""
        from rich.console import Console
        from rich.progress import track

        screen = Console(stderr=True)
        texts, total = compress(self.documents.documents(), mask), int(mask.sum())
        return track(texts, what, total, console=screen, transient=True, disable=not screen.is_terminal)

    def _encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yields each document's ids with the end-of-text id; encodes several documents at a time."""
        texts = iter(texts)
        while batch := list(islice(texts, _BATCH)):
            for ids in self.tokenizer.encode_batch(batch):
                yield [*ids, self.tokenizer.end_of_text_id]


def unigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Returns the cross-entropy of validation's tokens under training's add-one-smoothed frequencies.

    Args:
        train: How often each token id occurs in the training split, (vocab_size,).
        validation: The same of the validation split.

    Returns:
        Nats per token: what a model that only knows how frequent tokens are would reach.
    """
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return -float(validation @ log_probability / validation.sum())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _publish(temporary: Path, folder: Path) -> None:
    """Gives a finished folder its name once it is on disk: whatever happens, nobody sees half of it."""
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / "manifest.json").exists():  # else another process was first, with the same
            raise
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_stale(cache_dir: Path) -> None:
    """Removes what killed runs left behind, once it has not changed for a day."""
    for folder in cache_dir.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # it may be finished, and renamed, at this moment
            newest = max(path.lstat().st_mtime for path in [folder, *folder.rglob("*")])
            if newest < time.time() - _STALE_SECONDS:
                shutil.rmtree(folder)
