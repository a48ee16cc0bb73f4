"""What the doctor measures during a run, put together: before the first step, and in steps that are examined."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from typing import Any

from lightning.pytorch import Trainer

from core.contracts import Batch, HasTokenizer, PackedBatches
from core.data.token_datamodule import TokenDataModule
from toolkit.diagnosis import data_probes, network_probes

__all__ = ["Probes"]

WHOLE = ("SingleDeviceStrategy", "DDPStrategy", "DDP")
"""Strategies under which every process has all weights."""

ROWS = 8
"""Rows that are read at a time, however large the batches of the run are, and on which the network is examined."""

SPANS = 4
"""So many times more batches are read to look for validation text in them."""


class Probes:
    """Measures; figures are of all ranks.

    Args:
        batches: Batches of 8 training rows that are read before the first step.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.stepped = self._is_whole = False
        self._kept: list[tuple[Any, int]] = []
        self._fixed: Any = None
        self._plain = 0.0
        self._check: network_probes.GradientCheck | None = None

    def start(self, trainer: Trainer, module: Any, is_fresh: bool) -> dict[str, float]:
        """Returns figures of the data, and of what the network sees; every rank reads the same rows.

        Args:
            trainer: The trainer.
            module: Its LanguageModule.
            is_fresh: Whether the run begins; one that is resumed was looked at when it began.
        """
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._kept, self._check, self._fixed, self.stepped = [], None, None, False
        whole, figures = type(trainer.strategy).__name__ in WHOLE, dict[str, float]()
        self._is_whole = whole
        if isinstance(data, TokenDataModule) and data.training_loader is not None and self.batches:
            validation = _read(data.val_dataloader().batches, self.batches)
            if (
                whole
                and validation
                and _has_labels(validation[0])
                and module.network.output_weight is not None
            ):
                self._fixed = trainer.strategy.batch_to_device(validation[0])
            training = _read(data.training_loader.batches, SPANS * self.batches) if is_fresh else []
            if training and _has_labels(training[0]):
                figures |= self._of_data(data, training, validation)
                if whole and module.network.output_weight is not None:
                    first = trainer.strategy.batch_to_device(training[0])
                    figures |= network_probes.visibility(module.network, first)
        if is_fresh and self._fixed is not None:
            state = network_probes.inner_state(module.network, self._fixed)
            figures |= {name.replace("doctor/", "doctor/initial_"): value for name, value in state.items()}
        if is_fresh and whole:
            figures["doctor/frozen"] = network_probes.frozen_share(module.network)
            figures["doctor/blocks_of_zeros"] = network_probes.blocks_of_zeros(module.network)
        return figures

    def _of_data(self, data: Any, read: Sequence[Batch], validation: Sequence[Batch]) -> dict[str, float]:
        loader = data.training_loader
        epoch = max(len(loader) * loader.batches.batch_size * loader.batches.world_size // ROWS, 1)
        read = read[:epoch]
        training = read[: self.batches]
        counts = data_probes.label_counts(training)
        counts |= data_probes.repeated_rows(training)
        counts |= data_probes.position_counts(training)
        counts |= data_probes.seen_spans(validation, read, len(read) / epoch)
        if len(training) >= 8:
            counts |= data_probes.neighbours(training, data.vocab_size)
        if isinstance(data, HasTokenizer):
            counts |= data_probes.round_trips(training[:2], data.tokenizer_json)
        return {name: float(hits / total) for name, (hits, total) in counts.items() if total}

    def keep(self, batch: Any, index: int) -> None:
        """Keeps a micro-batch of a step that is examined."""
        self._kept.append((batch, index))

    def before_step(self, trainer: Trainer, module: Any) -> None:
        """Computes the gradients of the kept micro-batches again."""
        self.stepped = True
        if self._is_whole:
            self._check = network_probes.GradientCheck(module, self._kept, trainer.gradient_clip_val)  # type: ignore[arg-type]
            self._plain = network_probes.plain_loss(module, [batch for batch, _ in self._kept])

    def after_step(self, trainer: Trainer, module: Any) -> dict[str, float]:
        """Returns the figures of an examined step."""
        figures: dict[str, float] = {}
        self._kept, self.stepped = [], False
        if self._check is not None:
            norm = float(module.gradient_norm(trainer.optimizers[0])) if module.logging_step else None
            figures |= self._check.figures(norm)
            figures["doctor/plain_loss"] = self._plain
            self._check = None
        if self._fixed is not None:
            figures |= network_probes.inner_state(module.network, self._fixed)
        steps = network_probes.optimizer_steps(trainer.optimizers[0])
        if steps is not None:
            figures["doctor/optimizer_steps_behind"] = trainer.global_step - steps
        return figures | self.anchor(module)

    def anchor(self, module: Any) -> dict[str, float]:
        """Returns the loss of a batch that stays the same."""
        if self._fixed is None:
            return {}
        return {"doctor/anchor_loss": network_probes.plain_loss(module, [self._fixed])}


def _read(batches: PackedBatches, count: int) -> list[Batch]:
    """Returns the coming rows in batches of `ROWS`, the same on every rank; their own position stays."""
    everything = copy.copy(batches)
    everything.batch_size, everything.rank, everything.world_size = ROWS, 0, 1
    return [batch for _, batch in islice(everything, count)]


def _has_labels(batch: Batch) -> bool:
    """Returns whether each token of a batch may have a label: not so for encoders with decoders, and for pairs."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    return ids is not None and labels is not None and ids.shape == labels.shape
