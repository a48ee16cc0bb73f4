"""`train-quality-filter`: the file is that of the library's parts, the same each time; figures and mistakes."""

import json
import random
import re

import numpy as np
import pytest

from core.__main__ import main
from plugins.commands.logistic_regression import Rows, accuracy, fit
from plugins.commands.train_quality_filter import held_out
from toolkit.hashed_ngrams import HashedNGrams
from toolkit.quality_model import read_quality_model

GOOD, BAD = ["the", "river", "and", "a", "lamp", "of", "stone"], ["buy", "now", "free", "click", "the", "and"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    draw = random.Random(3)
    for name, words in (("good", GOOD), ("bad", BAD)):
        texts = [" ".join(draw.choices(words, k=12)) for _ in range(150)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def train(folder, *more, output="quality.safetensors"):
    words = [
        "--good",
        folder / "good.jsonl",
        "--bad",
        folder / "bad.jsonl",
        "--output",
        folder / output,
        *more,
    ]
    return main(["train-quality-filter", *map(str, words)])


def texts(folder, name):
    return [json.loads(line)["text"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_it_trains_on_what_is_not_held_out_and_measures_the_rest(folder, capsys):
    assert train(folder, "--held-out", "0.2", "--buckets", "4096", "--ngrams", "1", "2", "--l2", "1e-3") == 0
    model = read_quality_model(folder / "quality.safetensors")
    ngrams = HashedNGrams((1, 2), 4096)
    assert model.ngrams == ngrams
    labelled = [(text, name == "good") for name in ("good", "bad") for text in texts(folder, name)]
    training = [pair for pair in labelled if not held_out(pair[0], 0.2, 0)]
    rest = [pair for pair in labelled if held_out(pair[0], 0.2, 0)]
    labels = np.array([good for _, good in training])
    weights, bias, _ = fit(Rows.of(ngrams.row(text) for text, _ in training), labels, 4096, 1e-3)
    np.testing.assert_allclose(model.weights, weights, atol=1e-5)
    assert model.bias == pytest.approx(bias, abs=1e-5)
    scores = np.array([model.score(text) for text, _ in rest])
    right = accuracy(scores, np.array([good for _, good in rest]))
    assert model.figures["accuracy"] == right > 0.9
    assert model.figures["held_out_documents"] == len(rest)
    printed = capsys.readouterr().out
    assert re.search(rf"accuracy +{right:.4f}\narea under curve +\d\.\d+\ncalibration error +0\.\d+", printed)


def test_the_same_bytes_each_time_and_others_with_another_seed(folder):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(folder, "--seed", seed, "--buckets", 1024, output=name) == 0
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes() != (folder / "c").read_bytes()


def test_about_the_share_is_held_out_by_text_alone():
    names = [f"text {number}" for number in range(2000)]
    assert 150 < sum(held_out(name, 0.1, 0) for name in names) < 250
    assert [held_out(name, 0.1, 0) for name in names] != [held_out(name, 0.1, 1) for name in names]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--l2", "0"], "--l2 is 0.0"),
        (["--held-out", "1"], "--held-out is 1.0"),
        (["--held-out", "0.01"], "held out; 10 of each is the least"),
        (["--buckets", "1000"], "power of two"),
        (["--ngrams", "2", "1"], "rising"),
        (["--reader", "TextDocument"], "TextDocuments"),
        (["--reader", "Normalise"], "does not read documents"),
        (["--bad", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--output", "/dev/null/x"], "--output /dev/null/x cannot be written"),
        (["--output", "."], "is a folder"),
    ],
)
def test_mistakes(folder, more, said, capsys):
    assert train(folder, *more) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) <= 10
