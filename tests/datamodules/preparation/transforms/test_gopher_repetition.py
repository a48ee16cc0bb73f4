import random

import pytest

from core.errors import ConfigError
from datamodules.preparation.transforms import gopher_repetition
from datamodules.preparation.transforms.gopher_repetition import GopherRepetition
from tests.support.decisions import configurations, differing, name_of, texts
from toolkit.english_words import words

NAMES = {
    "dup_line_frac": "max_repeated_lines",
    "dup_para_frac": "max_repeated_paragraphs",
    "dup_line_char_frac": "max_repeated_line_characters",
    "dup_para_char_frac": "max_repeated_paragraph_characters",
    "top_n_grams": "max_top_ngram",
    "dup_n_grams": "max_repeated_ngrams",
}
REASONS = {
    "empty": "empty",
    "dup_line_frac": "repeated lines",
    "dup_para_frac": "repeated paragraphs",
    "dup_line_char_frac": "characters in repeated lines",
    "dup_para_char_frac": "characters in repeated paragraphs",
    **{f"top_{n}_gram": f"most frequent {n}-gram" for n in range(1, 5)},
    **{f"duplicated_{n}_n_grams": f"repeated {n}-grams" for n in range(2, 11)},
}
OFF = {**dict.fromkeys([*NAMES.values()][:4]), "max_top_ngram": {}, "max_repeated_ngrams": {}}


@pytest.mark.parametrize("one", configurations("GopherRepetitionFilter"), ids=name_of)
def test_the_decisions_and_reasons_are_those_of_datatrove(one):
    options = {
        NAMES[name]: dict(value) if value and "n_" in name else value
        for name, value in one["options"].items()
    }
    stage = GopherRepetition(**{name: {} if value == [] else value for name, value in options.items()})
    assert not differing(stage.reason, one, REASONS)


def test_the_corpus_has_documents_for_each_reason():
    found = {GopherRepetition().reason(text) for text in texts()}
    assert found == {None, *REASONS.values()} - {
        "most frequent 1-gram",
        *(f"repeated {n}-grams" for n in (2, 3, 4)),
    }


@pytest.mark.parametrize(
    ("option", "value", "kept", "dropped", "reason"),
    [
        ("max_repeated_lines", 0.5, "a\n\na\nb\nb", "a\na\na", "repeated lines"),
        ("max_repeated_paragraphs", 0.5, "a\n\na\n\n", "a\n\n\na\n\na", "repeated paragraphs"),
        ("max_repeated_line_characters", 0.4, "aa\naa", "aaa\naaa", "characters in repeated lines"),
        ("max_repeated_paragraph_characters", 0.4, "aaaa\n\naaaa", "aaaaa\n\naaaaa", "characters in repeated paragraphs"),
        ("max_top_ngram", {2: 0.6}, "a b c a b d", "a b c a b", "most frequent 2-gram"),
        ("max_repeated_ngrams", {2: 0.25}, "a b c a b", "aa bb c aa bb", "repeated 2-grams"),
    ],
)  # fmt: skip
def test_a_rule_alone_at_its_threshold(option, value, kept, dropped, reason):
    stage = GopherRepetition(**{**OFF, option: value})
    assert (stage.reason(kept), stage.reason(dropped)) == (None, reason)


def test_ngrams_are_equal_if_their_words_are():
    """datatrove compares them without spaces, and takes 7 of 19 characters for repeated."""
    stage = GopherRepetition(**{**OFF, "max_repeated_ngrams": {2: 0.1}})
    assert stage.reason("on going x ongo ing") is None
    assert stage.reason("on going x on going") == "repeated 2-grams"


def test_no_count_exceeds_its_bound():
    draw = random.Random(0)
    for _ in range(300):
        found = words(" ".join(draw.choices(["a", "bb", "ccc", "dddd", "e"], k=draw.randint(1, 40))))
        hashes = gopher_repetition._Hashes(found)
        for n in range(1, min(len(found), 6) + 1):
            assert hashes.bound_of_top(n) >= gopher_repetition._top(found, n)
            assert hashes.bound_of_repeated(n) >= gopher_repetition._repeated(found, n)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_repeated_lines": 1.5}, "max_repeated_lines is 1.5"),
        ({"max_top_ngram": {0: 0.1}}, "max_top_ngram has 0: 0.1"),
        ({"max_repeated_ngrams": {5: -0.1}}, "max_repeated_ngrams has 5: -0.1"),
    ],
)
def test_thresholds_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"GopherRepetition: {message}"):
        GopherRepetition(**options)
