"""Classification of texts: a head on the hidden state at one token of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from core.contracts import Network, TokenSum
from core.errors import ConfigError
from core.technique import Feature, technique
from plugins.objectives.classes import ClassObjective

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="GPT, Radford et al. 2018, section 3.2; BERT, arXiv:1810.04805, section 4.1",
    needs=(Feature("labels"),),
    offers=("label_objective", "keeps_weights"),
)
class SequenceClassification(ClassObjective):
    """Learns the class of a text, or its classes: cross-entropy of a head's K outputs at the text's label, in nats.

    The head, dropout and a linear map, is on the hidden state at the position of the label: the last token of a text, for
    decoders, or with `data.position: first` its first, for encoders such as BERT. It learns `data.task` `classes`, by the
    softmax over all classes, and `several`, by a sigmoid for each class and the mean of their losses. Where a batch has `weights`
    (`data.balance: weights`), each record weighs as its class does.

    Logged: `accuracy`, for `several` the share of records all of whose classes are right; in validation `macro_f1`, the mean of the
    F1 of those classes that records or predictions are of, over all ranks and batches.

    The network's own output weight, unless it is that of its embedding, is frozen and not used. The head is a parameter of the
    objective, saved with it; `python -m core classify` writes the classes of texts.

    Args:
        labels: Names of the classes, in the order of their ids; None: those of the data.
        several: Whether a text has several classes, as with `data.task: several`.
        dropout: Before the head; 0.1 in BERT.
        pooler: Whether a map of C to C features and a tanh come before the head, as in BERT.

    Raises:
        ConfigError: If a value is out of range, the data have other classes, or the network returns logits.

    Example:
        model:
          objective:
            class_path: SequenceClassification
            init_args: {dropout: 0.1}
        data:
          class_path: LabelledDataModule
          init_args:
            source: reviews.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            sequence_length: 256
            batch_size: 16
    """

    def __init__(
        self,
        labels: Sequence[str] | None = None,
        several: bool = False,
        dropout: float = 0.0,
        pooler: bool = False,
    ) -> None:
        super().__init__(labels, dropout, pooler)
        self.several = several

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error if the data have other labels."""
        yield from cls.tasks_fault(run, "classes", "several")
        task = run.argument("data.task")
        if task in ("classes", "several") and (task == "several") != bool(own.arguments.get("several")):
            yield f"data.task is {task}: set --model.objective.several={str(task == 'several').lower()}"

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss with the number of labels and their weights, and what accuracy and F1 are made of."""
        if self.several != ("targets" in batch):
            raise ConfigError(
                "SequenceClassification: several=true is for batches with targets, as data.task=several makes them; else set it to false."
            )
        return super().loss(network, batch)
