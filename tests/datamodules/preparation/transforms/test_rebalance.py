"""Rebalance: which documents stay, that shares come out as asked, and what cannot be asked."""

import json
import pickle
import random
from collections import Counter
from functools import partial

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from core.errors import ConfigError
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.transforms.quality_classifier import QualityClassifier
from datamodules.preparation.transforms.rebalance import Rebalance
from tests.support.corpus import contents, corpus, prepare, write_lines
from toolkit.hashed_ngrams import HashedNGrams
from toolkit.quality_model import QualityModel

WORDS = ["lamp", "river", "tree", "stone"]


def batch_of(values, kind=None, texts=None):
    count = len(values)
    columns = [texts or ["text"] * count, ["s"] * count, [f"file:{n}" for n in range(count)]]
    arrays = [pyarrow.array(column, pyarrow.large_string()) for column in columns]
    return pyarrow.record_batch([*arrays, pyarrow.array(values, kind)], ["text", "source", "id", "of"])


def kept_of(transform, batch):
    dropped = {}
    left = transform.apply(batch, lambda reason, rows: dropped.update({reason: rows}))
    assert len(left) + sum(map(len, dropped.values())) == len(batch)
    return left, dropped


def test_each_class_keeps_its_share_and_a_larger_share_keeps_what_a_smaller_one_does():
    batch = batch_of(["a", "b", "c", None] * 2500)
    found = {}
    for share in (0.0, 0.2, 0.5, 1.0):
        transform = pickle.loads(pickle.dumps(Rebalance("of", keep={"a": share, "b": 0.3}, others=0.9)))
        left, dropped = kept_of(transform, batch)
        counts = Counter(left["of"].to_pylist())
        for name, wanted in (("a", share), ("b", 0.3), ("c", 0.9), (None, 0.9)):
            assert abs(counts[name] - 2500 * wanted) <= 5 * (2500 * wanted * (1 - wanted)) ** 0.5
        assert set(dropped) <= {"sampled out: a", "sampled out: b", "sampled out: others"}
        report = transform.take_counts()
        assert report["b: documents kept"] == counts["b"]
        assert report["b: bytes kept"] == 4 * counts["b"]
        found[share] = set(left["id"].to_pylist())
    assert found[0.0] < found[0.2] < found[0.5] < found[1.0]
    assert (
        set(
            kept_of(Rebalance("of", keep={"a": 0.2, "b": 0.3}, others=0.9, seed=1), batch)[0][
                "id"
            ].to_pylist()
        )
        != found[0.2]
    )


@pytest.mark.parametrize("kind", [pyarrow.float64(), pyarrow.float32()])
def test_classes_of_numbers_begin_where_their_names_say(kind):
    values = [-0.5, 0.0, 0.25, 0.5, 0.75, None, float("nan")]
    left, dropped = kept_of(Rebalance("of", keep={"0.5": 1, "0": 0}, others=0), batch_of(values, kind))
    assert left["of"].to_pylist() == [0.5, 0.75]
    assert dropped == {"sampled out: others": [0, 5, 6], "sampled out: 0": [1, 2]}


def test_lengths_are_those_of_the_text():
    texts = ["ä" * n for n in (1, 9, 10, 11, 100)]
    left, _ = kept_of(Rebalance("characters", keep={"0": 0, "10": 1, "100": 0}), batch_of(texts, texts=texts))
    assert left["text"].to_pylist() == texts[2:4]


def sources(folder, seed=0):
    """Writes documents of very unequal sources."""
    rng = random.Random(seed)
    for name, count in (("web", 900), ("books", 300), ("code", 100)):
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(5, 40))) + f" {n}" for n in range(count)]
        write_lines(folder / f"{name}.jsonl", texts, source=name)
    return folder


def test_bytes_have_the_shares_that_are_asked_for_whoever_prepares(tmp_path):
    reader = partial(JSONLinesDocuments, source_field="source")
    sources(tmp_path / "in")
    wanted = {"web": 2, "books": 1, "code": 1}
    folders = [
        prepare(
            tmp_path / "in",
            tmp_path / str(number),
            reader=reader,
            transforms=[Rebalance("source", target=wanted)],
            engine=engine,
        )
        for number, engine in enumerate((None, LocalEngine(2)))
    ]
    assert contents(folders[0]) == contents(folders[1])
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    sizes = {name: counts["bytes"] for name, counts in manifest["sources"].items()}
    assert manifest["sources"]["code"]["documents"] == 100
    for name, share in wanted.items():
        assert sizes[name] / sum(sizes.values()) == pytest.approx(share / 4, abs=0.06)


