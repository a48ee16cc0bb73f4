"""How much of its training text a network continues word for word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.contracts import Reader
from core.errors import ConfigError
from core.technique import technique
from plugins.evaluations.counts import check_counts
from plugins.evaluations.documents import documents
from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured


@technique(
    paper="extractable memorisation: Carlini et al., arXiv:2202.07646, section 3: 50 tokens continued by 50"
)
class Memorisation(Evaluation):
    """Gives the network the beginnings of documents that it was trained on, and counts those that it continues verbatim.

    The first `prefix_tokens` of a document are continued with the likeliest tokens, as a prompt of text. A document counts as
    extracted if the next `continuation_tokens` are all its own. Shorter documents are left out. Give the same number of
    documents that were not trained on as a second evaluation: what is extracted from these is not memorised.

    Figures: `extracted_share`, of documents; `matching_tokens`, the mean number of right tokens before the first wrong one.

    Args:
        documents: Reads the documents of the training.
        prefix_tokens: Tokens that the network is given.
        continuation_tokens: Tokens that have to come.
        max_documents: Documents that are read, from the first one.
        group_by: A column of the documents, such as source; None: no groups.

    Raises:
        ConfigError: If a number is below 1, both together are more than the network sees, or no document is long enough.

    Example:
        trainer:
          callbacks+:
            - class_path: Evaluate
              init_args:
                evaluations:
                  memorised:
                    class_path: Memorisation
                    init_args:
                      documents: {class_path: TextDocuments, init_args: {source: books}}
                      prefix_tokens: 32
                      continuation_tokens: 32
    """

    def __init__(
        self,
        documents: Reader,
        prefix_tokens: int = 50,
        continuation_tokens: int = 50,
        max_documents: int = 1000,
        group_by: str | None = None,
    ) -> None:
        check_counts(
            "Memorisation",
            prefix_tokens=prefix_tokens,
            continuation_tokens=continuation_tokens,
            max_documents=max_documents,
        )
        self.documents, self.prefix_tokens, self.continuation_tokens = (
            documents,
            prefix_tokens,
            continuation_tokens,
        )
        self.max_documents, self.group_by = max_documents, group_by

    def items(self, model: EvaluatedModel) -> Sequence[Item]:
        """Returns the documents that are long enough."""
        wanted = self.prefix_tokens + self.continuation_tokens
        most = model.network.max_sequence_length
        if most is not None and wanted > most:
            raise ConfigError(
                f"Memorisation: {self.prefix_tokens} + {self.continuation_tokens} tokens are more than the network sees ({most})."
            )
        found = documents(self.documents, self.max_documents, self.group_by, "Memorisation")
        ids = model.encode([item.content for item in found])
        enough = [item for item, own in zip(found, ids, strict=True) if len(own) >= wanted]
        if not enough:
            raise ConfigError(
                f"Memorisation: none of {len(found)} documents has {wanted} tokens. Set prefix_tokens and continuation_tokens lower."
            )
        return enough

    def measure(self, model: EvaluatedModel, items: Sequence[Item]) -> list[Measured]:
        """Returns how many tokens of each document came, and what came."""
        ids = model.encode([item.content for item in items])
        prompts = [[*model.beginning, *own[: self.prefix_tokens]] for own in ids]
        came = model.generate(prompts, max_new_tokens=self.continuation_tokens)
        found = []
        for own, prompt, (continuation,) in zip(ids, prompts, came, strict=True):
            wanted = own[self.prefix_tokens :][: self.continuation_tokens]
            pairs = zip(wanted, [*continuation.ids, *[-1] * len(wanted)], strict=False)
            right = next((n for n, (one, other) in enumerate(pairs) if one != other), len(wanted))
            sums = {"documents": 1.0, "extracted": float(right == len(wanted)), "matching": float(right)}
            shown = {"prompt": model.tokenizer.decode(prompt), "continuation": continuation.text}
            found.append(Measured(sums, shown | {"document": model.tokenizer.decode(wanted)}))
        return found

    @staticmethod
    def figures(sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the figures; none without documents."""
        if not (count := sums.get("documents")):
            return {}
        return {
            "extracted_share": sums.get("extracted", 0.0) / count,
            "matching_tokens": sums.get("matching", 0.0) / count,
        }
