import json
import os
from itertools import pairwise
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from core.errors import ConfigError
from datamodules.preparation.tokenizers import library_tokenizer
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer

TEXTS = [f"the {word} of the {other}, and the {word}s" for word in "abc" for other in ("cat", "dog", "end")]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = BPETokenizer(300)
    tokenizer.prepare(iter(TEXTS * 5))
    return tokenizer


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_comes_back_exactly(tokenizer, text):
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  a  b ",
        "\n\n\t\r\n",
        "naïve Ünïcode 中文 שלום",
        "👩‍👩‍👧 🙂🙂",
        "e\u0301 é",
        "\x00\x7f\ufeff",
        "the end",
    ],
)
def test_known_hard_cases_come_back_exactly(tokenizer, text):
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch([text, text])] == [text, text]


def test_ids_are_in_range_and_merges_shorten(tokenizer):
    assert tokenizer.vocab_size <= 300
    encoded = tokenizer.encode_batch(TEXTS)
    assert all(0 < id < tokenizer.vocab_size for ids in encoded for id in ids)
    assert sum(map(len, encoded)) < sum(map(len, TEXTS)) / 2


def test_the_end_of_text_is_never_read_from_a_document(tokenizer):
    text = "a <|endoftext|> b"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.end_of_text_id == 0
    assert 0 not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0]) == "<|endoftext|>"


def test_the_json_rebuilds_it(tokenizer):
    rebuilt = Tokenizer.from_str(tokenizer.to_json())
    for text in [*TEXTS, "🙂 ünïcode"]:
        assert rebuilt.encode(text).ids == tokenizer.encode_batch([text])[0]
    assert rebuilt.token_to_id("<|endoftext|>") == tokenizer.end_of_text_id
    assert rebuilt.get_vocab_size() == tokenizer.vocab_size


def merged(word, ranks):
    """The pieces of a word: the first of the known pairs with the lowest rank is joined, again and again."""
    while True:
        pairs = [(ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(word))]
        rank, at = min(pairs, default=(len(ranks), 0))
        if rank == len(ranks):
            return word
        word = [*word[:at], word[at] + word[at + 1], *word[at + 2 :]]


def test_ids_are_those_of_merging_step_by_step(tokenizer):
    stored = json.loads(tokenizer.to_json())
    ranks = {tuple(pair): rank for rank, pair in enumerate(stored["model"]["merges"])}
    cut = Tokenizer.from_str(tokenizer.to_json()).pre_tokenizer
    for text in [*TEXTS, "the catalogue: abandoned, endless… 🙂"]:
        pieces = [piece for word, _ in cut.pre_tokenize_str(text) for piece in merged(list(word), ranks)]
        assert tokenizer.encode_batch([text])[0] == [stored["model"]["vocab"][piece] for piece in pieces]


def test_a_short_text_yields_fewer_ids_than_wanted():
    tokenizer = BPETokenizer(5000)
    assert tokenizer.vocab_size == tokenizer.fingerprint()["vocab_size"] == 5000
    tokenizer.prepare(TEXTS)
    assert 257 < tokenizer.vocab_size < 400
    assert tokenizer.fingerprint() == {"vocab_size": 5000}


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    BPETokenizer(257)
    with pytest.raises(ConfigError, match=r"256 bytes and .* take 257"):
        BPETokenizer(256)


def _encode(texts):
    tokenizer = BPETokenizer(300)
    tokenizer.prepare(texts)
    tokenizer.encode_batch(texts * 50)


def test_forked_children_neither_warn_nor_hang(tokenizer, capfd):
    tokenizer.encode_batch(TEXTS * 50)
    processes = [get_context("fork").Process(target=_encode, args=(TEXTS,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    assert capfd.readouterr().err == ""


def test_the_users_choice_about_threads_stands(tokenizer, monkeypatch):
    monkeypatch.setattr(library_tokenizer, "_CHOSEN", "true")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    tokenizer.encode_batch(TEXTS)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_documents_are_taken_as_a_stream():
    seen = []

    def documents():
        for text in TEXTS:
            seen.append(text)
            yield text

    BPETokenizer(260).prepare(documents())
    assert seen == TEXTS
