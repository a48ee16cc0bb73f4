"""What the report says of the diversity of the training text, against sums by hand; the same whoever prepares."""

import json
import random
import zlib
from functools import partial

import pytest

from datamodules.preparation import diversity as module
from datamodules.preparation.diversity import measures, sampled_share
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.preparation_report import as_markdown
from datamodules.preparation.readers import source_files
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.report_page import as_page
from tests.support.corpus import contents, documents_of, prepare, write_lines
from toolkit.manifest_schema import parsed


def drawn(kinds, count, seed):
    """Returns documents of words of so many kinds."""
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(kinds)}" for _ in range(60)) for _ in range(count)]


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 20_000)
    for name, kinds in (("few", 40), ("many", 4000), ("short", 4000)):
        for number in range(1 if name == "short" else 3):
            path = tmp_path / "in" / f"{name}-{number}.jsonl"
            write_lines(path, drawn(kinds, 20 if name == "short" else 80, seed=number), source=name)
    return tmp_path / "in"


def test_measures_are_those_of_a_sum_by_hand():
    texts = drawn(300, 200, seed=0)
    of = [text.split() for text in texts][: 10_000 // 60 + 1]
    of[-1] = of[-1][: 10_000 - 60 * (len(of) - 1)]
    triples = [(a, b, c) for one in of for a, b, c in zip(one, one[1:], one[2:], strict=False)]
    text = "\n".join(map(" ".join, of)).encode()
    assert measures(texts) == {
        "distinct_3": round(len(set(triples)) / len(triples), 4),
        "type_token": 0.03,
        "compression": round(len(text) / len(zlib.compress(text, 9)), 2),
    }
    assert measures(texts[:166]) == {}  # 9,960 words


def test_the_report_tells_sources_apart_whoever_prepares(source, tmp_path):
    read = partial(JSONLinesDocuments, source_field="source")
    folders = [
        prepare(source, tmp_path / str(n), reader=read, engine=engine)
        for n, engine in enumerate((None, LocalEngine(2)))
    ]
    assert contents(folders[0]) == contents(folders[1])
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    found = manifest["diversity"]
    assert set(found["sources"]) == {"few", "many"}  # the third has too few words
    few, many = found["sources"]["few"], found["sources"]["many"]
    assert few["type_token"] == 40 / 10_000
    assert few["distinct_3"] < found["all"]["distinct_3"] < many["distinct_3"]
    assert few["compression"] > many["compression"]
    assert f"| ` few ` | {few['distinct_3']:.1%} | 0.4% |" in as_markdown(manifest)
    assert "Diversity of training text" in as_page(manifest)


def test_only_training_documents_of_the_sampled_share_are_looked_at(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MEASURED_WORDS", 1500)
    monkeypatch.setattr(module, "_SAMPLE_BYTES", sum(path.stat().st_size for path in source.iterdir()) // 4)
    taken = []
    monkeypatch.setattr(module, "measures", lambda texts: taken.append(sorted(texts)) or {"distinct_3": 1.0, "type_token": 1.0, "compression": 1.0})  # fmt: skip
    folder = prepare(source, tmp_path / "out", validation_fraction=0.3)
    train = documents_of(folder, "train")
    assert set(taken[-1]) < set(train)
    assert 0.15 < len(taken[-1]) / len(train) < 0.35


def test_a_large_source_is_sampled_less():
    assert sampled_share(0) == sampled_share(1 << 24) == 1
    assert sampled_share(1 << 30) == 1 / 64


@pytest.mark.parametrize(
    "wrong", [[], {"all": {}}, {"all": None, "sources": {}}, {"all": {"distinct_3": "1"}, "sources": {}}]
)
def test_a_manifest_with_other_measures_is_refused(source, tmp_path, wrong):
    manifest = json.loads((prepare(source, tmp_path / "out") / "manifest.json").read_text())
    with pytest.raises(ValueError, match="diversity"):
        parsed(json.dumps(manifest | {"diversity": wrong}).encode())
