"""Which documents are connected by near duplicates, compared with all pairs; they never straddle a split."""

from collections import defaultdict
from itertools import combinations

import pytest

from core.errors import ConfigError
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.transforms.near_duplicate_clusters import NearDuplicateClusters
from datamodules.preparation.transforms.split_by import SplitBy
from tests.support.corpus import contents, documents_of, prepare, write_lines
from tests.support.duplicates import Backwards, batches, planted, similarity


def connected(documents, threshold):
    """Returns the sets of documents that pairs of all of them connect."""
    of = {number: {number} for number in range(len(documents))}
    for one, other in combinations(range(len(documents)), 2):
        if of[one] is not of[other] and similarity(documents[one], documents[other]) >= threshold:
            of[one] |= of[other]
            of.update(dict.fromkeys(of[other], of[one]))
    return {frozenset(group) for group in of.values()}


def clusters(transform, documents, folder, pieces=3):
    """Returns the sets of documents that have the same value."""
    everything = batches(documents)
    folder.mkdir()
    step = -(-len(everything) // pieces)
    findings = [folder / f"{number}" for number in range(pieces)]
    for number, path in enumerate(findings):
        transform.map(iter(everything[number * step : (number + 1) * step]), path)
    transform.reduce(findings, folder / "conclusion")
    transform.load(folder / "conclusion")
    found = defaultdict(set)
    for batch in everything:
        marked = transform.apply(batch, pytest.fail)
        assert marked.drop_columns(["cluster"]).equals(batch)
        for name, value in zip(marked["id"].to_pylist(), marked["cluster"].to_pylist(), strict=True):
            found[value].add(int(name.partition(":")[2]))
    return {frozenset(group) for group in found.values()}


@pytest.mark.ci
@pytest.mark.parametrize("threshold", [0.5, 0.7])
def test_clusters_are_what_all_pairs_connect(tmp_path, threshold):
    """With so many bands that no pair is missed."""
    documents = planted()
    expected = connected(documents, threshold)
    assert clusters(NearDuplicateClusters(threshold, bands=60, rows=2), documents, tmp_path / "a") == expected
    assert 60 < len(expected) < 200


def test_the_ends_of_a_chain_are_in_one_cluster(tmp_path):
    """The second resembles the first, the third the second only: NearDuplicates would keep the first and the third."""
    base = [f"w{number}" for number in range(100)]
    documents = [" ".join(base[at : at + 60]) for at in (0, 8, 16)]
    assert similarity(documents[0], documents[1]) > 0.7 > similarity(documents[0], documents[2])
    assert clusters(NearDuplicateClusters(), documents, tmp_path / "a", pieces=1) == {frozenset({0, 1, 2})}


def test_one_large_cluster_and_documents_without_words(tmp_path):
    """Equal texts share a value, also where there is nothing to compare; most of the others share their bands."""
    base = [f"w{number}" for number in range(300)]
    documents = [" ".join([*base[:number], "x", *base[number + 1 :]]) for number in range(200)]
    found = clusters(NearDuplicateClusters(), [*documents, "...", "!?", "..."], tmp_path / "a")
    assert found == {frozenset(range(200)), frozenset({200, 202}), frozenset({201})}


@pytest.mark.ci
def test_near_duplicates_never_straddle_a_split_whoever_prepares(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 20_000)
    documents = planted(300, seed=1)
    for number in range(4):
        write_lines(tmp_path / "in" / f"{number}.jsonl", documents[number::4])
    transforms = [NearDuplicateClusters(0.5, bands=60, rows=2), SplitBy("cluster")]
    shares = {"validation_fraction": 0.2, "test_fraction": 0.2}
    folders = [
        prepare(tmp_path / "in", tmp_path / str(n), transforms=transforms, engine=engine, **shares)
        for n, engine in enumerate((None, LocalEngine(2), Backwards()))
    ]
    assert contents(folders[0]) == contents(folders[1]) == contents(folders[2])
    splits = {split: documents_of(folders[0], split) for split in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == len(documents)
    for one, other in combinations(splits.values(), 2):
        assert all(similarity(a, b) < 0.5 for a in one for b in other)
    without = prepare(
        tmp_path / "in", tmp_path / "without", **shares
    )  # by a hash of each text: some do straddle
    one, other = (documents_of(without, split) for split in ("train", "validation"))
    assert any(similarity(a, b) >= 0.5 for a in one for b in other)


def test_a_column_of_that_name_is_not_replaced(tmp_path):
    transform, (batch, *_) = NearDuplicateClusters(), batches(["one text", "another text"])
    transform.map(iter([batch]), tmp_path / "0")
    transform.reduce([tmp_path / "0"], tmp_path / "conclusion")
    transform.load(tmp_path / "conclusion")
    with pytest.raises(ConfigError, match="have a column 'cluster' already"):
        transform.apply(transform.apply(batch, pytest.fail), pytest.fail)
