"""The text that a model is trained on: prepared once from documents, then streamed in exact order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core import catalog, contracts
from core.data.token_datamodule import TokenDataModule, default_cache_dir
from core.errors import ConfigError, deprecated
from core.technique import technique

_VERIFY = "See what is damaged with `python -m core verify-data`, and prepare it again."


@technique(
    paper="litdata's chunk format; the order is described in datamodules/packing",
    offers=("exact_resume",),
    maturity="stable",
)
class PretrainDataModule(TokenDataModule):
    """Documents turned into one stream of tokens and dealt out as rows of `sequence_length`.

    On first use the documents are split, the tokenizer is trained on the training ones, and the tokens of
    both splits are written to a folder of `cache_dir`; later runs with the same text and options find it
    there. Batches depend on the global batch size alone, not on how ranks and workers share it.

    Args:
        reader: Makes the document source from `source`.
        tokenizer: Turns the documents into token ids.
        writer: Stores the token ids.
        packing: Puts documents into rows.
        source: What the reader reads: a path, a glob, or a name that it knows. Or a folder that `python -m core
            prepare` wrote, here or on s3://, gs://, azure:// or hf:// (see below): its tokens are taken as they
            are, and the data parts named here are not used.
        cache_dir: Folder of the prepared data; by default `$XDG_CACHE_HOME/leyden` or `~/.cache/leyden`.
        sequence_length: Tokens in a row.
        batch_size: Rows in a micro-batch, on each rank.
        validation_fraction: Share of the text that is held out for validation, between 0 and 1.
        shuffle: Whether each epoch takes the training rows in a new order.
        seed: Seed of these orders.
        num_workers: Processes that read ahead, on each rank; 0 is fastest for files on this machine.
        transforms: What is done with documents before they are encoded, in this order.
        max_reject_fraction: Share of the documents that may be unusable; they are left out, and listed in
            rejects.jsonl. 0: the first one stops the preparation.
        engine: Where documents are prepared; None: in this process.
        cache_bytes: Most bytes of shards of remote folders to keep in `cache_dir`; None: three quarters of what is
            free on its disk.
        storage_options: Options of a remote folder's client, such as {endpoint_url: ..., region_name: ...} of boto3's. They
            are written to config.yaml: leave secrets to the environment, where the client looks for them.
        stages: Deprecated: `transforms`.
        test_fraction: Share of the text that is held out for `test`, of other documents; 0: `test` takes the validation split.

    Batches from a remote folder are those from a copy of it here. A shard is downloaded when a row needs it, or
    ahead of that, is held against its SHA-256, and stays until others need its room; all ranks and workers of a
    machine share the cache. Where it has room for all shards, each is downloaded once. Where it has not, shuffled
    rows, which come from everywhere, cost up to a shard each: give it room, prepare smaller shards, or set
    `shuffle` to false. What says where documents begin, 4 bytes each, stays for good.

    Attributes:
        folder: The prepared folder; this and the following are known after `setup`.
        tokenizer_json: The tokenizer, for `tokenizers.Tokenizer.from_str`.
        vocab_size: Number of token ids.
        train_tokens: Tokens of the training split.
        unigram_loss: Nats per validation token under the training tokens' frequencies.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        data:
          class_path: PretrainDataModule
          init_args:
            source: python-docs
            reader: TextDocuments
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 4096}}
            writer: TokenShards
            packing: Concatenate
    """

    folder: Path | None = None
    unigram_loss: float

    def __init__(
        self,
        reader: Callable[[str], contracts.DocumentSource],
        tokenizer: contracts.Tokenizer,
        writer: contracts.TokenWriter,
        packing: contracts.Packing,
        source: str = "python-docs",
        cache_dir: str | None = None,
        sequence_length: int = 256,
        batch_size: int = 8,
        validation_fraction: float = 0.05,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        transforms: Sequence[contracts.Transform] = (),
        max_reject_fraction: float = 0.0,
        engine: contracts.Engine | None = None,
        cache_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
        stages: Sequence[contracts.Transform] = (),
        test_fraction: float = 0.0,
    ) -> None:
        super().__init__(sequence_length, batch_size, shuffle, seed, num_workers)
        self.reader, self.tokenizer, self.writer, self.source = reader, tokenizer, writer, source
        self.packing, self.transforms = packing, [*stages, *transforms]
        if stages:
            deprecated("data.stages", "data.transforms")
        shares = {"validation_fraction": validation_fraction, "max_reject_fraction": max_reject_fraction}
        shares |= {"test_fraction": test_fraction} if test_fraction else {}
        self.options = shares | {"transforms": self.transforms, "engine": engine}
        self.cache_dir = Path(os.path.expanduser(cache_dir or default_cache_dir()))
        self.preparer: type[contracts.TokenPreparer] = catalog.offering("token_preparation", "data").load()
        self.preparer.check_shares(**shares)
        self.prepared = self.preparer.find(source, self.cache_dir, cache_bytes, storage_options)
        if self.prepared is not None:
            self.vocab_size = self.preparer.vocab_size_of(str(self.prepared)) or 0

    def prepare_data(self) -> None:
        """Writes the tokens unless they are there.

        Raises:
            ConfigError: If the source is at fault or has too few documents, or nothing can be written.
        """
        if self.prepared is not None:
            self.folder = self.prepared
            return
        prepare: Any = self.preparer
        preparation = prepare(self.reader(self.source), self.tokenizer, self.writer, **self.options)
        self.folder = preparation.cached(self.cache_dir, label=self.source)

    def setup(self, stage: str | None = None) -> None:
        """Finds the prepared folder and reads its manifest: the same on every rank.

        Raises:
            ConfigError: If this process does not see what rank 0 prepared.
        """
        super().setup(stage)
        if self.trainer is not None and self.trainer.world_size > 1:
            name = self.trainer.strategy.broadcast(self.folder.name if self.folder else "")
            self.folder = self.prepared or self.cache_dir / name
        elif self.folder is None:
            self.prepare_data()
        assert self.folder is not None
        try:
            found = self.preparer.describe(self.folder)
        except ConfigError as error:
            if self.prepared is not None:
                raise ConfigError(f"{error}\n{_VERIFY}") from error
            raise ConfigError(
                f"The prepared data is missing or damaged on this machine: {error}.\nEvery machine needs the "
                f"same text in data.source. If {self.folder} is there, delete it and run again."
            ) from error
        self.vocab_size, self.train_tokens = found.vocab_size, found.train_tokens
        self.unigram_loss, self.end_of_text_id = found.unigram_loss, found.end_of_text_id
        self.tokenizer_json = found.tokenizer_json
        self.test_split = "test" if found.test_tokens else "validation"

    def packed(self, split: str, **order: Any) -> contracts.PackedBatches:
        """Returns the batches of a split."""
        assert self.folder is not None
        try:
            return self.packing.batches(self.preparer.split_folder(self.folder, split), **order)
        except ConfigError as error:
            if "://" in self.source or " is missing or damaged: " not in str(error):  # others say what to do
                raise
            advice = f"Delete {self.folder} and run again: it is written again."
            raise ConfigError(f"{error}\n{advice if self.prepared is None else _VERIFY}") from error
