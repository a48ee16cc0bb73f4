import json
from pathlib import Path

import pytest

from tests.support.quality_corpus import lines
from toolkit import english_words
from toolkit.english_words import count_sentences, words, words_of

STORED = json.loads((Path(__file__).parent / "spacy_words.json").read_text(encoding="utf-8"))


def test_the_words_of_pieces_are_those_of_spacy():
    assert not [
        (piece, parts, words_of(piece)) for piece, *parts in STORED["words"] if words_of(piece) != (*parts,)
    ]


def test_the_number_of_sentences_is_that_of_spacy():
    stored = zip(lines(), STORED["sentences"], strict=True)
    assert not [(line, number) for line, number in stored if count_sentences(line) != number]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I can't, Mr. Smith!", ["I", "ca", "n't", ",", "Mr.", "Smith", "!"]),
        (
            "They’re 10km\naway (e.g. U.S.).",
            ["They", "’re", "10", "km", "away", "(", "e.g.", "U.S.", ")", "."],
        ),
        ("see http://a.com/x-y?z, well-known", ["see", "http://a.com/x-y?z", ",", "well", "-", "known"]),
        ("", []),
        (" \n", []),
    ],
)
def test_known_texts(text, expected):
    assert words(text) == expected


def test_words_that_are_forgotten_are_found_again(monkeypatch):
    monkeypatch.setattr(english_words, "MOST_REMEMBERED", 3)
    text = "one two, don't three. " * 3 + "x" * 100 + "."
    assert words(text) == ["one", "two", ",", "do", "n't", "three", "."] * 3 + ["x" * 100, "."]


def test_sentences_are_counted_up_to_what_is_enough():
    assert [count_sentences("No. So! Yes?", enough) for enough in (None, 1, 2, 3, 4)] == [3, 1, 2, 3, 3]


@pytest.mark.parametrize("piece", ["(", "a:", "a@", ".", "e.g.", ":)", "a-b.", "😀", "1,"])
def test_a_piece_of_any_length_takes_time_that_grows_with_it(piece):
    """Time that grows with the square would be 100 times as long as a test may take."""
    assert "".join(words(piece * 50_000)) == piece * 50_000
