"""What objectives over classes share: the head, the names of the classes, cross-entropy, accuracy and macro F1."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from plugins.objectives.heads import Head, new_head

if TYPE_CHECKING:
    from toolkit.selection import Run

CLASS = "class "
"""What begins the name of a sum of one class: 1 + F1, or 0 for a class that no record and no prediction is of."""


class LabelObjective(Objective):
    """A head on the hidden states at the positions with a label.

    Args:
        dropout: Before the head.
        pooler: Whether BERT's pooler is before the head: a map of C to C features and a tanh.
    """

    loss_unit = "nats/label"

    def __init__(self, dropout: float, pooler: bool) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ConfigError(f"{type(self).__name__} takes dropout from 0 to below 1, not {dropout}.")
        self.dropout, self.pooler = dropout, pooler
        self.head: Head | None = None

    @property
    @abstractmethod
    def outputs(self) -> int:
        """K, the outputs of the head."""

    @classmethod
    def tasks_fault(cls, run: Run, *tasks: str) -> Iterator[str]:
        """Yields an error if the data have other labels, and for `predict` and pipelines."""
        task, form = run.argument("data.task"), run.argument("data.form")
        task = "values" if form == "stsb" else task
        if task is not None and task not in tasks:
            better = {
                "words": "TokenClassification",
                "values": "Regression",
                "classes": "SequenceClassification",
            }
            yield (
                f"{cls.__name__} learns data.task={' or '.join(tasks)}, and the data have {task}: take "
                f"--model.objective={better.get(task, 'SequenceClassification')}"
            )
        if any((item.arguments.get("pipeline") or 1) > 1 for item in run.selected):
            yield f"{cls.__name__} has a head, which no stage holds: set pipeline to 1"
        if run.command == "predict":
            yield (
                f"predict writes log-probabilities of tokens, which {cls.__name__} does not learn: take `python -m core classify "
                "--ckpt_path RUN TEXTS.jsonl`"
            )

    def change_network(self, network: Network) -> None:
        """Makes the head, of the size of a network that was just built."""
        self.head = new_head(
            network, type(self).__name__, self.outputs, dropout=self.dropout, pooler=self.pooler
        )

    def scores(self, network: Network, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the head's outputs at all positions, (B, T, K), float32 or wider."""
        if self.head is None:
            raise ConfigError(
                f"{type(self).__name__} has no head: call change_network(network) before training."
            )
        return self.head(network(batch))


class ClassObjective(LabelObjective):
    """Cross-entropy of the classes at the positions with a label.

    Args:
        labels: Names of the classes, in the order of their ids; None: those of the data.
        dropout: As in :class:`LabelObjective`.
        pooler: As in :class:`LabelObjective`.
    """

    @abstractmethod
    def __init__(self, labels: Sequence[str] | None, dropout: float, pooler: bool) -> None:
        super().__init__(dropout, pooler)
        self.labels = list(labels or ())
        if labels is not None and len({*self.labels}) != max(len(self.labels), 2):
            raise ConfigError(
                f"{type(self).__name__}.labels names two or more different classes, not {self.labels}."
            )

    def take_labels(self, names: Sequence[str]) -> None:
        """Takes the names of the classes; see `toolkit.class_labels`."""
        if not self.labels:
            self.labels = list(names)
        elif self.labels != list(names):
            raise ConfigError(
                f"{type(self).__name__} has the classes {', '.join(self.labels)[:200]}, and the data have {', '.join(names)[:200]}.\n"
                "Set data.labels to the first, in this order; or leave out model.objective.labels."
            )

    @property
    def outputs(self) -> int:
        """The number of classes."""
        if not self.labels:
            raise ConfigError(
                f"{type(self).__name__} does not know the classes: take --data=LabelledDataModule, or name them: "
                "--model.objective.labels=[...]."
            )
        return len(self.labels)

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss with the number of labels and their weights, and what accuracy and F1 are made of."""
        labels, scores = batch["labels"], self.scores(network, batch)
        seen = labels != IGNORED_LABEL
        if batch.get("targets") is not None:
            wanted = batch["targets"].to(scores)
            losses = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none").mean(-1)
            found, wanted = scores > 0, wanted > 0.5
        else:
            flat = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
            losses = flat.view_as(labels)
            found, wanted = scores.argmax(-1), labels.clamp(min=0)
        weights = batch.get("weights")
        weights = seen.to(losses) if weights is None else weights.to(losses) * seen
        tokens = seen.sum()
        return TokenSum((losses * weights).sum(), tokens, weights.sum()), self._figures(
            found, wanted, seen, tokens
        )

    def _figures(self, found: Tensor, wanted: Tensor, seen: Tensor, tokens: Tensor) -> dict[str, TokenSum]:
        """Returns accuracy and, in validation, what macro F1 is made of.

        Args:
            found: Classes (B, T), or whether each is found (B, T, K).
            wanted: As `found`.
            seen: Which positions have a label, (B, T).
            tokens: Their number.
        """
        right = found == wanted if found.ndim == 2 else (found == wanted).all(-1)
        figures = {"accuracy": TokenSum((right & seen).sum(), tokens)}
        if self.training:
            return figures
        if found.ndim == 2:
            hits, predicted, actual = (
                torch.zeros(self.outputs, device=seen.device).scatter_add(
                    0, ids.flatten(), counted.flatten().float()
                )
                for ids, counted in ((found, right & seen), (found, seen), (wanted, seen))
            )
        else:
            hits, predicted, actual = (
                (one & seen[..., None]).sum((0, 1)) for one in (found & wanted, found, wanted)
            )
        both = predicted + actual
        sums = zip((2 * hits + both).unbind(), both.unbind(), strict=True)
        return figures | {
            f"{CLASS}{number}": TokenSum(total, tokens, weight) for number, (total, weight) in enumerate(sums)
        }

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Returns the figures with macro F1, the mean of the classes' F1, in the place of the sums of each class."""
        kept = {name: value for name, value in means.items() if not name.startswith(CLASS)}
        scores = [means[name] - 1 for name in means if name.startswith(CLASS) and means[name] > 0]
        return kept | ({"macro_f1": sum(scores) / len(scores)} if scores else {})

    @torch.no_grad()
    def predict(self, network: Network, batch: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Returns the most probable class at each label, with its probability; of several classes all above 0.5."""
        scores = self.scores(network, batch)[batch["labels"] != IGNORED_LABEL]
        if self.several:
            found = scores.sigmoid().tolist()
            return [{"prediction": [self.labels[k] for k, p in enumerate(row) if p > 0.5],
                     "probabilities": dict(zip(self.labels, row, strict=True))} for row in found]  # fmt: skip
        best, places = scores.softmax(-1).max(-1)
        return [
            {"prediction": self.labels[place], "probability": value}
            for value, place in zip(best.tolist(), places.tolist(), strict=True)
        ]

    several = False
    """Whether a text has several classes."""
