"""Which documents resemble an earlier one, compared with all pairs; the same bytes whatever happens on the way."""

import random
import re
import sys

import pytest

from core.errors import ConfigError
from datamodules.preparation.duplicates import near_pairs, spilled_records
from datamodules.preparation.duplicates.shingles import words
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
from datamodules.preparation.transforms.near_duplicates import NearDuplicates
from tests.support.corpus import contents, prepare, write_lines
from tests.support.duplicates import Backwards, kept


def planted(number=240, seed=0):
    """Returns documents, half of which are earlier ones with some words changed: none, few, or a third."""
    rng = random.Random(seed)
    found = []
    for _ in range(number):
        if found and rng.random() < 0.5:
            share = rng.choice([0, 0.01, 0.02, 0.05, 0.3])
            text = [
                w if rng.random() > share else f"x{rng.randrange(10**6)}" for w in rng.choice(found).split()
            ]
        else:
            text = [f"w{int(rng.paretovariate(0.5)) % 5000}" for _ in range(rng.randint(4, 200))]
        found.append(" ".join(text))
    return found


def similarity(one, other, length=5):
    both = []
    for text in (one, other):
        found = words(text)
        both.append({tuple(found[at : at + length]) for at in range(max(len(found) - length + 1, 1))})
    return len(both[0] & both[1]) / len(both[0] | both[1])


def expected(documents, threshold):
    """Compares each document with all that stay before it; returns these with the sizes of their clusters."""
    left = {}
    for number, text in enumerate(documents):
        like = next((other for other in left if similarity(documents[other], text) >= threshold), number)
        left[like] = left.get(like, 0) + 1
    return left


@pytest.mark.parametrize(("threshold", "files"), [(0.75, 1), (0.75, 6), (0.5, 1), (1.0, 1)])
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
