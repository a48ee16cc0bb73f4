"""Words of lists in texts of any script."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.word_lists import WordLists, comparable_words


@pytest.fixture
def listed(tmp_path):
    def make(*words):
        path = tmp_path / "words.txt"
        path.write_text("\n".join(words), encoding="utf-8")
        return WordLists([str(path)], "Some.files")

    return make


@pytest.fixture(scope="module")
def listing(tmp_path_factory):
    path = tmp_path_factory.mktemp("lists") / "words.txt"
    path.write_text("a\nab b\nssa\n", encoding="utf-8")
    return WordLists([str(path)], "Some.files")


@pytest.mark.parametrize(
    ("word", "text", "found"),
    [
        ("ass", "An ASS.", 1),
        ("ass", "class assess pass", 0),
        ("ass", "bad_ass (ass) ass-ass", 4),
        ("strasse", "Die Stra\u00dfe", 1),
        ("STRA\u00dfE", "strasse", 1),
        ("caf\u00e9", "cafe\u0301", 1),
        ("cafe", "caf\u00e9 cafe\u0301", 0),
        ("file", "\ufb01le \uff26\uff29\uff2c\uff25", 2),
        ("bad", "b\u00adad b\u200bad", 2),
        ("\u03c3\u03bf\u03c6\u03cc\u03c2", "\u03a3\u039f\u03a6\u038c\u03a3", 1),  # two forms of sigma
        ("\u0445\u0443\u0434\u043e", "\u0425\u0423\u0414\u041e \u0445\u0443\u0434\u043e\u0439", 1),
        ("\u0915\u093f", "\u0915\u093f \u0915\u0940 \u0915", 1),  # vowel signs belong to the word
        ("\u0915", "\u0915\u093f", 0),
        ("\u574f\u4eba", "\u4ed6\u662f\u574f\u4eba\u3002", 2),  # no spaces: two words of one character
        ("\u574f\u4eba", "\u574f\u7684\u4eba", 0),
        ("\u0e0a\u0e31\u0e48\u0e27", "\u0e04\u0e19\u0e0a\u0e31\u0e48\u0e27", 2),
        ("two words", "Two  words, two-words; two more words", 4),
        ("123", "123 1234", 1),
    ],
)
def test_whole_words_in_any_case_and_script(listed, word, text, found):
    assert listed(word).count(comparable_words(text)) == found


def test_the_longest_of_those_that_begin_together(listed):
    words = listed("a", "a b c", "c d", "d")
    assert words.count(comparable_words("a b c d")) == 4  # "a b c", "d"
    assert words.count(comparable_words("a b d")) == 2
    assert words.count(comparable_words("x c d a")) == 3


@given(st.text("ab \u00df.", max_size=60))
def test_it_counts_what_a_regular_expression_counts(listing, text):
    forms = re.findall(r"\bab\W+b\b|\ba\b|\bssa\b", text.casefold())
    assert listing.count(comparable_words(text)) == sum(len(comparable_words(form)) for form in forms)