def test_the_scarcest_class_stays_whole_and_the_others_are_reduced(tmp_path):
    transform = Rebalance("of", target={"a": 3, "b": 1, "c": 4})
    batch = batch_of(["a"] * 600 + ["b"] * 100 + ["c"] * 1000 + ["d", None])
    for number, part in enumerate((batch[:650], batch[650:])):
        transform.map(iter([part]), tmp_path / str(number))
    transform.reduce([tmp_path / "0", tmp_path / "1"], tmp_path / "conclusion")
    assert json.loads((tmp_path / "conclusion").read_text()) == pytest.approx({"a": 0.5, "b": 1.0, "c": 0.4})
    transform.load(tmp_path / "conclusion")
    assert Counter(kept_of(transform, batch)[0]["of"].to_pylist())["b"] == 100


def test_a_class_of_target_without_documents(tmp_path):
    transform = Rebalance("of", target={"a": 1, "x": 1})
    transform.map(iter([batch_of(["a", "d"])]), tmp_path / "0")
    said = "no document is of the class 'x' of `target`, by of; there are documents of a"
    with pytest.raises(ConfigError, match=said):
        transform.reduce([tmp_path / "0"], tmp_path / "conclusion")


def test_documents_are_sampled_by_their_quality(tmp_path):
    ngrams = HashedNGrams((1,), 1024, 1000)
    weights = np.zeros(1024, np.float32)
    weights[ngrams.of("the")] = 8
    QualityModel(ngrams, weights, -2.0, {}).write(tmp_path / "quality.safetensors")
    scores = QualityClassifier(str(tmp_path / "quality.safetensors"), 0.0, column="quality")
    folder = prepare(
        corpus(tmp_path / "in", documents=400),
        tmp_path / "out",
        transforms=[scores, Rebalance("quality", keep={"0": 0.25, "0.5": 1})],
    )
    report = json.loads((folder / "manifest.json").read_text())["transforms"][1]
    table = parquet.read_table(folder / "documents.parquet").to_pydict()
    low = sum(score < 0.5 for score in table["quality"])
    assert report["counted"]["0: documents kept"] == low
    assert report["dropped"] == {"sampled out: 0": 400 - len(table["quality"])}
    assert 0.15 < low / (low + report["dropped"]["sampled out: 0"]) < 0.35
    with pytest.raises(ConfigError, match="have a column 'quality' already"):
        prepare(tmp_path / "in", tmp_path / "twice", transforms=[scores, scores])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give `keep`, shares of documents, or `target`"),
        ({"keep": {"a": 1}, "target": {"a": 1}}, "and not both"),
        ({"keep": {}}, "there is no class"),
        ({"keep": {"a": 1.5}}, "the share of a is 1.5; it is 0 to 1, nothing is repeated"),
        ({"keep": {"a": float("nan")}}, "the share of a is nan"),
        ({"keep": {"a": 1}, "others": -1}, "the share of others is -1"),
        ({"target": {"a": 0}}, "has to be above 0"),
        ({"by": "characters", "keep": {"long": 1}}, "the class 'long' is no number"),
        ({"by": "characters", "keep": {"1": 1, "1.0": 1}}, "two classes begin at the same number"),
    ],
)
def test_shares_that_cannot_be(options, said):
    with pytest.raises(ConfigError, match=said):
        Rebalance(**{"by": "source", **options})


def test_classes_that_are_no_numbers_and_a_column_that_is_not_there():
    with pytest.raises(ConfigError, match="the class 'long' is no number"):
        kept_of(Rebalance("of", keep={"long": 1}), batch_of([0.5]))
    with pytest.raises(ConfigError, match=r"Rebalance: the documents have no column 'off'\. Did you mean of"):
        kept_of(Rebalance("off", keep={"long": 1}), batch_of(["long"]))
