"""Trains on folders of tokens that `litdata.optimize` wrote, as they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.contracts import PackedBatches, Packing, Tokenizer
from core.data.token_datamodule import TokenDataModule, default_cache_dir
from core.errors import ConfigError
from core.technique import technique
from datamodules.packing.token_index import INDEX, read_index
from datamodules.packing.token_store import TokenStore, part_of
from datamodules.preparation.tokenizers.library_tokenizer import TrainedTokenizer
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.remote.litdata_folder import has_index, open_litdata
from toolkit.bounded import read_error
from toolkit.prepared import is_remote

_SPLITS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "encoder.json")
_LOOKED_AT = 1 << 16
"""Tokens at the beginning of each split whose ids are compared with the tokenizer's before training."""


@technique(
    paper="litdata's optimize and TokensLoader, github.com/Lightning-AI/litdata; litgpt's folders train/ and val/",
    offers=("exact_resume",),
)
class LitdataDataModule(TokenDataModule):
    """Trains on folders of tokens that `litdata.optimize` wrote with `TokensLoader()`, without preparing them.

    The folder has an index.json and chunks, or subfolders train/ and val/ (or validation/, and test/) that have, as
    litgpt writes. Tokens are 16, 32 or 64 bits wide, of numpy or torch; chunks may be compressed with zstd. Each item is a
    document. litdata drops the tokens of each chunk that fill no block; here rows go on in the next chunk, every token
    is read, and the position is exact for any number of ranks and workers.

    Without a folder for validation, the documents at the end of the stream are held out: no row of one split has tokens of the
    other. The cut is at the document boundary nearest to the share, or at a token where documents are too long for that.

    Args:
        source: The folder, on this machine or on s3://, gs://, azure:// or hf://.
        packing: Puts documents into rows.
        tokenizer: The one that made the tokens, such as PretrainedTokenizer; it is not trained. None: that of a tokenizer.json,
            tokenizer.model or vocab.json in the folder.
        sequence_length: Tokens in a row.
        batch_size: Rows in a micro-batch, on each rank.
        validation_fraction: Share of the tokens that is held out where there is no folder for validation.
        shuffle: Whether each epoch takes the training rows in a new order.
        seed: Seed of these orders.
        num_workers: Processes that read ahead, on each rank.
        cache_dir: Where chunks are cached that are remote or compressed; by default `$XDG_CACHE_HOME/leyden` or `~/.cache/leyden`.
        cache_bytes: Most bytes of such chunks; None: three quarters of the free space on the disk.
        storage_options: Options of the remote folder's client, such as boto3's {endpoint_url: ..., region_name: ...}.

    Raises:
        ConfigError: If the folder holds no tokens, is damaged, or no tokenizer is named.

    Example:
        data:
          class_path: LitdataDataModule
          init_args:
            source: tokens
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            packing: Concatenate
    """

    def __init__(
        self,
        source: str,
        packing: Packing,
        tokenizer: Tokenizer | None = None,
        sequence_length: int = 256,
        batch_size: int = 8,
        validation_fraction: float = 0.05,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(sequence_length, batch_size, shuffle, seed, num_workers)
        if not 0 < validation_fraction < 1:
            raise ConfigError(f"data.validation_fraction is {validation_fraction}; it is between 0 and 1.")
        self.source, self.packing, self.validation_fraction = source, packing, validation_fraction
        cache = Path(os.path.expanduser(cache_dir or default_cache_dir())), cache_bytes, storage_options
        self.folders = _remote(source, *cache) if is_remote(source) else _local(source, *cache)
        self.tokenizer = tokenizer or _own_tokenizer(source)
        if isinstance(self.tokenizer, TrainedTokenizer):
            raise ConfigError(
                f"data.tokenizer is a {type(self.tokenizer).__name__}, which is trained on text, and {source} holds tokens.\n"
                f"Name the tokenizer that made them: {_NAME_IT}"
            )
        self.vocab_size = self.tokenizer.vocab_size

    def setup(self, stage: str | None = None) -> None:
        """Opens the splits, and compares the first ids with the tokenizer's.

        Raises:
            ConfigError: If a folder is damaged, has too few tokens, or was written with another tokenizer.
        """
        super().setup(stage)
        self.tokenizer.prepare(())
        self.vocab_size, self.end_of_text_id = self.tokenizer.vocab_size, self.tokenizer.end_of_text_id
        self.tokenizer_json = self.tokenizer.to_json()
        self.splits = dict(self.folders)
        if "validation" not in self.splits:
            self.splits |= _held_out(self.folders["train"], self.validation_fraction)
        self.test_split = "test" if "test" in self.splits else "validation"
        for folder in self.splits.values():
            store = TokenStore(folder)
            if folder == self.splits["train"]:
                self.train_tokens = len(store)
            if (largest := int(store.read(0, _LOOKED_AT).max())) >= self.vocab_size:
                raise ConfigError(
                    f"{self.source} has the token id {largest:,}, data.tokenizer has {self.vocab_size:,} ids: another one "
                    f"made these tokens.\nName it: {_NAME_IT}"
                )

    def packed(self, split: str, **order: Any) -> PackedBatches:
        """Returns the batches of a split."""
        return self.packing.batches(self.splits[split], **order)


_NAME_IT = "--data.tokenizer=PretrainedTokenizer --data.tokenizer.path=FILE"


def _local(
    source: str, cache_dir: Path, cache_bytes: int | None, options: Mapping[str, Any] | None
) -> dict[str, Path]:
    """Returns the folder of each split, or the copies of compressed ones."""
    root = Path(os.path.expanduser(source))
    found = {
        split: root / name
        for split, names in _SPLITS.items()
        for name in names
        if (root / name / INDEX).is_file()
    }
    if "train" not in found:
        found = {"train": root}
    for split, folder in found.items():
        try:
            compressed = read_index(folder).compressed
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.source={source}: {folder / INDEX} is missing or damaged: {read_error(error)}.\nlitdata.optimize(..., "
                "item_loader=TokensLoader()) writes such folders."
            ) from error
        if compressed:
            found[split] = open_litdata(f"local:{folder.absolute()}", cache_dir, cache_bytes, options)
    return found


def _remote(
    source: str, cache_dir: Path, cache_bytes: int | None, options: Mapping[str, Any] | None
) -> dict[str, Path]:
    """Returns the local copy of the folder of each split."""
    root = source.rstrip("/")
    names = {
        split: name
        for split, names in _SPLITS.items()
        for name in names
        if has_index(f"{root}/{name}", options, cache_dir)
    }
    urls = {split: f"{root}/{name}" for split, name in names.items()} if "train" in names else {"train": root}
    return {split: open_litdata(url, cache_dir, cache_bytes, options) for split, url in urls.items()}


def _own_tokenizer(source: str) -> Tokenizer:
    folder = Path(os.path.expanduser(source))
    if is_remote(source) or not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(
            f"data.tokenizer is not set, and {source} has none of {', '.join(_TOKENIZERS)}.\nName the tokenizer that made the "
            f"tokens: {_NAME_IT}"
        )
    return PretrainedTokenizer(str(folder))


def _held_out(folder: Path, fraction: float) -> dict[str, Path]:
    """Returns names of the training and of the validation part of a folder; see `part_of`."""
    store = TokenStore(folder)
    share = max(2, round(len(store) * fraction))
    cut = len(store) - share
    if cut < 2:
        raise ConfigError(f"{folder} has {len(store):,} tokens, too few to hold some out for validation.")
    near = store.starts_between(max(2, cut - share // 2), min(cut + share // 2, len(store) - 2) + 1)
    if len(near):
        cut = int(near[abs(near - cut).argmin()])
    return {"train": part_of(folder, 0, cut), "validation": part_of(folder, cut, len(store))}
