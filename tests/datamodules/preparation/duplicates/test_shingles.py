"""Texts as sets of n-grams of words, compared with sets of tuples; MinHash as an estimate of their similarity."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.preparation.duplicates import shingles
from datamodules.preparation.duplicates.shingles import band_keys, jaccard, mixed, shingle_sets, words
from tests.support.corpus import texts

FEW_WORDS = st.lists(st.sampled_from(["a", "b", "Ünï", "北", "A"]), max_size=40).map(" ".join)


def grams(text, length):
    found = words(text)
    if not found:
        return set()
    return {tuple(found[at : at + length]) for at in range(max(len(found) - length + 1, 1))}


def sets_of(documents, length):
    found = shingle_sets(documents, length)
    return [found.values[begin:end] for begin, end in pairwise(found.ends)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  cat's\nhat, 3.5!", ["the", "cat", "s", "hat", "3", "5"]),
        ("Été naïve", ["été", "naïve"]),
        ("我们 like 東京。", ["我", "们", "like", "東", "京"]),
        ("カナ한국 말", ["カ", "ナ", "한국", "말"]),
        ("... \n", []),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize("length", [1, 3, 5])
@settings(max_examples=60, deadline=None)
@given(FEW_WORDS, FEW_WORDS)
def test_similarity_is_that_of_sets_of_tuples(length, one, other):
    mine, theirs = grams(one, length), grams(other, length)
    a, b = sets_of([one, other], length)
    assert (len(a), len(b)) == (len(mine), len(theirs))
    if mine or theirs:
        assert jaccard(a, b) == len(mine & theirs) / len(mine | theirs)


def test_a_long_text_is_hashed_in_parts(monkeypatch):
    document = " ".join(texts(30))
    [usual] = sets_of([document], 5)
    monkeypatch.setattr(shingles, "_PART", 20)
    [found] = sets_of([document], 5)
    assert found.tolist() == usual.tolist()
    assert len(sets_of(["x" * 100], 5)[0]) == 1


def test_shared_bands_are_as_frequent_as_minhash_promises():
    """Pairs of similarity 1/3 agree in a band of 2 rows with probability 1/9."""
    rng, agree = random.Random(0), []
    for _ in range(60):
        numbers = rng.sample(range(10**6), 300)
        pair = [" ".join(map(str, numbers[:200])), " ".join(map(str, numbers[100:]))]
        one, other = band_keys(shingle_sets(pair, 1), bands=64, rows=2, seed=3)
        agree.append((one == other).mean() / (1 / 3) ** 2)
    assert np.mean(agree) == pytest.approx(1, abs=0.15)


def test_keys_depend_on_band_and_seed():
    sets = shingle_sets(["a b c", "a b c"], 5)
    keys = band_keys(sets, 20, 1, 0)
    assert (keys[0] == keys[1]).all()
    assert len(set(keys[0].tolist())) == 20
    assert not set(keys[0].tolist()) & set(band_keys(sets, 20, 1, 1)[0].tolist())


def test_mixing_has_no_collisions_among_neighbours():
    grid = np.arange(300, dtype=np.uint64)
    pairs = mixed([np.repeat(grid, 300), np.tile(grid, 300)])
    assert len(np.unique(pairs)) == 90_000
    assert len(np.unique(pairs >> np.uint64(40))) > 80_000  # the upper bits decide the file
