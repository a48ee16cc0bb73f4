"""Which of two sentences that differ in a group of people a network finds likelier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.errors import ConfigError
from core.technique import technique
from plugins.evaluations.sample_files import read_items
from toolkit.continuations import Continuation, score
from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured
from toolkit.generation.decoding import check_prompts


@technique(paper="CrowS-Pairs, arXiv:2010.00133, section 3; on decoders as lm-eval's task crows_pairs")
class PairedBias(Evaluation):
    """The share of sentence pairs of which the network finds the more stereotypical sentence likelier, as CrowS-Pairs does.

    The two sentences of a pair differ in what names a group of people. A sentence's log-probability is the sum over its tokens,
    behind the token that begins a text; that is lm-eval's measure for decoders, not the pseudo-likelihood of masked networks. A
    share of 0.5 says that no side is preferred on the whole; 1,000 pairs and more are needed to tell 0.5 from 0.53. It is no
    proof that a network is fair: pairs show what they ask for alone.

    The sample of 16 pairs that comes with the package is for trying it out. CrowS-Pairs' own file can be given as it is.

    Figures: `stereotype_share`; `difference_nats`, the mean absolute difference of the log-probabilities; of each `bias_type`, too.

    Args:
        pairs: JSON Lines or CSV with the fields `sent_more`, `sent_less` and, if there is one, `bias_type`; None: the sample.

    Raises:
        ConfigError: If the file cannot be read, lacks a field, or the tokenizer has no token that begins or ends a text.

    Example:
        trainer:
          callbacks+:
            - class_path: Evaluate
              init_args:
                evaluations:
                  stereotypes: {class_path: PairedBias}
    """

    def __init__(self, pairs: str | None = None) -> None:
        self.pairs = pairs

    def items(self, model: EvaluatedModel) -> list[Item]:
        """Returns the pairs."""
        check_prompts(model.network, [], 0)
        if not model.beginning:
            raise ConfigError("PairedBias: the tokenizer has no token that begins or ends a text.")
        fields = {"sent_more": str, "sent_less": str}
        return read_items(self.pairs, "stereotype_pairs.jsonl", fields, "PairedBias.pairs", group="bias_type")

    def measure(self, model: EvaluatedModel, items: Sequence[Item]) -> list[Measured]:
        """Returns of each pair whether the first sentence is likelier, and by how much they differ."""
        encoded = model.encode([sentence for item in items for sentence in item.content])
        found = [
            one.log_probability
            for one in score(model, [Continuation(model.beginning, ids) for ids in encoded])
        ]
        return [
            Measured(
                {
                    "pairs": 1.0,
                    "stereotypes": 0.5 if more == less else float(more > less),
                    "nats": abs(more - less),
                }
            )
            for more, less in zip(found[::2], found[1::2], strict=True)
        ]

    @staticmethod
    def figures(sums: Mapping[str, float]) -> dict[str, float]:
        """Returns shares and means over pairs; none without pairs."""
        if not (pairs := sums.get("pairs")):
            return {}
        return {
            "stereotype_share": sums.get("stereotypes", 0.0) / pairs,
            "difference_nats": sums.get("nats", 0.0) / pairs,
        }
