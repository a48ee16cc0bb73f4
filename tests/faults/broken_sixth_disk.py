"""A data module whose batches come from a slow disk, for the sixth set."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from core import pretrain_datamodule
from core.data.token_loader import TokenLoader


class SlowLoader(TokenLoader):
    """Batches of which each takes a while."""

    seconds: float

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            time.sleep(self.seconds)
            yield batch


class PretrainDataModule(pretrain_datamodule.PretrainDataModule):
    """Text on a slow disk.

    Args:
        seconds: For a training batch.
        ranks: Ranks that have this disk; None: all.
        others: Those of the data module.
    """

    def __init__(self, seconds: float, ranks: Sequence[int] | None = None, **others: Any) -> None:
        super().__init__(**others)
        self.seconds, self.ranks = seconds, ranks

    def train_dataloader(self) -> TokenLoader:
        loader: Any = super().train_dataloader()
        trainer: Any = self.trainer
        if self.ranks is None or trainer.global_rank in self.ranks:
            loader.__class__, loader.seconds = SlowLoader, self.seconds
        return loader
