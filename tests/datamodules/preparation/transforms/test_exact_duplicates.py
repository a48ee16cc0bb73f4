"""Which documents have a text that was there before; the same bytes whatever happens on the way."""

import pickle
import random

import pytest

from datamodules.preparation.duplicates import spilled_records
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
from tests.support.corpus import contents, documents_of, prepare, texts, write_lines
from tests.support.duplicates import Backwards, batches, kept


@pytest.mark.parametrize("files", [1, 5])
def test_the_first_of_equal_texts_stays(tmp_path, monkeypatch, files):
    """As a dictionary of all texts says; with few and with many files on disk."""
    documents = random.Random(0).choices([*texts(150), "", "\0", "\0\0", "ende\0"], k=400)
    monkeypatch.setattr(spilled_records, "PARTITION_BYTES", 64 * 400 // files)
    first = {text: number for number, text in reversed(list(enumerate(documents)))}
    left, dropped = kept(ExactDuplicates(), documents, tmp_path / "all")
    assert left == sorted(first.values())
    assert dropped == {"exact duplicate": 400 - len(first)}
    assert not [path for path in (tmp_path / "all").iterdir() if path.is_dir()]


def test_clusters_are_counted_by_size(tmp_path):
    sizes = [1, 1, 1, 2, 3, 4, 4, 5, 8, 9, 16, 17, 1200]
    documents = [f"text {number}" for number, size in enumerate(sizes) for _ in range(size)]
    random.Random(0).shuffle(documents)
    transform = ExactDuplicates()
    left, _ = kept(transform, documents, tmp_path)
    assert len(left) == len(sizes)
    clusters = {"1": 3, "2": 1, "3 to 4": 3, "5 to 8": 2, "9 to 16": 2, "17 to 32": 1, "1,025 to 2,048": 1}
    members = {
        "1": 3,
        "2": 2,
        "3 to 4": 11,
        "5 to 8": 13,
        "9 to 16": 25,
        "17 to 32": 17,
        "1,025 to 2,048": 1200,
    }
    assert transform.take_counts() == {f"clusters of {size}": number for size, number in clusters.items()} | {
        f"documents in clusters of {size}": number for size, number in members.items()
    }
    assert not transform.take_counts()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 6]),
        ({"ignore_case": True}, [0, 2, 3, 4]),
        ({"ignore_space": True}, [0, 1, 3, 4, 6]),
        ({"ignore_case": True, "ignore_space": True}, [0, 3, 4]),
    ],
)
def test_what_may_be_ignored(tmp_path, options, expected):
    documents = ["One two", "one two", " One\n two ", "onetwo", "Straße", "one two", "STRASSE"]
    assert kept(ExactDuplicates(**options), documents, tmp_path)[0] == expected


def test_nothing_and_no_duplicates(tmp_path):
    assert kept(ExactDuplicates(), [], tmp_path / "none")[0] == []
    assert kept(ExactDuplicates(), texts(20), tmp_path / "some")[0] == list(range(20))


def test_documents_that_cannot_be_told_apart_are_not_lost(tmp_path):
    """Equal texts with equal ids: dropping one by its id would drop them all."""
    [batch] = batches(["same", "other"])
    transform = ExactDuplicates()
    transform.map(iter([batch, batch]), tmp_path / "0")
    transform.reduce([tmp_path / "0"], tmp_path / "conclusion")
    transform.load(tmp_path / "conclusion")
    assert len(transform.apply(batch, lambda reason, rows: None)) == 2


def test_a_process_that_gets_a_copy_loads_for_itself(tmp_path):
    transform = ExactDuplicates()
    kept(transform, ["a", "a"], tmp_path)
    copy = pickle.loads(pickle.dumps(transform))
    with pytest.raises(RuntimeError, match=r"ExactDuplicates\.apply is called after `load`"):
        copy.apply(batches(["a"])[0], lambda reason, rows: None)
    assert copy.fingerprint() == transform.fingerprint() == {"ignore_case": False, "ignore_space": False}


@pytest.mark.ci
def test_the_bytes_do_not_depend_on_the_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 5000)
    documents = texts(300, seed=1)
    source = tmp_path / "source"
    for number in range(5):
        write_lines(source / f"{number}.jsonl", random.Random(number).choices(documents, k=100))
    folders = [
        prepare(source, tmp_path / f"out-{workers}", transforms=[ExactDuplicates()], engine=engine)
        for workers, engine in enumerate((None, Backwards(), LocalEngine(2)))
    ]
    found = [contents(folder) for folder in folders]
    assert found[0] == found[1] == found[2]
    left = documents_of(folders[0], "train") + documents_of(folders[0], "validation")
    assert len(left) == len(set(left))
    report = (folders[0] / "report.md").read_text()
    assert f"| 1. ExactDuplicates | exact duplicate | {500 - len(left):,} |" in report
    assert "## Dropped by 1. ExactDuplicates: exact duplicate" in report
