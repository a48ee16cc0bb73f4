"""The text that a model is trained on: prepared once from documents, then streamed in exact order."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from core import catalog
from core.contracts import DocumentSource, Packing, Tokenizer, TokenWriter
from core.errors import ConfigError
from core.technique import technique
from core.token_loader import TokenLoader


@technique(
    paper="litdata's chunk format; the order is described in datamodules/packing",
    offers=("exact_resume",),
    maturity="stable",
)
class PretrainDataModule(LightningDataModule):
    """Documents turned into one stream of tokens and dealt out as rows of `sequence_length`.

    On first use the documents are split, the tokenizer is trained on the training ones, and the tokens of
    both splits are written to a folder of `cache_dir`; later runs with the same text and options find it
    there. Batches depend on the global batch size alone, not on how ranks and workers share it.

    Args:
        reader: Makes the document source from `source`.
        tokenizer: Turns the documents into token ids.
        writer: Stores the token ids.
        packing: Puts documents into rows.
        source: What the reader reads: a path, a glob, or a name that it knows.
        cache_dir: Folder of the prepared data; by default `$XDG_CACHE_HOME/leyden` or `~/.cache/leyden`.
        sequence_length: Tokens in a row.
        batch_size: Rows in a micro-batch, on each rank.
        validation_fraction: Share of the documents that is held out, between 0 and 1.
        shuffle: Whether each epoch takes the training rows in a new order.
        seed: Of these orders.
        num_workers: Processes that read ahead, on each rank; 0 is fastest for files on this machine.

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
    tokenizer_json: str
    vocab_size: int
    train_tokens: int
    unigram_loss: float
    end_of_text_id: int

    def __init__(
        self,
        reader: Callable[[str], DocumentSource],
        tokenizer: Tokenizer,
        writer: TokenWriter,
        packing: Packing,
        source: str = "python-docs",
        cache_dir: str | None = None,
        sequence_length: int = 256,
        batch_size: int = 8,
        validation_fraction: float = 0.05,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.reader, self.tokenizer, self.writer, self.source = reader, tokenizer, writer, source
        self.packing = packing
        default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "leyden")
        self.cache_dir = Path(cache_dir or default).expanduser()
        self.sequence_length, self.batch_size, self.num_workers = sequence_length, batch_size, num_workers
        self.validation_fraction, self.shuffle, self.seed = validation_fraction, shuffle, seed
        for name, least in {"sequence_length": 1, "batch_size": 1, "seed": 0, "num_workers": 0}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"data.{name} is {getattr(self, name)}; it must be at least {least}.")
        if not 0 < validation_fraction < 1:
            raise ConfigError(f"data.validation_fraction is {validation_fraction}; it lies between 0 and 1.")

    def prepare_data(self) -> None:
        """Writes the tokens unless they are there; see the stage TokenPreparation.

        Raises:
            ConfigError: If the source is at fault or has too few documents, or nothing can be written.
        """
        documents, fraction = self.reader(self.source), self.validation_fraction
        stage = catalog.find("TokenPreparation", "stages").load()
        preparation = stage(documents, self.tokenizer, self.writer, fraction, self.cache_dir)
        self.folder = preparation.run(label=self.source)

    def setup(self, stage: str | None = None) -> None:
        """Finds the prepared folder and reads its manifest: the same on every rank.

        Raises:
            ConfigError: If this process does not see what rank 0 prepared.
        """
        if self.trainer is not None and self.trainer.world_size > 1:
            name = self.trainer.strategy.broadcast(self.folder.name if self.folder else "")
            self.folder = self.cache_dir / name
        elif self.folder is None:
            self.prepare_data()
        assert self.folder is not None
        try:
            manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
            self.tokenizer_json = (self.folder / "tokenizer.json").read_text(encoding="utf-8")
            self.vocab_size, self.train_tokens = manifest["vocab_size"], manifest["train_tokens"]
            self.unigram_loss, self.end_of_text_id = manifest["unigram_loss"], manifest["end_of_text_id"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"The prepared data is missing or damaged on this machine: {error}.\nEvery machine needs the "
                f"same text in data.source. If {self.folder} is there, delete it and run again."
            ) from error

    def train_dataloader(self) -> TokenLoader:
        """Returns this rank's training batches; Lightning saves their position with the checkpoint.

        Raises:
            ConfigError: If there are fewer rows than one global batch takes.
        """
        overfits = getattr(self.trainer, "overfit_batches", 0) > 0  # on the same few batches in each epoch
        loader = self._loader("train", shuffle=self.shuffle and not overfits, seed=self.seed)
        batches = loader.batches
        if len(batches) == 0:
            raise ConfigError(
                f"The training split has {self.train_tokens:,} tokens, {batches.rows} rows of "
                f"{self.sequence_length}; a global batch takes {batches.global_batch}\n"
                f"({batches.world_size} ranks x {self.batch_size} rows). Lower data.sequence_length or "
                "data.batch_size, or add text."
            )
        return loader

    def val_dataloader(self) -> TokenLoader:
        """Returns this rank's validation batches: every token once, in order, the last batch filled up."""
        return self._loader("validation", pad=True)

    def test_dataloader(self) -> TokenLoader:
        """Returns the validation batches: there is no third split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> TokenLoader:
        """Returns the validation batches."""
        return self.val_dataloader()

    def _loader(self, split: str, **order: Any) -> TokenLoader:
        assert self.folder is not None
        # The data-parallel rank: under tensor parallelism several ranks read the same rows. None: one rank.
        place = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"rank": 0, "num_replicas": 1}
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        try:
            batches = self.packing.batches(
                self.folder / split,
                sequence_length=self.sequence_length,
                batch_size=self.batch_size,
                rank=place["rank"],
                world_size=place["num_replicas"],
                **order,
            )
        except ConfigError as error:
            raise ConfigError(f"{error}\nDelete {self.folder} and run again: it is written anew.") from error
        return TokenLoader(batches, self.num_workers, pin_memory=on_cuda)

    def state_dict(self) -> dict[str, Any]:
        """Returns the tokenizer: a checkpoint alone is enough to turn text into ids and back."""
        return {"tokenizer": self.tokenizer_json, "end_of_text_id": self.end_of_text_id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes sure that the data's token ids mean what they meant to the checkpoint.

        Raises:
            ConfigError: If the data was written by another tokenizer.
        """
        if json.loads(state_dict["tokenizer"]) != json.loads(self.tokenizer_json):
            raise ConfigError(
                f"The data in {self.folder} was written by another tokenizer than the checkpoint's:\nits token "
                "ids mean other text. Take data.source, data.tokenizer and data.validation_fraction from\nthe "
                "run that wrote the checkpoint."
            )
