"""Classification: accuracy and macro F1 as torchmetrics computes them."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchmetrics.functional.classification import multiclass_f1_score

from core.errors import ConfigError
from plugins.evaluations.classification import Classification
from tests.support.evaluated import certain, measure, model
from tests.support.records import write_lines

NAMES = ["no", "perhaps", "yes"]


class FirstLetter(nn.Module):
    """Finds the class whose number is the first byte of a text, or of each word."""

    def predict(self, network, batch):
        found = []
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            for place in (labels != -100).nonzero().flatten().tolist():
                number = (ids[0] if self.whole else ids[place]).item() - self.zero
                several = [name for n, name in enumerate(NAMES) if n <= number]
                found.append({"prediction": several if self.several else NAMES[number], "probability": 1.0})
        return found


def classifier(task="classes"):
    given = model(certain(257, lambda ids: 0))
    objective = FirstLetter()
    objective.zero = given.encode(["0"])[0][0]
    objective.several, objective.whole = task == "several", task != "words"
    form = {"task": task, "position": "last", "separator": "\n", "text": "text", "pair": None, "before": None}
    return replace(given, objective=objective, data={"texts": form, "label_names": NAMES})


def test_figures_are_those_of_torchmetrics(tmp_path):
    rng = random.Random(0)
    pairs = [
        (rng.randrange(2), rng.choice([0, 1, 1, 1])) for _ in range(50)
    ]  # no record and no prediction is "yes"
    records = [{"text": f"{found} text", "label": NAMES[label]} for found, label in pairs]
    path = write_lines(tmp_path / "records.jsonl", records)
    found, wanted = torch.tensor(pairs).T
    expected = multiclass_f1_score(found, wanted, num_classes=2, average="macro")
    assert measure(Classification(path), classifier()) == {
        "accuracy": float((found == wanted).double().mean()),
        "macro_f1": pytest.approx(float(expected), rel=1e-6),
    }


def test_several_classes_are_right_together_and_each_counts(tmp_path):
    records = [
        {"text": "1", "label": ["perhaps", "no"]},
        {"text": "2", "label": ["no"]},
        {"text": "0", "label": []},
    ]
    path = write_lines(tmp_path / "records.jsonl", records)
    # no: 2 hits, 1 false; perhaps: 1 hit, 1 false; yes: 1 false
    assert measure(Classification(path), classifier("several")) == {
        "accuracy": 1 / 3,
        "macro_f1": pytest.approx((4 / 5 + 2 / 3 + 0) / 3),
    }


def test_each_word_has_its_class(tmp_path):
    path = write_lines(tmp_path / "records.jsonl", [{"text": ["0", "1", "2"], "label": [0, "perhaps", 0]}])
    figures = measure(Classification(path), classifier("words"))
    assert figures == {"accuracy": 2 / 3, "macro_f1": pytest.approx((2 / 3 + 1 + 0) / 3)}


def test_what_the_network_has_not_learnt_is_said(tmp_path):
    path = write_lines(tmp_path / "records.jsonl", [{"text": "0", "label": "never"}])
    with pytest.raises(
        ConfigError, match="'never' is none of those that the network has learnt: no, perhaps, yes"
    ):
        measure(Classification(path), classifier())
    with pytest.raises(ConfigError, match="has learnt no classes"):
        Classification(path).items(model(certain(257, lambda ids: 0)))
