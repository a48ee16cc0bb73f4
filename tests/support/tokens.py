"""A data module of stored tokens, whatever they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.contracts import PackedBatches
from core.data.token_datamodule import TokenDataModule
from datamodules.packing.concatenate import Concatenate


class StoredTokens(TokenDataModule):
    """Rows of a folder that TokenShards wrote, without a tokenizer."""

    tokenizer_json, end_of_text_id, train_tokens = "{}", 0, 8001

    def __init__(
        self, folder: str, sequence_length: int, batch_size: int, shuffle: bool, num_workers: int = 0,
        vocab_size: int = 8192, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(sequence_length, batch_size, shuffle, seed, num_workers)
        self.folder, self.vocab_size = Path(folder), vocab_size

    def packed(self, split: str, **order: Any) -> PackedBatches:
        return Concatenate().batches(self.folder / split, **order)
