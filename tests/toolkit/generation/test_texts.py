"""Text is printed token by token as it would be decoded whole."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from core.errors import ConfigError
from toolkit.generation.texts import TextStream, split_stops, texts

TEXT = "Zoë said: naïve 🙂 words, twice  spaced."


def byte_level():
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece():
    words = ["\u2581" + word for word in ["Zoë", "said:", "naïve", "🙂", "words,", "twice", "spaced."]]
    pieces = [("<unk>", 0.0), ("\u2581", -3.0), *((word, -1.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("start", [0, 4])
def test_pieces_join_to_the_whole(make, start):
    tokenizer = make()
    ids = tokenizer.encode(TEXT).ids
    pieces = list(texts(tokenizer, ids[start:], ids[:start]))
    assert len(pieces) == len(ids) - start + 1
    assert tokenizer.decode(ids[:start]) + "".join(pieces) == tokenizer.decode(ids) == TEXT


def test_what_is_never_completed_comes_at_the_end():
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙂").ids[:-1]
    assert "".join(texts(tokenizer, ids)) == "a\N{REPLACEMENT CHARACTER}"


def streamed(text, stops, tokenizer=None):
    """Returns the pieces that a stream gives out while the tokens of a text are added, and its rest."""
    tokenizer = tokenizer or byte_level()
    stream = TextStream(tokenizer, stops=stops)
    pieces = [stream.add(token) for token in tokenizer.encode(text).ids]
    return stream, [*pieces, stream.end()]


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["said"], "Zoë "),
        (["naïve", "said"], "Zoë "),
        (["🙂 words"], "Zoë said: naïve "),
        (["  "], "Zoë said: naïve 🙂 words, twice"),
        (["."], "Zoë said: naïve 🙂 words, twice  spaced"),
        (["words, thrice", "e  spaced..", "sai:"], TEXT),
        (["Zoë"], ""),
    ],
)
def test_a_text_ends_before_a_stop_string_of_which_nothing_is_shown(stops, text):
    stream, pieces = streamed(TEXT, stops)
    assert stream.text == "".join(pieces) == text
    assert stream.stopped == (text != TEXT)


def test_the_first_of_two_stop_strings_that_come_at_once_counts():
    stream, _ = streamed(TEXT, ["ive", "naïve", ": n"])
    assert stream.text == "Zoë said"


def test_what_may_begin_a_stop_string_is_held_back_and_nothing_else():
    _, pieces = streamed("abcabd!", ["abd!?"])
    assert pieces == ["", "", "abc", "", "", "", "", "abd!"]


def test_special_tokens_are_ids_and_what_cannot_be_written_is_named():
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|end|>"])
    end = tokenizer.token_to_id("<|end|>")
    assert split_stops(tokenizer, ["\n\n", "<|end|>"]) == (["\n\n"], [end])
    with pytest.raises(ConfigError, match="'' is empty"):
        split_stops(tokenizer, [""])
    with pytest.raises(ConfigError, match="'tschüs' cannot be written"):
        split_stops(sentencepiece(), ["tschüs"])
