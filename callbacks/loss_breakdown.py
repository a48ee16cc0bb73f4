"""The loss by position, by length of the document and by source."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from core.contracts import IGNORED_LABEL, CountsEpochs
from core.errors import ConfigError
from core.lightning_compat import is_accumulating
from core.technique import technique
from core.training.figures import log_figures
from core.training.loss_ranks import dp_size, sum_over
from toolkit.log_probabilities import log_probabilities_at
from toolkit.sampled_steps import in_training_forward
from toolkit.shards import SplitsTokens
from toolkit.sources import SOURCES, HasSources, mark_stored_sources

BINS = 32
"""Powers of two: the last bin begins beyond any row."""


@technique(
    paper="loss by position: Kaplan et al., arXiv:2001.08361, appendix D.5; by source: DoReMi, arXiv:2305.10429",
    observer=True,
)
class LossBreakdown(Callback):
    """The training loss of a step by position, by length of the document and by source, and tokens of each source.

    Logged are means in nats per label token over all micro-batches and ranks of every `every_n_steps`-th step:

    - `loss/position_<lo>_<hi>`: of tokens with lo <= position < hi in their document; bins double in width.
    - `loss/length_<lo>_<hi>`: of tokens of documents, or parts of them, with lo <= tokens in the row < hi. In batches without
      `document_ids` a row is one document that ends with its last label.
    - `loss/source/<name>`, where the data module mixes sources (`MixtureDataModule`, `TaskMixtureDataModule`), or its prepared folder
      has a `documents.parquet` with several (packed by Concatenate, BestFit or PaddedDocuments): of tokens in documents of the source.
      Of more than 50 sources in a folder, those with fewest tokens are `others`.
    - `tokens/source/<name>`, where the data module mixes sources: tokens of the source that were read since the start of the run.
      `epoch/<name>` is logged without this callback.

    Weighed by their tokens, the means of each kind add up to the cross-entropy of the step: `train/loss` without smoothing and
    the like. A bin without tokens is left out. After validation the same is logged as `val/loss/position_...`. Logits are
    computed twice in steps that are broken down, in chunks. Others cost nothing, but for a prepared folder with several sources: as a
    batch is read, the source of each of its tokens is looked up.

    Args:
        every_n_steps: Optimizer steps between two that are broken down.
        first_bin: Positions, and tokens of a document, in the first bin; a power of two.
        validation: Whether the validation loss is broken down too, which takes the time of one more output layer.

    Raises:
        ConfigError: If an argument is out of range, or the objective's loss is not in nats per token.

    Example:
        trainer:
          callbacks+:
            - class_path: LossBreakdown
              init_args: {every_n_steps: 100, first_bin: 16}
    """

    def __init__(self, every_n_steps: int = 100, first_bin: int = 16, validation: bool = True) -> None:
        if every_n_steps < 1 or first_bin < 1 or first_bin & (first_bin - 1):
            raise ConfigError(
                f"LossBreakdown takes every_n_steps >= 1 and a power of two as first_bin, not {every_n_steps} and {first_bin}."
            )
        self.every_n_steps, self.first_bin, self.validation = every_n_steps, first_bin, validation
        self._sources: list[str] = []
        self._sums = torch.zeros(0)
        self._handle: Any = None
        self._validating = False
        self._splits: SplitsTokens | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Asks the data for the sources of its rows."""
        objective: Any = pl_module.objective
        if objective.loss_unit != "nats/token":
            raise ConfigError(
                f"LossBreakdown: the loss of {type(objective).__name__} is in {objective.loss_unit}. It breaks down losses of "
                "tokens: leave it out."
            )
        data: Any = getattr(trainer, "datamodule", None)
        if isinstance(data, HasSources):
            data.mark_sources()
            self._sources = list(data.source_tokens)
        else:
            self._sources = mark_stored_sources(data)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins with the first micro-batch of a step that is due."""
        if self._handle is None and not (trainer.global_step + 1) % self.every_n_steps:
            self._start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the step with its last micro-batch."""
        if self._handle is None or is_accumulating(trainer):
            return
        figures = self._stop(trainer, "")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        read = data.epochs() if self._sources and isinstance(data, CountsEpochs) else {}
        if isinstance(data, HasSources):
            for name, epochs in read.items():
                figures[f"tokens/source/{name}"] = round(epochs * data.source_tokens[name])
        log_figures(trainer, figures)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins with the first batch, unless a step is broken down, between whose micro-batches this is."""
        if self.validation and self._handle is None and not trainer.sanity_checking:
            self._start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the means over the whole validation set."""
        if self._handle is not None and self._validating:
            log_figures(trainer, self._stop(trainer, "val/"))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops listening where a step breaks off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = not pl_module.training
        self._splits = trainer.strategy if isinstance(trainer.strategy, SplitsTokens) else None
        rows = 2 * BINS + len(self._sources)
        self._sums = torch.zeros(2, rows, dtype=_widest(pl_module.device), device=pl_module.device)
        network: Any = pl_module.network
        self._handle = network.register_forward_hook(self._add)

    def _stop(self, trainer: Trainer, prefix: str) -> dict[str, float]:
        self._handle.remove()
        self._handle = None
        sums = sum_over(trainer, self._sums)
        if trainer.world_size > dp_size(trainer):
            # of a pipeline, the ranks of the last stage have it; no loss is below 0
            sums = torch.as_tensor(trainer.strategy.reduce(sums, reduce_op="max"))
        totals, counts = sums.tolist()
        names = [f"{kind}_{span}" for kind in ("position", "length") for span in spans(self.first_bin)]
        names += [f"source/{name}" for name in self._sources]
        return {
            f"{prefix}loss/{name}": total / count
            for name, total, count in zip(names, totals, counts, strict=True)
            if count
        }

    def _add(self, network: Any, inputs: tuple[Any, ...], hidden: Tensor) -> None:
        """Adds the losses of a call of the network."""
        batch: Mapping[str, Tensor] = inputs[0]
        # validation between the micro-batches of a step is no part of it, nor is text that is generated
        if network.training == self._validating or "labels" not in batch:
            return
        if self._validating or in_training_forward(network):
            with torch.no_grad():
                self._add_losses(network, batch, hidden)

    def _add_losses(self, network: Any, batch: Mapping[str, Tensor], hidden: Tensor) -> None:
        losses = -log_probabilities_at(network, hidden.detach(), batch["labels"])
        if self._splits is not None:  # then each rank counts whole rows: in sums and numbers alike
            losses, batch = self._splits.all_tokens(losses), self._whole(batch)
        labels, losses = batch["labels"], losses.flatten()
        counted = (labels != IGNORED_LABEL).flatten()
        values = torch.stack((losses, counted.to(losses))).to(self._sums)
        positions, lengths = places(batch)
        kinds = [bins(positions, self.first_bin), bins(lengths, self.first_bin) + BINS]
        if SOURCES in batch:
            kinds.append(batch[SOURCES] + 2 * BINS)
        for kind in kinds:
            # a position without a label has the values 0 and 0; padding has no source
            self._sums.index_add_(1, kind.flatten().clamp(min=0), values * (kind.flatten() >= 0))

    def _whole(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns of a batch with some tokens of each row what is known of all of them."""
        assert self._splits is not None
        # positions follow from the documents: those of the batch may count from the beginning of the row
        found = {name: self._splits.all_tokens(batch[name]) for name in ("labels", SOURCES) if name in batch}
        if (documents := batch.get("document_ids", self._splits.row_documents)) is not None:
            found["document_ids"] = documents
        return found


def places(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the position of each token in its document, and the tokens of the document in the row, both (B, T).

    Args:
        batch: With `labels` (B, T), and `document_ids` and `position_ids` where rows have several documents.
    """
    labels = batch["labels"]
    n_tokens = labels.shape[1]
    row = torch.arange(n_tokens, device=labels.device)
    if (documents := batch.get("document_ids")) is None:
        ends = ((labels != IGNORED_LABEL) * (row + 1)).amax(1, keepdim=True)
        return row.expand_as(labels), ends.expand_as(labels)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = torch.where(starts, row, 0).cummax(1).values
    ends = torch.where(starts, row, n_tokens).roll(
        -1, 1
    )  # at the last token of a document, where the next one begins
    ends[:, -1] = n_tokens
    ends = ends.flip(1).cummin(1).values.flip(1)
    return batch.get("position_ids", row - begins), ends - begins


def bins(values: Tensor, first: int) -> Tensor:
    """Returns the number of each value's bin, int64: [0, first), [first, 2 first), [2 first, 4 first), ..."""
    edges = first * 2 ** torch.arange(BINS - 1, device=values.device)
    return torch.bucketize(values.contiguous(), edges, right=True)


def spans(first: int) -> list[str]:
    """Returns the bins as they are called in names of figures."""
    edges = [0, *(first * 2**i for i in range(BINS))]
    return [f"{low}_{high}" for low, high in pairwise(edges)]


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
