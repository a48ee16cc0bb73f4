"""A data module of fixed random tokens: no files, no preparation, resumable in mid-epoch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor


class ToyLoader:
    """Yields batches of fixed rows in order; its state is how many it has yielded in this epoch."""

    def __init__(self, rows: Tensor, batch_size: int) -> None:
        self.rows, self.batch_size = rows, batch_size
        self._start = self._position = 0

    def __len__(self) -> int:
        return len(self.rows) // self.batch_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._position, self._start = self._start, 0
        while self._position < len(self):
            at = self._position * self.batch_size
            self._position += 1
            batch = self.rows[at : at + self.batch_size]
            yield {"input_ids": batch[:, :-1], "labels": batch[:, 1:]}

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["position"]


class ToyData(LightningDataModule):
    """Random token rows, the same for the same arguments.

    Args:
        rows: Training rows; a quarter as many again for validation, test and prediction.
        sequence_length: Tokens per row T, without the one label token more.
        vocab_size: Number of different tokens.
        batch_size: Rows per batch.
        seed: Of the tokens.
    """

    def __init__(
        self,
        rows: int = 64,
        sequence_length: int = 16,
        vocab_size: int = 64,
        batch_size: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size, self.sequence_length, self.batch_size = vocab_size, sequence_length, batch_size
        held_out = max(rows // 4, batch_size)
        tokens = torch.randint(
            vocab_size, (rows + held_out, sequence_length + 1), generator=torch.Generator().manual_seed(seed)
        )
        self._train, self._held_out = tokens[:rows], tokens[rows:]

    def train_dataloader(self) -> ToyLoader:
        return ToyLoader(self._train, self.batch_size)

    def val_dataloader(self) -> ToyLoader:
        return ToyLoader(self._held_out, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader
