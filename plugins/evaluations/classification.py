"""Accuracy and F1 of a network that has learnt classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.evaluations.counts import check_counts
from plugins.evaluations.records import record_items
from toolkit.class_labels import Predicts
from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured
from toolkit.label_predictions import LabelPredictions

HIT, FALSE, MISSED = "hits of ", "false ", "missed "
"""What begins the names of the sums of a class."""


@technique(paper="macro-averaged F1: Opitz and Burst, arXiv:1911.03347, the mean of the F1 of the classes")
class Classification(Evaluation):
    """Accuracy and macro F1 of a network with SequenceClassification or TokenClassification on the records of a file.

    Texts are read as the run read them. A record has the name of its class, or its number, in the field `label`; where a text has
    several classes, or each word its own, a list. Words without a token, or behind what the network sees, count as missed.

    Figures: `accuracy`, of several classes the share of records all of whose classes are right; `macro_f1`, the mean F1 over
    the classes that records or predictions are of.

    Args:
        source: A .jsonl file of records.
        label: The field of the class.
        max_records: Records that are read, from the first one.
        group_by: The field that names the group of a record; None: no groups.

    Raises:
        ConfigError: If the network has learnt no classes, the file cannot be read, or a record lacks a field.

    Example:
        model:
          objective: {class_path: SequenceClassification}
        data:
          class_path: LabelledDataModule
          init_args:
            source: reviews.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            sequence_length: 256
            batch_size: 16
        trainer:
          callbacks+:
            - class_path: Evaluate
              init_args:
                evaluations:
                  reviews: {class_path: Classification, init_args: {source: more_reviews.jsonl}}
    """

    def __init__(
        self, source: str, label: str = "label", max_records: int = 10_000, group_by: str | None = None
    ) -> None:
        check_counts("Classification", max_records=max_records)
        self.source, self.label = source, label
        self.max_records, self.group_by = max_records, group_by

    def items(self, model: EvaluatedModel) -> Sequence[Item]:
        """Returns the records."""
        form, names = model.data.get("texts"), model.data.get("label_names")
        if not isinstance(model.objective, Predicts) or not form or not names:
            raise ConfigError(
                "Classification: the network has learnt no classes of texts. Train one with "
                "--model.objective=SequenceClassification and --data=LabelledDataModule."
            )
        fields = [form[key] for key in ("text", "pair", "before") if form[key]]
        return record_items(
            self.source, (*fields, self.label), self.max_records, self.group_by, "Classification"
        )

    def measure(self, model: EvaluatedModel, items: Sequence[Item]) -> list[Measured]:
        """Returns hits and mistakes of each class in each record."""
        objective: Any = model.objective
        given = model.network, objective, model.tokenizer_json, model.end_of_text_id, model.data["texts"]
        predictions = LabelPredictions(*given)
        found = []
        for start in range(0, len(items), model.batch_size):
            chosen = items[start : start + model.batch_size]
            told = predictions.predict([(item.id, item.content) for item in chosen])
            for item, one in zip(chosen, told, strict=True):
                found.append(self._counted(item, one["prediction"], model))
        return found

    def _counted(self, item: Item, prediction: Any, model: EvaluatedModel) -> Measured:
        label, task, names = item.content[self.label], model.data["texts"]["task"], model.data["label_names"]
        wanted = [_name(one, names, item) for one in (label if isinstance(label, list) else [label])]
        found = prediction if isinstance(prediction, list) else [prediction]
        sums: dict[str, float] = {}
        if task == "words":
            found = found if len(found) == len(wanted) else [None] * len(wanted)
            pairs: list[tuple[Any, Any]] = list(zip(wanted, found, strict=True))
            sums |= {"places": float(len(pairs)), "right": float(sum(one == other for one, other in pairs))}
        else:
            pairs = [(one, one if one in found else None) for one in wanted]
            pairs += [(None, one) for one in found if one not in wanted]
            sums |= {"places": 1.0, "right": float(set(wanted) == set(found))}
        for one, other in pairs:
            named = [f"{HIT}{one}"] if one == other else [f"{MISSED}{one}"] * bool(one)
            named += [f"{FALSE}{other}"] if other and one != other else []
            for name in named:
                sums[name] = sums.get(name, 0.0) + 1
        return Measured(sums, {"label": wanted, "prediction": found})

    @staticmethod
    def figures(sums: Mapping[str, float]) -> dict[str, float]:
        """Returns accuracy and macro F1; none without records."""
        if not (places := sums.get("places")):
            return {}
        scores = {}
        for name in sums:
            for begin in (HIT, FALSE, MISSED):
                if name.startswith(begin):
                    label = name.removeprefix(begin)
                    hits = 2 * sums.get(f"{HIT}{label}", 0.0)
                    wrong = sums.get(f"{FALSE}{label}", 0.0) + sums.get(f"{MISSED}{label}", 0.0)
                    if hits + wrong:
                        scores[label] = hits / (hits + wrong)
        found = {"accuracy": sums.get("right", 0.0) / places}
        return found | ({"macro_f1": sum(scores.values()) / len(scores)} if scores else {})


def _name(label: Any, names: Sequence[str], item: Item) -> str:
    """Returns the name of a class that a record gives by name or number."""
    found = str(label).lower() if isinstance(label, bool) else str(label)
    if found not in names and type(label) is int and 0 <= label < len(names):
        found = names[label]
    if found not in names:
        raise ConfigError(
            f"{item.id}: the class {found[:40]!r} is none of those that the network has learnt: {', '.join(names)[:200]}."
        )
    return found
