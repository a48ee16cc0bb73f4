"""Calibration: the bins of torchmetrics, in constant memory."""

import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from datamodules.preparation.readers.text_documents import TextDocuments
from plugins.evaluations.calibration import BINS, Calibration
from tests.support.evaluated import drawn, measure, model

TEXTS = ("a short text", "another one that is longer " * 4, "aaa")


@pytest.fixture
def reader(tmp_path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    return TextDocuments(str(tmp_path))


def test_the_error_is_that_of_torchmetrics(reader):
    given = model(drawn(257))
    probabilities, labels = [], []
    for text in TEXTS:
        ids = [*given.beginning, *given.encode([text])[0]]
        for at in range(1, len(ids)):
            probabilities.append(given.network.rule(ids[:at]).softmax(-1))
            labels.append(ids[at])
    stacked, wanted = torch.stack(probabilities), torch.tensor(labels)
    expected = multiclass_calibration_error(stacked, wanted, num_classes=257, n_bins=BINS)
    found = measure(Calibration(reader), given)
    # torchmetrics adds float32
    assert found["ece"] == pytest.approx(float(expected), abs=1e-6)
    assert found["confidence"] == pytest.approx(float(stacked.amax(-1).mean()), rel=1e-6)
    assert found["accuracy"] == float((stacked.argmax(-1) == wanted).double().mean())


def test_a_document_is_cut_to_the_tokens_that_are_asked_for(reader):
    given = model(drawn(257))
    evaluation = Calibration(reader, max_tokens=5)
    with torch.no_grad():
        found = evaluation.measure(given, evaluation.items(given))
    counts = [sum(v for name, v in one.sums.items() if name.startswith("tokens_")) for one in found]
    assert counts == [5, 5, 3]


def test_the_picture_shows_the_bins(reader):
    given = model(drawn(257))
    evaluation = Calibration(reader)
    items = evaluation.items(given)
    with torch.no_grad():
        upper, lower = evaluation.draw(items, evaluation.measure(given, items)).axes
    assert len(lower.patches) == BINS
    assert sum(bar.get_height() for bar in lower.patches) == sum(len(text) for text in TEXTS)
    assert len(upper.lines[1].get_xdata()) == sum(bar.get_height() > 0 for bar in lower.patches)
