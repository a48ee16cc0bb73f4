"""Hashed n-grams against the same sums in Python's whole numbers."""

import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.errors import ConfigError
from toolkit.hashed_ngrams import HashedNGrams

ALL = (1 << 64) - 1
WORD = re.compile(
    "[a-z0-9\u00c0-\u1fff\ua000-\uffff]+|[!-/:-@\\[-`{-~]|[\u0080-\u00bf\u2000-\u9fff\U00010000-\U0010ffff]"
)


def mixed(value):
    value = (value ^ value >> 31) * 0xBF58476D1CE4E5B9 & ALL
    return (value ^ value >> 29) * 0x9E3779B97F4A7C15 & ALL


def word_number(word):
    return mixed(sum((byte + 1) * 0x2545F4914F6CDD1D**place for place, byte in enumerate(word[:64])) & ALL)


def expected(text, sizes, bits):
    words = [word_number(word.encode("utf-8", "surrogatepass")) for word in WORD.findall(text.lower())]
    found = []
    for size in sizes:
        for at in range(len(words) - size + 1):
            value = words[at]
            for other in words[at + 1 : at + size]:
                value = mixed(value * 0x9E3779B97F4A7C15 + other & ALL)
            found.append(value >> 64 - bits)
    return found


@given(
    st.text(
        st.sampled_from("aB1 .\n\t\u00e9\u00a0\u00ab\u201c\u4e2d\u0e01\ud55c\uff21\U0001f600"), max_size=40
    )
)
@example("")
@example(" ")
@example("one")
@example("x" * 64 + "yz " + "x" * 63 + "zz")
@example("\u4e2da a\u4e2d")
def test_it_is_a_polynomial_of_the_bytes_of_each_word(text):
    for sizes in ((1, 2), (3,), (1, 4)):
        found = HashedNGrams(sizes, buckets=1 << 16).of(text)
        assert found.tolist() == expected(text, sizes, 16)


def test_buckets_that_files_rely_on():
    assert HashedNGrams().of("The river, the lamp.").tolist() == expected(
        "the river , the lamp .", (1, 2), 20
    )
    assert HashedNGrams(characters=3).of("The river") == HashedNGrams().of("the")


def test_a_row_has_length_one_and_each_bucket_once():
    columns, values = HashedNGrams((1,)).row("a b a c a")
    assert len(columns) == 3
    assert sorted(values.tolist()) == pytest.approx([1 / 11**0.5, 1 / 11**0.5, 3 / 11**0.5])
    assert (np.diff(columns) > 0).all()
    assert [part.tolist() for part in HashedNGrams().row(" \n")] == [[], []]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sizes": ()}, "n-gram sizes"),
        ({"sizes": (2, 1)}, "rising"),
        ({"sizes": (0, 1)}, "1 to 8"),
        ({"sizes": (9,)}, "1 to 8"),
        ({"buckets": 1000}, "power of two"),
        ({"buckets": 512}, "power of two"),
        ({"buckets": 1 << 26}, "power of two"),
        ({"characters": 0}, "characters"),
        ({"characters": 1 << 21}, "characters"),
    ],
)
def test_options_out_of_range(wrong, said):
    with pytest.raises(ConfigError, match=said):
        HashedNGrams(**wrong)
