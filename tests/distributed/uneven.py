"""A data module whose rows have very different numbers of label tokens, cut into ranks by slices."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer

from core.contracts import IGNORED_LABEL


class UnevenData(LightningDataModule):
    """Global batches of `rows` rows; rank r of W reads rows [r * rows/W, (r+1) * rows/W) of each.

    Args:
        rows: Rows of a global batch.
        batches: Global batches of an epoch.
    """

    def __init__(self, rows: int = 4, batches: int = 12) -> None:
        super().__init__()
        self.rows, self.batches = rows, batches

    def _loader(self, seed: int) -> torch.utils.data.DataLoader:
        tokens = torch.randint(
            64, (self.batches, self.rows, 17), generator=torch.Generator().manual_seed(seed)
        )
        labels = tokens[:, :, 1:].clone()
        for row in range(self.rows):  # from all tokens in the first row to two in the last
            labels[:, row, 16 - 14 * row // (self.rows - 1) :] = IGNORED_LABEL
        share = self.rows // self.trainer.world_size
        own = slice(share * self.trainer.global_rank, share * (self.trainer.global_rank + 1))
        batches = [
            {"input_ids": ids[own, :-1], "labels": wanted[own]}
            for ids, wanted in zip(tokens, labels, strict=True)
        ]
        return torch.utils.data.DataLoader(batches, batch_size=None)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return self._loader(0)

    def val_dataloader(self) -> torch.utils.data.DataLoader:
        return self._loader(1)


class LastStep(Callback):
    """Prints the number of optimizer steps done when the run breaks off."""

    def on_exception(self, trainer: Trainer, *args: object) -> None:
        print(f"LAST_STEP {trainer.global_step}", flush=True)
