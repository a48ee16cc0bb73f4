"""Perplexity and bits per byte of documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from core.contracts import Reader
from core.errors import ConfigError
from core.technique import technique
from plugins.evaluations.counts import check_counts
from plugins.evaluations.documents import documents
from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured, Row


@technique(
    paper="sliding windows: huggingface.co/docs/transformers/perplexity; bits per byte: The Pile, arXiv:2101.00027, section 3.1"
)
class Perplexity(Evaluation):
    """Perplexity of documents per token, and their bits per byte, which compare across tokenizers.

    Every token weighs the same. Each document stands alone behind the token that begins a text (BOS, else the end-of-text
    token), so that its first token is predicted too; where the tokenizer has no such token, the first token and its bytes do
    not count.

    A document that is longer than `window` is cut into windows, of which each predicts `stride` tokens with as much context as
    fits. `stride` = `window` is fastest and gives the numbers of lm-eval's `loglikelihood_rolling`; a half of it gives every
    token at least half a window of context, at twice the cost.

    Figures: `perplexity`, `loss_nats_per_token`, `bits_per_byte`; also of each group.

    Args:
        documents: Reads the documents.
        window: Tokens that the network sees at once; None: its `max_sequence_length`.
        stride: New tokens that each window predicts, at most `window`; None: `window`.
        max_documents: Documents that are read, from the first one.
        group_by: A column of the documents, such as source, or a name in the reader's `metadata`; None: no groups.

    Raises:
        ConfigError: If a number is out of range, or the documents cannot be read.

    Example:
        trainer:
          callbacks+:
            - class_path: Evaluate
              init_args:
                evaluations:
                  books:
                    class_path: Perplexity
                    init_args:
                      documents: {class_path: TextDocuments, init_args: {source: books}}
    """

    def __init__(
        self,
        documents: Reader,
        window: int | None = None,
        stride: int | None = None,
        max_documents: int = 1000,
        group_by: str | None = "source",
    ) -> None:
        check_counts("Perplexity", window=window, stride=stride, max_documents=max_documents)
        self.documents, self.window, self.stride = documents, window, stride
        self.max_documents, self.group_by = max_documents, group_by

    def items(self, model: EvaluatedModel) -> Sequence[Item]:
        """Returns the documents."""
        window, stride = self._sizes(model)
        most = model.network.max_sequence_length
        if most is not None and window > most:
            raise ConfigError(f"Perplexity.window={window}: the network sees {most} tokens at most.")
        if stride > window:
            raise ConfigError(
                f"Perplexity.stride={stride} is above window={window}: tokens would be left out."
            )
        return documents(self.documents, self.max_documents, self.group_by, "Perplexity")

    def measure(self, model: EvaluatedModel, items: Sequence[Item]) -> list[Measured]:
        """Returns nats, tokens and bytes of each document."""
        window, stride = self._sizes(model)
        rows: list[Row] = []
        owners: list[int] = []
        sums = [{"nats": 0.0, "tokens": 0.0, "bytes": float(len(item.content.encode()))} for item in items]
        for number, ids in enumerate(model.encode([item.content for item in items])):
            if not model.beginning:
                sums[number]["bytes"] -= len(model.tokenizer.decode(ids[:1]).encode())
            cut = windows([*model.beginning, *ids], window, stride)
            rows += cut
            owners += [number] * len(cut)
        for number, values in zip(owners, model.log_probabilities(rows), strict=True):
            sums[number]["nats"] -= float(values.sum())
            sums[number]["tokens"] += len(values)
        return [Measured(one) for one in sums]

    @staticmethod
    def figures(sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the figures; none without tokens."""
        nats, tokens, size = (sums.get(name, 0.0) for name in ("nats", "tokens", "bytes"))
        if not tokens:
            return {}
        loss = nats / tokens
        found = {"perplexity": math.exp(min(loss, 700.0)), "loss_nats_per_token": loss}
        return found | ({"bits_per_byte": nats / math.log(2) / size} if size else {})

    def _sizes(self, model: EvaluatedModel) -> tuple[int, int]:
        window = self.window or model.network.max_sequence_length
        if window is None:
            raise ConfigError(
                f"Perplexity.window: {type(model.network).__name__} sees texts of any length. Say how many tokens at once."
            )
        return window, self.stride or window


def windows(ids: Sequence[int], window: int, stride: int) -> list[Row]:
    """Cuts ids into rows of `window` + 1 at most, so that each id but the first is predicted once.

    The first row predicts `window` ids, each further one the next `stride` with all the context that fits.
    """
    found, done = [], 1
    while done < len(ids):
        end = min(len(ids), done + (window if done == 1 else stride))
        begin = max(0, end - window - 1)
        found.append(Row(ids[begin:end], done - begin))
        done = end
    return found
