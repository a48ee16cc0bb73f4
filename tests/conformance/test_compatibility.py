"""What configs/README.md says of techniques that run together is current, and they do what it says."""

import random
from dataclasses import replace

import pytest

from tests.conformance import compatibility
from tests.conformance.compatibility import (
    BUG,
    NOTHING,
    REFUSED,
    WORKS,
    Part,
    all_pairs,
    callbacks,
    columns,
    groups,
    look_up,
    neighbours,
    outcome,
    read_results,
    refusal,
    refused_pairs,
    together,
    train_group,
)

WRITE = "run `python -m tests.conformance.compatibility`; --lists where only words of declarations changed"


def sampled(found, count):
    """Returns the same few in every run; another registered technique draws others."""
    return random.Random(0).sample(found, min(count, len(found)))


def label(pair):
    return f"{pair[0].name}+{pair[1].name}"


def column_groups():
    return [(column, group) for column in columns() for group in groups(column)]


def check_group(group, column):
    result, found = train_group(group, column)
    assert result == WORKS, result
    if column is not NOTHING:
        results = read_results()
        assert {n: r.partition(":")[0] for n, r in found.items()} == {
            part.name: look_up(results, part.name, column.name).partition(":")[0] for part in group
        }


@pytest.mark.slow
@pytest.mark.parametrize("group", groups(NOTHING), ids=lambda group: f"{len(group)}-from-{group[0].name}")
def test_callbacks_that_go_together_train_together(group):
    check_group(group, NOTHING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "group"),
    column_groups(),
    ids=lambda part: part.name if isinstance(part, Part) else f"{len(part)}-from-{part[0].name}",
)
def test_they_train_together_under_every_strategy_and_precision(column, group):
    check_group(group, column)


@pytest.mark.parametrize("pair", sampled(neighbours(callbacks()), 2), ids=label)
def test_a_sample_of_the_pairs_that_act_in_the_same_hook(pair):
    assert outcome(*pair) == WORKS


@pytest.mark.slow
@pytest.mark.parametrize("pair", neighbours(callbacks()), ids=label)
def test_all_pairs_that_act_in_the_same_hook(pair):
    assert outcome(*pair) == WORKS


@pytest.mark.parametrize("pair", sampled(refused_pairs(), 1), ids=label)
def test_a_sample_of_the_pairs_that_are_refused(pair):
    assert outcome(*pair).startswith(REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("pair", refused_pairs(), ids=label)
def test_all_pairs_that_are_refused(pair):
    assert outcome(*pair).startswith(REFUSED)


def test_every_pair_is_trained_in_a_group_or_refused():
    met = {frozenset((a.name, b.name)) for group in groups(NOTHING) for a in group for b in group}
    for column in columns():
        met |= {frozenset((part.name, column.name)) for group in groups(column) for part in group}
    for first, second in all_pairs():
        assert (frozenset((first.name, second.name)) in met) != bool(refusal(first, second)), label(
            (first, second)
        )


def test_the_number_of_runs_grows_with_the_catalogue_and_not_with_its_square():
    parts = callbacks()
    hooks = len(set().union(*(part.acts_in for part in parts)))
    more = [*parts, *(replace(part, name=f"Another{part.name}") for part in parts)]
    assert len(neighbours(more)) <= sum(len(part.acts_in) for part in more) - hooks
    assert (
        len(neighbours(parts)) + sum(len(groups(column)) for column in (NOTHING, *columns()))
        < len(all_pairs()) / 5
    )


@pytest.mark.parametrize("name", ["techniques", "refusals"])
def test_the_written_lists_are_current(name):
    made = compatibility.support() if name == "techniques" else compatibility.refusals(read_results())
    assert compatibility.written(name) == made, WRITE


def test_the_results_have_every_pair_and_no_other():
    results = read_results()
    names = {frozenset((first.name, second.name)) for first, second in all_pairs()}
    assert {frozenset((first, second)) for first, row in results.items() for second in row} == names, WRITE
    for first, second in all_pairs():
        result = look_up(results, first.name, second.name)
        if refusal(first, second):
            assert result == REFUSED, WRITE
        else:
            assert result == WORKS or result.startswith(f"{REFUSED}: "), WRITE


@pytest.mark.ci
def test_the_picture_shows_the_results():
    assert compatibility.PICTURE.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert compatibility.draw(read_results())[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_preflight_refuses_is_no_bug():
    twice = {"trainer": {"callbacks+": [{"class_path": "LossCurve"}]}}
    result = outcome(Part("LossCurve", twice), Part("the same", twice))
    assert result.startswith(f"{REFUSED}: LossCurve ")


def test_a_crash_is_a_bug():
    wrong = {"data": {"init_args": {"validation_fraction": 2.0}}}
    assert outcome(Part("x", wrong), Part("y", {"trainer": {"precision": "16"}})).startswith(BUG)


def test_a_group_has_the_callbacks_of_all_its_parts():
    [group, *_] = groups(NOTHING)
    named = [
        item["class_path"].rpartition(".")[2] for item in together(group).overlay["trainer"]["callbacks+"]
    ]
    assert {part.name for part in group} <= set(named)
