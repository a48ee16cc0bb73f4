"""Which documents resemble an earlier one, compared with all pairs; the same bytes whatever happens on the way."""

import random
import re
import sys

import pytest

from core.errors import ConfigError
from datamodules.preparation.duplicates import near_pairs, spilled_records
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
from datamodules.preparation.transforms.near_duplicates import NearDuplicates
from tests.support.corpus import contents, prepare, write_lines
from tests.support.duplicates import Backwards, kept, planted, similarity


def expected(documents, threshold):
    """Compares each document with all that stay before it; returns these with the sizes of their clusters."""
    left = {}
    for number, text in enumerate(documents):
        like = next((other for other in left if similarity(documents[other], text) >= threshold), number)
        left[like] = left.get(like, 0) + 1
    return left


@pytest.mark.parametrize(
    ("threshold", "files"),
    [(0.5, 1), *(pytest.param(*one, marks=pytest.mark.ci) for one in ((0.75, 1), (0.75, 6), (1.0, 1)))],
)
def test_the_same_documents_stay_as_of_all_pairs(tmp_path, monkeypatch, threshold, files):
    """With so many bands that no pair is missed."""
    documents = planted()
    monkeypatch.setattr(spilled_records, "PARTITION_BYTES", len(documents) * 40 * 16 // files)
    transform = NearDuplicates(threshold, bands=40, rows=2)
    left, dropped = kept(transform, documents, tmp_path)
    sizes = expected(documents, threshold)
    assert left == list(sizes)
    counts = transform.take_counts()
    for name, most in {"1": 1, "2": 2, "3 to 4": 4, "5 to 8": 8, "9 to 16": 16}.items():
        some = [size for size in sizes.values() if most // 2 < size <= most]
        assert counts.pop(f"clusters of {name}", 0) == len(some)
        assert counts.pop(f"documents in clusters of {name}", 0) == sum(some)
    assert not counts
    assert dropped == {"near duplicate": len(documents) - len(left)}
    assert 20 < dropped["near duplicate"] < 120


def test_a_large_cluster_has_one_survivor(tmp_path):
    """Most are compared with the first ones of their bands alone."""
    base = [f"w{number}" for number in range(300)]
    documents = [" ".join([*base[:number], "x", *base[number + 1 :]]) for number in range(200)]
    assert kept(NearDuplicates(), documents, tmp_path)[0] == [0]


@pytest.mark.parametrize(("length", "left_of_all_pairs"), [(60, 12), (100, 1)])
def test_a_crowded_band_leaves_what_all_pairs_leave(tmp_path, length, left_of_all_pairs):
    """Each is compared with documents of its bands that stay, however many are dropped before and after these."""
    rng, documents = random.Random(0), []
    for number in range(400):
        text = [f"w{place}" for place in range(length)]
        text[rng.randrange(length)] = f"x{number}"
        documents.append(" ".join(text))
    left, _ = kept(NearDuplicates(bands=20, rows=4), documents, tmp_path)
    assert left == list(expected(documents, 0.75))
    assert len(left) == left_of_all_pairs


def test_a_table_keeps_the_first_and_the_last(tmp_path):
    table = near_pairs._Table(tmp_path / "table", 2)
    for number in range(1, 30):
        table.add(1, number)
        assert set(table.of(1)) == {*range(1, min(number, 8) + 1), *range(max(number - 7, 1), number + 1)}
    assert table.of(0) == []


def test_no_chains(tmp_path):
    """The second resembles the first, the third the second only: the third stays."""
    base = [f"w{number}" for number in range(100)]
    documents = [" ".join(base[at : at + 60]) for at in (0, 8, 16)]
    assert similarity(documents[0], documents[1]) > 0.7 > similarity(documents[0], documents[2])
    assert kept(NearDuplicates(0.7, bands=50, rows=2), documents, tmp_path)[0] == [0, 2]


def test_short_and_empty_documents(tmp_path):
    documents = ["a b", "A, b!", "a b c", "...", "!?", "", "a"]
    assert kept(NearDuplicates(), documents, tmp_path / "short")[0] == [0, 2, 3, 4, 5, 6]
    assert kept(NearDuplicates(), [], tmp_path / "none")[0] == []
    assert kept(NearDuplicates(), ["...", "!"], tmp_path / "no words")[0] == [0, 1]


@pytest.mark.ci
def test_the_bytes_do_not_depend_on_the_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 20_000)
    monkeypatch.setattr(near_pairs, "_OPEN_FILES", 2)
    source = tmp_path / "source"
    documents = planted(300, seed=1)
    for number in range(5):
        write_lines(source / f"{number}.jsonl", documents[number::5])
    transforms = [ExactDuplicates(), NearDuplicates()]
    folders = [
        prepare(source, tmp_path / f"out-{number}", transforms=transforms, engine=engine)
        for number, engine in enumerate((None, Backwards(), LocalEngine(2)))
    ]
    found = [contents(folder) for folder in folders]
    assert found[0] == found[1] == found[2]
    report = (folders[0] / "report.md").read_text()
    for line in (
        r"\| 1. ExactDuplicates \| exact duplicate \| \d+ \|",
        r"## Dropped by 2. NearDuplicates: near dup",
    ):
        assert re.search(line, report), report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0}, "threshold is 0; it is above 0 and at most 1"),
        ({"threshold": 1.1}, "threshold is 1.1"),
        ({"ngram": 0}, "ngram is 0; it is from 1"),
        ({"bands": 1 << 16}, "bands is 65536"),
        ({"rows": -1}, "rows is -1"),
        ({"seed": -1}, "seed is -1; it is from 0"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ConfigError, match=f"NearDuplicates: {message}"):
        NearDuplicates(**options)


def test_without_rensa_the_install_line_is_shown(monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ConfigError, match=re.escape("rensa is not installed: pip install 'leyden[dedup]'")):
        NearDuplicates().fingerprint()
