"""The tables of configs/README.md are current, and pairs of techniques do what the table says."""

import random

import pytest

from tests.conformance import compatibility
from tests.conformance.compatibility import BUG, REFUSED, Part, outcome, pairs

SAMPLE = 6


def sampled():
    """Returns the same few pairs in every run; another registered technique draws others."""
    found = pairs()
    return random.Random(0).sample(found, min(SAMPLE, len(found)))


def check(first, second):
    result = outcome(first, second)
    table = compatibility.read_matrix()
    expected = table.get((first.name, second.name)) or table.get((second.name, first.name))
    assert not result.startswith(BUG), result
    assert result.partition(":")[0] == expected


def label(pair):
    return f"{pair[0].name}+{pair[1].name}"


@pytest.mark.parametrize("pair", sampled(), ids=label)
def test_a_sample_of_pairs(pair):
    check(*pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", pairs(), ids=label)
def test_every_pair(pair):
    check(*pair)


def test_the_table_of_techniques_is_current():
    assert compatibility.written("techniques") == compatibility.support(), (
        "run `python -m tests.conformance.compatibility`"
    )


def test_the_table_of_pairs_has_every_pair_and_no_other():
    names = {frozenset((first.name, second.name)) for first, second in pairs()}
    table = compatibility.read_matrix()
    assert {frozenset(pair) for pair in table} == names, "run `python -m tests.conformance.compatibility`"
    assert BUG not in table.values()


def test_what_preflight_refuses_is_no_bug():
    twice = {"trainer": {"callbacks+": [{"class_path": "LossCurve"}]}}
    result = outcome(Part("LossCurve", twice), Part("the same", twice))
    assert result.startswith(f"{REFUSED}: LossCurve stands 2 times")


def test_a_crash_is_a_bug():
    wrong = {"data": {"init_args": {"validation_fraction": 2.0}}}
    assert outcome(Part("x", wrong), Part("y", {"trainer": {"precision": "16"}})).startswith(BUG)


def test_the_written_table_reads_back_as_the_results():
    results = {(a.name, b.name): f"{REFUSED}: why" if i % 3 else "yes" for i, (a, b) in enumerate(pairs())}
    text = compatibility.matrix(results)
    assert "1. why" in text
    read = {}
    original = compatibility.written
    try:
        compatibility.written = lambda name: text
        read = compatibility.read_matrix()
    finally:
        compatibility.written = original
    for (first, second), result in results.items():
        assert read[first, second] == result.partition(":")[0]
