import pytest

from core.errors import ConfigError
from datamodules.preparation.transforms.gopher_quality import GopherQuality
from tests.support.decisions import configurations, differing, name_of, texts, translated

NAMES = {
    "min_doc_words": "min_words",
    "max_doc_words": "max_words",
    "min_avg_word_length": "min_mean_word_length",
    "max_avg_word_length": "max_mean_word_length",
    "max_symbol_word_ratio": "max_symbol_ratio",
    "max_bullet_lines_ratio": "max_bullet_lines",
    "max_ellipsis_lines_ratio": "max_ellipsis_lines",
    "max_non_alpha_words_ratio": "min_alphabetic_words",
    "min_stop_words": "min_stop_words",
    "stop_words": "stop_words",
}
REASONS = {
    "gopher_short_doc": "too short",
    "gopher_long_doc": "too long",
    "gopher_below_avg_threshold": "short words",
    "gopher_above_avg_threshold": "long words",
    "gopher_too_many_hashes": "number signs",
    "gopher_too_many_ellipsis": "ellipses",
    "gopher_too_many_bullets": "bullets",
    "gopher_too_many_end_ellipsis": "lines that end with an ellipsis",
    "gopher_below_alpha_threshold": "letters",
    "gopher_enough_stop_words": "stop words",
}
OFF = dict.fromkeys(list(NAMES.values())[:-1])


@pytest.mark.parametrize("one", configurations("GopherQualityFilter"), ids=name_of)
def test_the_decisions_and_reasons_are_those_of_datatrove(one):
    stage = GopherQuality(**translated(one["options"], NAMES, {}))
    assert not differing(stage.reason, one, REASONS)


def test_the_corpus_has_documents_for_each_reason():
    found = {GopherQuality().reason(text) for text in texts()}
    assert found == {None, *REASONS.values()}


@pytest.mark.parametrize(
    ("option", "value", "kept", "dropped", "reason"),
    [
        ("min_words", 3, "one two three !", "one two . ! ?", "too short"),
        ("max_words", 3, "one two three . !", "one two three four", "too long"),
        ("min_mean_word_length", 3, "abc ab abcd", "abc ab abc", "short words"),
        ("max_mean_word_length", 3, "abc ab abcd", "abc abc abcd", "long words"),
        ("max_symbol_ratio", 0.1, "# " + "w " * 9, "# " + "w " * 8, "number signs"),
        ("max_symbol_ratio", 0.1, "… " + "w " * 9, "... " + "w " * 8, "ellipses"),
        ("max_bullet_lines", 0.5, "• a\nb", "• a\n  - b\nc", "bullets"),
        ("max_ellipsis_lines", 0.5, "a...\nb", "a...\nb… \nc", "lines that end with an ellipsis"),
        ("min_alphabetic_words", 0.8, "a b c d 1", "a b c d 1 2", "letters"),
        ("min_stop_words", 2, "the of", "the The Of the", "stop words"),
    ],
)
def test_a_rule_alone_at_its_threshold(option, value, kept, dropped, reason):
    stage = GopherQuality(**{**OFF, option: value})
    assert (stage.reason(kept), stage.reason(dropped)) == (None, reason)


def test_documents_without_words_divide_by_nothing():
    assert [GopherQuality(min_words=None, min_stop_words=None).reason(text) for text in ("", "\n")] == [
        "letters"
    ] * 2
    assert GopherQuality(**OFF).reason("") is None


@pytest.mark.parametrize(
    "options", [{"min_words": -1}, {"max_bullet_lines": 1.5}, {"min_alphabetic_words": 80}]
)
def test_thresholds_out_of_range_are_refused(options):
    [(name, value)] = options.items()
    with pytest.raises(ConfigError, match=rf"GopherQuality: {name} is {value}\. It has to be"):
        GopherQuality(**options)
