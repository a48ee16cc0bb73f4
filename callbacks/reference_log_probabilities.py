"""Computes once, before the first step, how probable the network that a run starts from finds each answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from core.technique import Feature, technique
from core.training.loss_ranks import sum_over
from toolkit.generation.rows import evaluating
from toolkit.log_probabilities import log_probabilities, row_sums
from toolkit.references import RECORDS, KeepsReferences
from toolkit.trials import say


@technique(
    paper="DPO, arXiv:2305.18290, equation 7: its reference policy",
    needs=(Feature("exact_resume"), Feature("preference_pairs")),
    offers=("reference_log_probabilities",),
    conflicts={
        "SequenceLengthSchedule": "it changes which tokens of an answer a batch has, and its log-probability is computed once"
    },
)
class ReferenceLogProbabilities(Callback):
    """Computes the log-probability of each answer under the network that the run starts from, for DPO and KTO.

    The reference is the network as it is before the first step: with `model.weights` those weights, in eval mode and with the
    precision of the run. One forward pass over all records, 8 bytes for each of them, and no second network in memory. The
    values are saved in every checkpoint: a resumed run has the same reference, bit by bit, also where the weights that it
    began with are gone.

    Raises:
        ConfigError: If a checkpoint has no such values, because the run was begun without this callback.

    Example:
        model:
          objective: DPO
        data:
          class_path: PreferenceDataModule
          init_args:
            source: pairs.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
        trainer:
          callbacks+:
            - ReferenceLogProbabilities
    """

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Computes before the first validation batch."""
        self._compute(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Computes before the first step."""
        self._compute(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Computes for `validate` without a checkpoint."""
        self._compute(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Computes for `test` without a checkpoint."""
        self._compute(trainer, pl_module)

    def _compute(self, trainer: Trainer, pl_module: Any) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, KeepsReferences):
            raise ConfigError(
                f"ReferenceLogProbabilities: {type(data).__name__} keeps no references. Take --data=PreferenceDataModule."
            )
        if data.references:
            return
        if trainer.ckpt_path:
            raise ConfigError(
                f"{trainer.ckpt_path} has no reference log-probabilities: its run was begun without ReferenceLogProbabilities, and the "
                "network that it started from is not known.\nStart a run from these weights: --model.weights in place of "
                "the checkpoint; they are its reference."
            )
        found = {
            split: self._split(trainer, pl_module, shape, batches)
            for split, shape, batches in data.every_record()
        }
        data.references.update(found)
        count = sum(len(values) for values in found.values())
        say(trainer, self, f"the log-probabilities of {count:,} records under the initial network are known.")

    def _split(self, trainer: Trainer, pl_module: Any, shape: tuple[int, int], batches: Any) -> Tensor:
        """Returns the values of a split, (records, rows of a record), on the CPU."""
        table = torch.zeros((2, *shape), device=pl_module.device)  # values, and how many ranks have them
        recording = _Recording()
        objective, pl_module.objective = pl_module.objective, recording
        try:
            with torch.no_grad(), evaluating(pl_module):
                for batch in batches:
                    batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
                    # the one call that gathers the weights under every strategy
                    trainer.strategy.validation_step(batch, 0)
                    rows = batch[RECORDS][:: shape[1], 0]
                    known = rows >= 0
                    values = recording.sums.view(-1, shape[1])[known].to(table.dtype)
                    table[:, rows[known]] = torch.stack((values, torch.ones_like(values)))
        finally:
            pl_module.objective = objective
        values, ranks = sum_over(trainer, table).unbind()
        return (values / ranks).cpu()  # 0 / 0 where no rank has the record


class _Recording(Objective):
    """Keeps the log-probability of each row in the place of a loss."""

    sums: Tensor

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns nothing to add up."""
        labels = batch["labels"]
        self.sums = row_sums(log_probabilities(network, batch), labels)[0]
        nothing = (labels != IGNORED_LABEL).sum() * 0
        return TokenSum(nothing.float(), nothing), {}
