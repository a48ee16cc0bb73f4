import pickle
import re

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from datamodules.preparation.transforms.harmful_content import HarmfulContent, words_of


@pytest.fixture
def listed(tmp_path):
    def make(*words, **limits):
        path = tmp_path / "words.txt"
        path.write_text("\n".join(words), encoding="utf-8")
        return HarmfulContent([str(path)], **{"min_count": 1, "max_share": 0.0, **limits})

    return make


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
    assert listed(word).matched(words_of(text)) == found
    assert (listed(word).reason(text) is None) == (found == 0)


def test_the_longest_of_those_that_begin_together(listed):
    words = listed("a", "a b c", "c d", "d")
    assert words.matched(words_of("a b c d")) == 4  # "a b c", "d"
    assert words.matched(words_of("a b d")) == 2
    assert words.matched(words_of("x c d a")) == 3


@given(st.text("ab \u00df.", max_size=60))
def test_it_counts_what_a_regular_expression_counts(text):
    kind = HarmfulContent.__new__(HarmfulContent)
    kind._phrases = {("a",), ("ab", "b"), ("ssa",)}
    kind._lengths = {"a": [1], "ab": [2], "ssa": [1]}
    forms = re.findall(r"\bab\W+b\b|\ba\b|\bssa\b", text.casefold())
    assert kind.matched(words_of(text)) == sum(len(words_of(form)) for form in forms)


@pytest.mark.parametrize(
    ("min_count", "max_share", "dropped"),
    [(1, 0.0, True), (2, 0.0, True), (3, 0.0, False), (1, 0.19, True), (1, 0.2, False), (3, 0.19, False)],
)
def test_both_limits_have_to_be_reached(listed, min_count, max_share, dropped):
    text = "bad one two three four bad five six seven eight"
    reason = listed("bad", min_count=min_count, max_share=max_share).reason(text)
    assert reason == ("harmful words" if dropped else None)


def test_files_and_their_fingerprint(tmp_path):
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    first.write_text("\ufeff# a comment\nBad\n\n", encoding="utf-8")
    second.write_text("worse\r\nbad\r\n", encoding="utf-8")
    both = HarmfulContent([str(first), str(second)], 1, 0.0)
    assert [both.reason(text) is None for text in ("bad", "worse", "a comment")] == [False, False, True]
    assert both.fingerprint() == HarmfulContent([str(second)], 1, 0.0).fingerprint()
    assert both.fingerprint() != HarmfulContent([str(first)], 1, 0.0).fingerprint()
    again = pickle.loads(pickle.dumps(both))
    batch = pyarrow.record_batch({"text": ["fine", "Worse!"], "source": ["s"] * 2, "id": list("12")})
    dropped = []
    assert again.apply(batch, lambda *what: dropped.append(what))["id"].to_pylist() == ["1"]
    assert dropped == [("harmful words", [1])]


def test_mistakes(tmp_path, listed):
    for content, message in (
        ("", "has no words"),
        ("# x", "has no words"),
        ("a " * 33, "line 1 has 33 words"),
    ):
        with pytest.raises(ConfigError, match=message):
            listed(content)
    with pytest.raises(ConfigError, match="No such file"):
        HarmfulContent([str(tmp_path / "none.txt")])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8, at byte 3"):
        HarmfulContent([str(tmp_path / "latin.txt")])
    with pytest.raises(ConfigError, match="is empty"):
        HarmfulContent([])
    for limits in ({"min_count": 0}, {"max_share": 1.5}):
        with pytest.raises(ConfigError, match="it is"):
            listed("bad", **limits)


@pytest.mark.ci
@pytest.mark.timeout(120)  # the square of a megabyte takes hours
def test_time_is_linear_in_hostile_text(listed):
    words = listed("a " * 32, *("a " * n + "b" for n in range(1, 31)), "\u4e00" * 31 + "\u4e01")
    for piece in ("a ", "a b ", "\u4e00", "\u0301", "a\u0301", "\u0e31", "_", " "):
        words.reason((piece * (1 << 20))[: 1 << 20])
