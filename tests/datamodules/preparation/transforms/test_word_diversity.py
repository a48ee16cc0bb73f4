"""Shares of different words and their entropy against numpy, scipy's formula written out, and by hand."""

import random
import re

import numpy as np
import pytest

from core.errors import ConfigError
from datamodules.preparation.readers.python_docs import python_documents
from datamodules.preparation.transforms.word_diversity import WordDiversity


def measured(text, words):
    """Returns the share of different words and their entropy, by numpy."""
    found = np.array(re.findall(r"\w+", text)[:words])
    _, counts = np.unique(np.char.lower(found), return_counts=True)
    shares = counts / counts.sum()
    return len(counts) / counts.sum(), -(shares * np.log(shares)).sum()


def texts():
    draw = random.Random(0)
    for _ in range(300):
        vocabulary = [f"w{number}" for number in range(draw.choice([1, 3, 20, 400]))]
        yield " ".join(draw.choices(vocabulary, k=draw.randint(1, 700)))
    for _, text in zip(range(200), python_documents(), strict=False):
        yield str(text)


@pytest.mark.parametrize("words", [50, pytest.param(500, marks=pytest.mark.ci)])
def test_decisions_are_those_of_numpy(words):
    unique, even = (
        WordDiversity(min_unique=0.3, words=words),
        WordDiversity(None, min_entropy=3.0, words=words),
    )
    given = [text for text in texts() if re.search(r"\w", text)]
    decisions = [(unique.reason(text) is None, even.reason(text) is None) for text in given]
    expected = [
        (share >= 0.3, entropy >= 3.0) for share, entropy in (measured(text, words) for text in given)
    ]
    assert decisions == expected
    assert {True, False} == {one for one, _ in decisions} == {one for _, one in decisions}


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("Buy buy BUY buy now", {"min_unique": 0.5}, "few different words"),
        ("buy now", {"min_unique": 1.0}, None),
        ("a b " * 100, {"min_unique": 1.0, "words": 2}, None),
        ("a b " * 100, {"min_unique": None, "min_entropy": 0.69}, None),
        ("a b " * 100, {"min_unique": None, "min_entropy": 0.7}, "few frequent words"),
        ("...", {}, "no words"),
        ("a a a", {"min_unique": None}, None),
    ],
)
def test_rules(text, options, reason):
    assert WordDiversity(**options).reason(text) == reason


@pytest.mark.parametrize("options", [{"min_unique": 1.1}, {"min_entropy": -1.0}, {"words": 0}])
def test_what_is_out_of_range_is_refused(options):
    with pytest.raises(ConfigError, match=rf"WordDiversity: {next(iter(options))} is"):
        WordDiversity(**options)
