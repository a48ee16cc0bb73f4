import unicodedata
from collections import Counter

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules.preparation.transforms.normalise import Normalise

TRICKY = (
    st.text(
        st.sampled_from("aÉe\u0301\u212b\ufb01\xa0\u3000\u200b \t\n\r\x0b\x0c\x00\x1f\x85\u2028\ufeffİΣ℡A")
    )
    | st.text()
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cafe\u0301", "caf\xe9"),
        ("a\r\nb\rc\x0cd\u2028e", "a\nb\nc\nd\ne"),
        ("a\x00b\x07c\x7f", "abc"),
        ("\ufeffa\u200bb", "a\u200bb"),  # no width joins words in some scripts: it stays
        ("a\xa0b\u3000c", "a b c"),
        ("  indented \t\n\n\n\n  more  \n\n", "  indented\n\n  more"),
        ("tab\tstays", "tab\tstays"),
        ("\ufb01 Ünïcode", "\ufb01 Ünïcode"),
    ],
)
def test_known_cases(text, expected):
    assert Normalise().normalised(text) == expected


def test_each_part_is_a_choice():
    raw = "Cafe\u0301\x00 \r\n\xa0x\n"
    nothing = {"form": None, "whitespace": False, "control": False}
    assert Normalise(**nothing).normalised(raw) == raw
    assert Normalise(**{**nothing, "lower": True}).normalised(raw) == raw.lower()
    assert Normalise(**{**nothing, "control": True}).normalised(raw) == raw.replace("\x00", "")
    assert Normalise(**{**nothing, "form": "NFC"}).normalised(raw) == unicodedata.normalize("NFC", raw)
    assert Normalise(**{**nothing, "whitespace": True}).normalised(raw) == "Cafe\u0301\x00\n x"
    assert Normalise("NFKC").normalised("\ufb01 \uff21") == "fi A"


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD", None])
@pytest.mark.parametrize("lower", [False, True])
def test_twice_is_once(form, lower):
    stage = Normalise(form, lower=lower)

    @given(TRICKY)
    def check(text):
        once = stage.normalised(text)
        assert stage.normalised(once) == once
        assert "\r" not in once
        assert not any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in once)
        assert " \n" not in once

    check()


def test_empty_documents_are_dropped_and_counted():
    texts = ["a ", "\x00", " \n", "b"]
    batch = pyarrow.record_batch({"text": texts, "source": ["s"] * 4, "id": list("1234")})
    dropped = Counter()
    kept = Normalise().apply(batch, lambda reason, rows: dropped.update({reason: len(rows)}))
    assert kept.to_pydict() == {"text": ["a", "b"], "source": ["s", "s"], "id": ["1", "4"]}
    assert dropped == {"empty": 2}
