"""QualityClassifier: scores against the sum in Python, what it drops and counts, and files that are damaged or hostile."""

import json
import math
import pickle

import numpy as np
import pyarrow
import pytest
from safetensors.numpy import save

from core.errors import ConfigError
from datamodules.preparation.transforms.quality_classifier import QualityClassifier
from toolkit.hashed_ngrams import HashedNGrams
from toolkit.quality_model import QualityModel, read_quality_model

NGRAMS = HashedNGrams((1, 2), 1024, 1000)
TEXTS = ["lamp lamp river", "buy now", "", "lamp buy", "lamp river " * 5]


def model(**bias):
    weights = np.zeros(1024, np.float32)
    weights[NGRAMS.of("lamp")], weights[NGRAMS.of("buy")] = 3, -4
    return QualityModel(NGRAMS, weights, **{"bias": 0.25, "figures": {"accuracy": 0.9}, **bias})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "quality.safetensors"
    model().write(path)
    return path


def test_the_score_is_the_sum_over_n_grams():
    for text in TEXTS:
        counts = np.bincount(NGRAMS.of(text), minlength=1024)
        length = math.sqrt(sum(count**2 for count in counts.tolist())) or 1
        margin = 0.25 + sum((model().weights * counts).tolist()) / length
        assert model().score(text) == pytest.approx(1 / (1 + math.exp(-margin)), rel=1e-12)
    assert model(bias=1e300).score("") == 1
    assert model(bias=-1e300).score("") == 0


def test_it_drops_low_scores_and_counts_all(path):
    stage = pickle.loads(pickle.dumps(QualityClassifier(str(path), 0.6)))
    dropped = {}
    columns = [pyarrow.array(TEXTS, pyarrow.large_string())] * 3
    batch = stage.apply(
        pyarrow.record_batch(columns, ["text", "source", "id"]),
        lambda reason, rows: dropped.update({reason: rows}),
    )
    scores = [model().score(text) for text in TEXTS]
    assert dropped == {"low score": [row for row, score in enumerate(scores) if score < 0.6]}
    assert batch["text"].to_pylist() == [TEXTS[0], TEXTS[4]]
    counts = stage.take_counts()
    assert sum(counts.values()) == len(TEXTS)
    assert counts["score 0.5 to 0.6"] == 1
    assert not stage.take_counts()


def test_the_file_is_part_of_the_fingerprint(path, tmp_path):
    first = QualityClassifier(str(path), 0.6)
    assert first.fingerprint()["min_score"] == 0.6
    other = tmp_path / "copy.safetensors"
    other.write_bytes(path.read_bytes())
    assert QualityClassifier(str(other), 0.6).fingerprint() == first.fingerprint()
    model(bias=0.3).write(other)
    assert QualityClassifier(str(other), 0.6).fingerprint() != first.fingerprint()


def test_what_is_written_is_read_back(path):
    found = read_quality_model(path)
    assert found.ngrams == NGRAMS
    assert found.bias == 0.25
    assert found.figures == {"accuracy": 0.9}
    assert (found.weights == model().weights).all()


GOOD = {"version": 1, "sizes": [1, 2], "buckets": 1024, "characters": 1000, "figures": {}}


def stored(described=GOOD, weights=None, bias=None, **more):
    tensors = {
        "weights": np.zeros(1024, np.float32) if weights is None else weights,
        "bias": np.zeros(1) if bias is None else bias,
        **more,
    }
    return save(
        tensors, {"quality_filter": described if isinstance(described, str) else json.dumps(described)}
    )


BROKEN = {
    "empty": (b"", "cut off"),
    "no file of this kind": (save({"a": np.zeros(1)}), "another kind"),
    "header too long": ((1 << 62).to_bytes(8, "little") + b"{}", "cut off"),
    "cut off": (stored()[:-8], "quality filter: "),
    "longer": (stored() + b"12345678", "quality filter: "),
    "metadata no JSON": (stored("{"), "no JSON"),
    "metadata a list": (stored("[]"), "version None"),
    "of the future": (stored(GOOD | {"version": 2}), "version 2, this program reads 1"),
    "further tensor": (stored(more=np.zeros(1)), "tensors are not"),
    "float64 weights": (stored(weights=np.zeros(1024)), "weights is F64"),
    "too few weights": (stored(weights=np.zeros(1023, np.float32)), r"not F32 \[1024\]"),
    "two dimensions": (stored(weights=np.zeros((1024, 1), np.float32)), "weights is F32"),
    "NaN": (stored(weights=np.full(1024, np.nan, np.float32)), "weights has numbers that are not finite"),
    "infinite bias": (stored(bias=np.array([np.inf])), "bias has numbers"),
    "long bias": (stored(bias=np.zeros(2)), "bias is F64"),
    "huge": (stored(GOOD | {"buckets": 1 << 60}), "buckets are"),
    "no power": (stored(GOOD | {"buckets": 1025}), "power of two"),
    "buckets a text": (stored(GOOD | {"buckets": "1024"}), "'buckets' is no whole number"),
    "buckets true": (stored(GOOD | {"buckets": True}), "'buckets' is no whole number"),
    "characters": (stored(GOOD | {"characters": 1 << 40}), "characters are"),
    "sizes": (stored(GOOD | {"sizes": [1, 10**6]}), "n-gram sizes"),
    "sizes of text": (stored(GOOD | {"sizes": "12"}), "'sizes' are no list"),
    "figures": (stored(GOOD | {"figures": {"a": "b"}}), "'figures'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damaged_and_hostile_files_are_refused(case, tmp_path):
    content, said = BROKEN[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        QualityClassifier(str(path))
    assert "train-quality-filter" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_wrong_arguments(tmp_path):
    for min_score in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            QualityClassifier("quality.safetensors", min_score)
    for name in ("none", "."):
        with pytest.raises(ConfigError, match="cannot be used"):
            QualityClassifier(str(tmp_path / name))
