"""What the doctor measures during a run, put together: before the first step, and in steps that are examined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Trainer

from core.contracts import IGNORED_LABEL, HasTokenizer
from core.data.token_datamodule import TokenDataModule
from toolkit.diagnosis import data_probes, network_probes
from toolkit.diagnosis.data_probes import Counts

__all__ = ["Probes"]

WHOLE = ("SingleDeviceStrategy", "DDPStrategy", "DDP")
"""Strategies under which every process has all weights."""

SPANS = 4
"""So many times more batches are read to look for validation text in them."""


class Probes:
    """Measures; figures are of all ranks.

    Args:
        batches: Training batches that are read before the first step.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.stepped = False
        self._kept: list[tuple[Any, int]] = []
        self._anchor: Any = None
        self._check: network_probes.GradientCheck | None = None

    def start(self, trainer: Trainer, module: Any) -> dict[str, float]:
        """Returns figures of the data, and of what the network sees."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        figures: dict[str, float] = {}
        self._kept, self._check, self._anchor, self.stepped = [], None, None, False
        if isinstance(data, TokenDataModule) and data.training_loader is not None and self.batches:
            loader = data.training_loader
            epoch = max(len(loader), 1)
            training = [batch for _, batch in islice(loader.batches, min(SPANS * self.batches, epoch))]
            validation = list(islice(iter(data.val_dataloader()), self.batches))
            figures |= self._of_data(trainer, data, training, validation, epoch)
            self._anchor = trainer.strategy.batch_to_device((validation or training)[0])
            first = trainer.strategy.batch_to_device(training[0])
            if self._is_whole(trainer) and "input_ids" in first and module.network.output_weight is not None:
                figures |= self._mean(trainer, network_probes.visibility(module.network, first))
        if self._is_whole(trainer):
            figures["doctor/frozen"] = network_probes.frozen_share(module.network)
            figures["doctor/blocks_of_zeros"] = network_probes.blocks_of_zeros(module.network)
        return figures

    def _of_data(
        self, trainer: Trainer, data: Any, training: Sequence[Any], validation: Sequence[Any], epoch: int
    ) -> dict[str, float]:
        counts: Counts = {}
        if not training or training[0]["input_ids"].shape != training[0]["labels"].shape:
            return {}
        counts |= data_probes.seen_spans(validation, training, len(training) / epoch)
        training = training[: self.batches]
        counts |= data_probes.label_counts(training)
        counts |= data_probes.repeated_rows(training)
        counts |= data_probes.position_counts(training)
        if len(training) >= 8:
            counts |= data_probes.neighbours(training, data.vocab_size)
        if isinstance(data, HasTokenizer):
            counts |= data_probes.round_trips(training[:2], data.tokenizer_json)
        return self._shares(trainer, counts)

    def _shares(self, trainer: Trainer, counts: Counts) -> dict[str, float]:
        sums = torch.tensor(list(counts.values()), dtype=torch.float64)
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums.to(trainer.strategy.root_device), reduce_op="sum").cpu()  # type: ignore[union-attr]
        return {name: float(hits / total) for name, (hits, total) in zip(counts, sums, strict=True) if total}

    def _mean(self, trainer: Trainer, figures: Mapping[str, float]) -> dict[str, float]:
        if trainer.world_size == 1:
            return dict(figures)
        values = torch.tensor(
            list(figures.values()), dtype=torch.float64, device=trainer.strategy.root_device
        )
        values = trainer.strategy.reduce(values, reduce_op="mean")  # type: ignore[assignment]
        return dict(zip(figures, values.tolist(), strict=True))

    def _is_whole(self, trainer: Trainer) -> bool:
        return type(trainer.strategy).__name__ in WHOLE

    def keep(self, batch: Any, index: int) -> None:
        """Keeps a micro-batch of a step that is examined."""
        self._kept.append((batch, index))

    def before_step(self, trainer: Trainer, module: Any) -> None:
        """Computes the gradients of the kept micro-batches again."""
        self.stepped = True
        if self._is_whole(trainer):
            self._check = network_probes.GradientCheck(module, self._kept, trainer.gradient_clip_val)  # type: ignore[arg-type]
            self._plain = (
                network_probes.plain_loss(module, self._kept[-1][0]) if len(self._kept) == 1 else None
            )

    def after_step(self, trainer: Trainer, module: Any) -> dict[str, float]:
        """Returns the figures of an examined step."""
        figures: dict[str, float] = {}
        batch = self._kept[-1][0]
        self._kept, self.stepped = [], False
        if self._check is not None:
            norm = float(module.gradient_norm(trainer.optimizers[0])) if module.logging_step else None
            figures |= self._check.figures(norm)
            self._check = None
            if self._plain is not None:
                figures["doctor/plain_loss"] = self._plain
            if module.network.output_weight is not None and (batch["labels"] != IGNORED_LABEL).any():
                figures |= network_probes.inner_state(module.network, batch)
            figures = self._mean(trainer, figures)
        steps = network_probes.optimizer_steps(trainer.optimizers[0])
        if steps is not None:
            figures["doctor/optimizer_steps_behind"] = trainer.global_step - steps
        return figures | self.anchor(module)

    def anchor(self, module: Any) -> dict[str, float]:
        """Returns the loss of a batch that stays the same."""
        if self._anchor is None or not self._is_whole(module.trainer):
            return {}
        loss = network_probes.plain_loss(module, self._anchor)
        return self._mean(module.trainer, {"doctor/anchor_loss": loss})
