"""A data module whose rows have very different numbers of label tokens, cut into ranks by slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer

from core.contracts import IGNORED_LABEL
from core.technique import technique


class Resumable:
    """Yields prepared batches in order; its state is how many it has yielded in this epoch."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.batches, self._start, self._position = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self._position, self._start = self._start, 0
        while self._position < len(self):
            self._position += 1
            yield self.batches[self._position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["position"]


class UnevenData(LightningDataModule):
    """Global batches of `rows` rows; data rank r of W reads rows [r * rows/W, (r+1) * rows/W) of each.

    Args:
        rows: Rows of a global batch.
        batches: Global batches of an epoch.
        documents: Whether each row holds several documents, of other lengths in each row.
        lengths: Tokens of a row, in turn for the batches; up to 16.
    """

    def __init__(
        self, rows: int = 8, batches: int = 12, documents: bool = False, lengths: Sequence[int] = (16,)
    ) -> None:
        super().__init__()
        self.rows, self.batches, self.documents, self.lengths = rows, batches, documents, lengths

    def _loader(self, seed: int) -> Resumable:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(64, (self.batches, self.rows, 17), generator=generator)
        ends = torch.rand(self.batches, self.rows, 16, generator=generator) < 0.25
        document_ids = ends.long().cumsum(-1)
        labels = tokens[:, :, 1:].clone()
        for row in range(self.rows):  # from all tokens in the first row to two in the last
            labels[:, row, 16 - 14 * row // (self.rows - 1) :] = IGNORED_LABEL
        place = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        share = self.rows // place["num_replicas"]
        own = slice(share * place["rank"], share * (place["rank"] + 1))
        batches = [
            {"input_ids": ids[own, :-1], "labels": wanted[own]}
            | ({"document_ids": documents[own]} if self.documents else {})
            for ids, wanted, documents in zip(tokens, labels, document_ids, strict=True)
        ]
        many = len(self.lengths)
        return Resumable(
            [
                {name: value[:, : self.lengths[number % many]] for name, value in batch.items()}
                for number, batch in enumerate(batches)
            ]
        )

    def train_dataloader(self) -> Resumable:
        return self._loader(0)

    def val_dataloader(self) -> Resumable:
        return self._loader(1)


@technique(paper="", offers=("labels", "answer_labels", "preference_pairs"))
class UnevenAnswers(UnevenData):
    """Rows of which any objective for fine-tuning takes the labels: as classes, answers or pairs."""


class LastStep(Callback):
    """Notes the number of optimizer steps done when the run breaks off.

    Args:
        folder: Where each rank writes to.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_exception(self, trainer: Trainer, *args: object) -> None:
        (self.folder / f"last_step.{trainer.global_rank}").write_text(
            str(trainer.global_step), encoding="utf-8"
        )
