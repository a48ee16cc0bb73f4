import pytest

from core.errors import ConfigError
from datamodules.preparation.transforms.fine_web_quality import FineWebQuality
from tests.support.decisions import configurations, differing, name_of, texts

NAMES = {
    "line_punct_thr": "min_closed_lines",
    "line_punct_exclude_zero": "keep_without_closed",
    "short_line_thr": "max_short_lines",
    "short_line_length": "short_line_characters",
    "char_duplicates_ratio": "max_repeated_characters",
    "new_line_ratio": "max_newlines_per_word",
}
REASONS = {
    "empty": "empty",
    "line_punct_ratio": "lines without an end",
    "short_line_ratio": "short lines",
    "char_dup_ratio": "repeated lines",
    "list_ratio": "newlines",
}
OFF = {
    "min_closed_lines": None,
    "max_short_lines": None,
    "max_repeated_characters": None,
    "max_newlines_per_word": None,
}


@pytest.mark.parametrize("one", configurations("FineWebQualityFilter"), ids=name_of)
def test_the_decisions_and_reasons_are_those_of_datatrove(one):
    stage = FineWebQuality(**{NAMES[name]: value for name, value in one["options"].items()})
    assert not differing(stage.reason, one, REASONS)


def test_a_rule_that_is_none_drops_nothing():
    stage = FineWebQuality(**OFF)
    assert {stage.reason(text) for text in texts()} == {None, "empty"}


def test_the_corpus_has_documents_for_each_reason():
    assert {FineWebQuality().reason(text) for text in texts()} == {None, *REASONS.values()}


@pytest.mark.parametrize(
    ("options", "kept", "dropped", "reason"),
    [
        ({"min_closed_lines": 0.5}, "a.\n\nb", "a.\nb \nc。 ", "lines without an end"),
        ({"min_closed_lines": 0.5, "closing": ":;"}, "a:\nb;\nc", "a:\nb.\nc.", "lines without an end"),
        ({"min_closed_lines": 0.5, "keep_without_closed": True}, "a\nb", "a.\nb\nc", "lines without an end"),
        ({"max_short_lines": 0.5, "short_line_characters": 3}, "abc\nabcd", "abc\nabcd\n ab", "short lines"),
        ({"max_repeated_characters": 0.25}, "aa\naa\nbbbb", "aa\naa\nbbb", "repeated lines"),
        ({"max_newlines_per_word": 0.5}, "a\nb", "a\nb\nc", "newlines"),
        ({"max_newlines_per_word": 0.5}, "a!\nb!\n", "a\nb\n", "newlines"),
    ],
)
def test_a_rule_alone_at_its_threshold(options, kept, dropped, reason):
    stage = FineWebQuality(**{**OFF, **options})
    assert (stage.reason(kept), stage.reason(dropped)) == (None, reason)


@pytest.mark.parametrize("options", [{"max_short_lines": 67.0}, {"short_line_characters": -1}])
def test_thresholds_out_of_range_are_refused(options):
    [(name, value)] = options.items()
    with pytest.raises(ConfigError, match=rf"FineWebQuality: {name} is {value}\. It has to be"):
        FineWebQuality(**options)
