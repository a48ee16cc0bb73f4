"""Trains on several prepared folders, mixed in given shares."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from core.contracts import PackedBatches, Packing
from core.data.token_datamodule import TokenDataModule, default_cache_dir
from core.errors import ConfigError
from core.technique import technique
from datamodules.packing.mixture import MixedBatches
from datamodules.remote.remote_folder import open_remote
from toolkit.prepared import (
    is_remote,
    prepared_folder,
    read_manifest,
    read_tokenizer,
    split_folder,
    splits_of,
)


@technique(
    paper="shares by deficit, as in weighted round robin (Katevenis et al., 1991); replay shares for continual "
    "pre-training: Ibrahim et al., arXiv:2403.08763",
    offers=("exact_resume",),
)
class MixtureDataModule(TokenDataModule):
    """Rows of several prepared folders, mixed in shares that may change over the run.

    The source of a row is not drawn at random: after n rows each source has given its share to within one row. Each
    source has its own epochs. Validation reads the validation splits of all sources, one after the other; `test`
    their test splits, if all have one.

    Args:
        sources: Name -> a folder that `python -m core prepare` wrote, local or on s3://, gs://, azure:// or hf://
            (see PretrainDataModule). All need the same tokenizer.
        weights: Name -> its share of the rows, relative to the others; or points [tokens, weight] with linear
            interpolation over the tokens of the run.
        packing: Puts documents into rows.
        sequence_length: Tokens in a row.
        batch_size: Rows in a micro-batch, on each rank.
        shuffle: Whether each epoch of a source has its rows in a new order.
        seed: Seed of these orders.
        num_workers: Processes that read ahead, on each rank.
        cache_dir: Where shards of remote folders are cached; by default `$XDG_CACHE_HOME/leyden` or `~/.cache/leyden`.
        cache_bytes: Most bytes of such shards, of all sources together; None: three quarters of the free space on
            the disk.
        storage_options: Options of the remote folders' client, such as boto3's {endpoint_url: ..., region_name: ...}.

    Raises:
        ConfigError: If a folder is not prepared, the tokenizers differ, or weights do not fit the sources.

    Example:
        data:
          class_path: MixtureDataModule
          init_args:
            sources: {web: data/web, code: data/code}
            weights: {web: 0.8, code: [[0, 0.2], [1000000000, 0.6]]}
            packing: Concatenate
    """

    def __init__(
        self,
        sources: dict[str, str],
        weights: dict[str, float | list[tuple[int, float]]],
        packing: Packing,
        sequence_length: int = 256,
        batch_size: int = 8,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(sequence_length, batch_size, shuffle, seed, num_workers)
        self.packing, self.weights = packing, weights
        cache = Path(os.path.expanduser(cache_dir or default_cache_dir())), cache_bytes, storage_options
        self.folders = {
            name: open_remote(source, *cache) if is_remote(source) else _prepared(name, source)
            for name, source in sources.items()
        }
        if not self.folders:
            raise ConfigError("data.sources is empty: name at least one prepared folder.")
        manifests = {name: read_manifest(folder) for name, folder in self.folders.items()}
        self.vocab_size = max(manifest["vocab_size"] for manifest in manifests.values())
        self.source_tokens = {name: manifest["train_tokens"] for name, manifest in manifests.items()}
        self.train_tokens = sum(self.source_tokens.values())
        self._mark = False

    def mark_sources(self) -> None:
        """Adds the source of each row to all batches."""
        self._mark = True

    def setup(self, stage: str | None = None) -> None:
        """Reads the tokenizers and checks that they are the same.

        Raises:
            ConfigError: If they differ, or one cannot be read.
        """
        super().setup(stage)
        found: dict[tuple[str, int], str] = {}
        for name, folder in self.folders.items():
            manifest = read_manifest(folder)
            found.setdefault((read_tokenizer(folder, manifest), manifest["end_of_text_id"]), name)
        if len(found) > 1:
            one, other = list(found.values())[:2]
            raise ConfigError(
                f"{self.folders[one]} and {self.folders[other]} were written by different tokenizers: prepare both "
                "with the same one\n(tokenizer: {class_path: PretrainedTokenizer, init_args: {path: .../tokenizer.json}})."
            )
        [(self.tokenizer_json, self.end_of_text_id)] = found
        everywhere = all("test" in splits_of(read_manifest(folder)) for folder in self.folders.values())
        self.test_split = "test" if everywhere else "validation"

    def packed(self, split: str, **order: Any) -> PackedBatches:
        """Returns the mixed batches of a split."""
        parts = {
            name: self.packing.batches(split_folder(folder, split), **order)
            for name, folder in self.folders.items()
        }
        return MixedBatches(parts, self.weights, self._mark)


def _prepared(name: str, source: str) -> Path:
    folder = prepared_folder(source)
    if folder is None:
        raise ConfigError(
            f"data.sources.{name}: {source} is no prepared folder; `python -m core prepare` writes one."
        )
    return folder
