"""Classification of words: a head on the hidden state at the first token of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from core.technique import Feature, technique
from plugins.objectives.classes import ClassObjective

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="BERT, arXiv:1810.04805, section 5.3",
    needs=(Feature("labels"),),
    offers=("label_objective", "keeps_weights"),
)
class TokenClassification(ClassObjective):
    """Learns a class for each word of a text, such as its part of speech: cross-entropy at the words' first tokens, in nats.

    A head, dropout and a linear map to K outputs, is on the hidden states of the first token of each word; `data.task` is `words`.
    Every word weighs the same. An encoder such as BERT sees the whole text at each word, a decoder only what comes before.

    Logged: `accuracy`, the share of words whose class is right; in validation `macro_f1`, the mean of the F1 of those
    classes that words or predictions are of, over all ranks and batches. Both are of words, not of spans of them.

    The network's own output weight, unless it is that of its embedding, is frozen and not used. The head is a parameter of the
    objective, saved with it; `python -m core classify` writes the classes of words.

    Args:
        labels: Names of the classes, in the order of their ids; None: those of the data.
        dropout: Before the head; 0.1 in BERT.

    Raises:
        ConfigError: If a value is out of range, the data have other classes, or the network returns logits.

    Example:
        model:
          objective:
            class_path: TokenClassification
            init_args: {dropout: 0.1}
        data:
          class_path: LabelledDataModule
          init_args:
            source: words.jsonl
            task: words
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            sequence_length: 256
            batch_size: 16
    """

    def __init__(self, labels: Sequence[str] | None = None, dropout: float = 0.0) -> None:
        super().__init__(labels, dropout, pooler=False)

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error if the data have other labels."""
        yield from cls.tasks_fault(run, "words")
