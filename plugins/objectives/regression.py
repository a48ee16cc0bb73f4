"""Regression: a number for each text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, TokenSum
from core.errors import ConfigError
from core.technique import Feature, technique
from plugins.objectives.classes import LabelObjective

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

MOMENTS = ("prediction", "target", "prediction^2", "target^2", "prediction target")
"""Means that the correlation is computed from."""


@technique(
    paper="GLUE's STS-B, arXiv:1804.07461, section 3.2; BERT, arXiv:1810.04805, section 4.1",
    needs=(Feature("labels"),),
    offers=("label_objective", "keeps_weights"),
)
class Regression(LabelObjective):
    """Learns a number for each text: the squared error of a head's output at the text's label.

    The head, dropout and a linear map, is on the hidden state at the position of the label, as for `SequenceClassification`. `data.task`
    is `values`; the numbers are learnt as they are: bring those far from 1 to that size before.

    Logged: the loss is the mean squared error; in validation `pearson`, the correlation of predictions and numbers, over all
    ranks and batches; 0 where one of them is constant.

    The network's own output weight, unless it is that of its embedding, is frozen and not used. The head is a parameter of the
    objective, saved with it; `python -m core classify` writes the numbers of texts.

    Args:
        dropout: Before the head; 0.1 in BERT.
        pooler: Whether a map of C to C features and a tanh come before the head, as in BERT.

    Raises:
        ConfigError: If a value is out of range, the data have no numbers, or the network returns logits.

    Example:
        model:
          objective:
            class_path: Regression
            init_args: {dropout: 0.0}
        data:
          class_path: LabelledDataModule
          init_args:
            source: similar.jsonl
            task: values
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            sequence_length: 256
            batch_size: 16
    """

    loss_unit = "squared error"

    def __init__(self, dropout: float = 0.0, pooler: bool = False) -> None:
        super().__init__(dropout, pooler)

    @property
    def outputs(self) -> int:
        """1."""
        return 1

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error if the data have other labels."""
        yield from cls.tasks_fault(run, "values")

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the sum of squared errors with the number of labels, and in validation what the correlation is made of."""
        if "targets" not in batch:
            raise ConfigError(
                "Regression learns the targets of a batch, and there are none: take --data=LabelledDataModule with data.task=values."
            )
        seen = batch["labels"] != IGNORED_LABEL
        tokens = seen.sum()
        found = self.scores(network, batch).squeeze(-1)
        wanted = batch["targets"].to(found)
        loss = TokenSum(((found - wanted).square() * seen).sum(), tokens)
        if self.training:
            return loss, {}
        x, y = (value.detach() * seen for value in (found, wanted))
        if x.device.type != "mps":  # which has no float64; squares of large numbers need it
            x, y = x.double(), y.double()
        sums = dict(zip(MOMENTS, (x, y, x * x, y * y, x * y), strict=True))
        return loss, {name: TokenSum(value.sum(), tokens) for name, value in sums.items()}

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Returns the figures with the correlation in the place of the means that it is computed from."""
        kept = {name: value for name, value in means.items() if name not in MOMENTS}
        if MOMENTS[0] not in means:
            return kept
        x, y, xx, yy, xy = (means[name] for name in MOMENTS)
        spread = max(xx - x * x, 0.0) * max(yy - y * y, 0.0)
        return kept | {"pearson": (xy - x * y) / spread**0.5 if spread > 0 else 0.0}

    @torch.no_grad()
    def predict(self, network: Network, batch: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Returns the number at each label."""
        found = self.scores(network, batch).squeeze(-1)[batch["labels"] != IGNORED_LABEL]
        return [{"prediction": value} for value in found.tolist()]
