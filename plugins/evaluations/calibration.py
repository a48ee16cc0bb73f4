"""Calibration of next-token probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Reader
from core.technique import technique
from plugins.evaluations.counts import check_counts
from plugins.evaluations.documents import documents
from toolkit import pictures
from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured, Row
from toolkit.log_probabilities import CHUNK_TOKENS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 15


@technique(paper="expected calibration error with 15 bins: Guo et al., arXiv:1706.04599, section 2")
class Calibration(Evaluation):
    """How far the network's confidence in the likeliest next token is from how often that token comes.

    Predicted tokens are put into 15 bins of equal width by the probability of the likeliest token. `ece` is the mean distance of
    confidence and accuracy over bins, weighted by their tokens: 0 is perfect. Bins are counted on the device, in memory that
    does not grow with the text. The picture shows accuracy over confidence.

    Figures: `ece`, `accuracy` (share of tokens that were the likeliest), `confidence`.

    Args:
        documents: Reads the documents.
        max_documents: Documents that are read, from the first one.
        max_tokens: Tokens of each that are predicted, from its beginning: at most the network's `max_sequence_length`.
        group_by: A column of the documents, such as source; None: no groups.

    Raises:
        ConfigError: If a number is below 1, or the documents cannot be read.

    Example:
        trainer:
          callbacks+:
            - class_path: Evaluate
              init_args:
                evaluations:
                  confidence:
                    class_path: Calibration
                    init_args:
                      documents: {class_path: TextDocuments, init_args: {source: books}}
    """

    def __init__(
        self,
        documents: Reader,
        max_documents: int = 1000,
        max_tokens: int = 1024,
        group_by: str | None = None,
    ) -> None:
        check_counts("Calibration", max_documents=max_documents, max_tokens=max_tokens)
        self.documents, self.max_documents = documents, max_documents
        self.max_tokens, self.group_by = max_tokens, group_by

    def items(self, model: EvaluatedModel) -> Sequence[Item]:
        """Returns the documents."""
        return documents(self.documents, self.max_documents, self.group_by, "Calibration")

    def measure(self, model: EvaluatedModel, items: Sequence[Item]) -> list[Measured]:
        """Returns tokens, confidence and hits of each bin of each document."""
        most = min(self.max_tokens, model.network.max_sequence_length or self.max_tokens)
        texts = model.encode([item.content for item in items])
        rows = [Row([*model.beginning, *ids][: most + 1]) for ids in texts]
        found = [Measured({})] * len(items)
        for which, batch in model.batches(rows):
            counts = bins(model, batch).cpu()
            for place, index in enumerate(which):
                found[index] = Measured(_named(counts[place]))
        return found

    @staticmethod
    def figures(sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the figures; none without tokens."""
        count, confidence, hits = (
            [sums.get(f"{name}_{number}", 0.0) for number in range(BINS)]
            for name in ("tokens", "confidence", "hits")
        )
        if not (tokens := sum(count)):
            return {}
        gaps = (abs(sure - right) for sure, right in zip(confidence, hits, strict=True))
        return {
            "ece": sum(gaps) / tokens,
            "accuracy": sum(hits) / tokens,
            "confidence": sum(confidence) / tokens,
        }

    def draw(self, items: Sequence[Item], measured: Sequence[Measured]) -> Figure | None:
        """Draws accuracy over confidence, and how many tokens are in each bin."""
        total = {
            name: [sum(one.sums.get(f"{name}_{number}", 0.0) for one in measured) for number in range(BINS)]
            for name in ("tokens", "confidence", "hits")
        }
        filled = [number for number in range(BINS) if total["tokens"][number]]
        figure = pictures.new_figure(5, 5.5)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        upper.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="perfect")
        upper.plot(
            [total["confidence"][number] / total["tokens"][number] for number in filled],
            [total["hits"][number] / total["tokens"][number] for number in filled],
            marker="o",
            label="network",
        )
        upper.set_ylabel("share of tokens that were the likeliest")
        upper.set_ylim(0, 1)
        upper.legend(frameon=False)
        lower.bar([(number + 0.5) / BINS for number in range(BINS)], total["tokens"], width=0.9 / BINS)
        lower.set_ylabel("tokens")
        lower.set_xlabel("probability of the likeliest token")
        lower.set_xlim(0, 1)
        for axes in (upper, lower):
            pictures.tidy(axes)
        return figure


def bins(model: EvaluatedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns tokens, confidence and hits of each bin, (B, BINS, 3) float64 (float32 on Apple's GPUs), on the device."""
    labels = batch["labels"]
    hidden = model.network(batch).flatten(0, 1)
    wide = torch.float32 if labels.device.type == "mps" else torch.float64
    counts = torch.zeros(len(labels) * BINS, 3, dtype=wide, device=labels.device)
    rows = torch.arange(len(labels), device=labels.device).repeat_interleave(labels.shape[1])
    edges = torch.linspace(0, 1, BINS + 1, device=labels.device)[1:-1]
    parts = zip(*(value.split(CHUNK_TOKENS) for value in (hidden, labels.flatten(), rows)), strict=True)
    for states, wanted, row in parts:
        confidence, best = model.network.logits(states).float().softmax(-1).max(-1)
        place = row * BINS + torch.bucketize(confidence, edges, right=True)
        values = torch.stack([torch.ones_like(confidence), confidence, (best == wanted).float()], 1).to(wide)
        counts.index_add_(0, place, values * (wanted != IGNORED_LABEL)[:, None])
    return counts.view(len(labels), BINS, 3)


def _named(counts: Tensor) -> dict[str, float]:
    """Returns the sums of a document, without empty bins."""
    found: dict[str, float] = {}
    for number, (tokens, confidence, hits) in enumerate(counts.tolist()):
        if tokens:
            found |= {f"tokens_{number}": tokens, f"confidence_{number}": confidence, f"hits_{number}": hits}
    return found
