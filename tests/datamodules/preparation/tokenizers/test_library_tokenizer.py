"""What the trained tokenizers promise alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from core.errors import ConfigError
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.unigram_tokenizer import UnigramTokenizer
from datamodules.preparation.tokenizers.word_piece_tokenizer import WordPieceTokenizer
from tests.support.corpus import TOPICS

KINDS = (BPETokenizer, UnigramTokenizer, WordPieceTokenizer)
HARD = ["", " ", "  a  b ", "\n\n\t\r\n", "naïve Ünïcode 中文 שלום", "👩‍👩‍👧 🙂🙂", "e\u0301 é ﬁne ①", "\x00\x7f\ufeff",
        "‿x ##y ▁z [UNK] <unk>", "x" * 3000, "é" * 300, " " * 5000,
        "\n" * 5000, "中文字" * 2000]  # fmt: skip


@pytest.fixture(scope="module")
def texts():
    return TOPICS


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def tokenizer(request, texts):
    tokenizer = request.param(700)
    tokenizer.prepare(iter(texts))
    return tokenizer


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_exactly(tokenizer, text):
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert all(0 < id < 700 for id in ids)


def test_hard_texts_and_documents_come_back_exactly(tokenizer, texts):
    for text in [*HARD, *texts]:
        assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


def test_the_vocabulary_is_what_was_asked_for(tokenizer, texts):
    stored = Tokenizer.from_str(tokenizer.to_json())
    assert tokenizer.vocab_size == 700 == stored.get_vocab_size()
    assert sorted(stored.get_vocab().values()) == list(range(700))
    encoded = tokenizer.encode_batch(texts)
    assert sum(map(len, encoded)) < sum(map(len, texts)) / 1.8
    assert len({id for ids in encoded for id in ids}) > 350


def test_the_json_gives_the_same_ids(tokenizer, texts):
    stored = Tokenizer.from_str(tokenizer.to_json())
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert stored.encode(text).ids == ids
        assert stored.decode(ids) == text


def test_the_end_of_text_is_never_read_from_a_document(tokenizer):
    text = "a <|endoftext|><|endoftext|> b"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.end_of_text_id == 0
    assert 0 not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0]) == "<|endoftext|>"


DIGEST = """
import hashlib, json, sys
from core import catalog
for name in ("BPETokenizer", "UnigramTokenizer", "WordPieceTokenizer"):
    tokenizer = catalog.find(name, "data").load()(1000)
    tokenizer.prepare(json.loads(open(sys.argv[1]).read()))
    print(hashlib.sha256(tokenizer.to_json().encode()).hexdigest())
"""


@pytest.mark.ci
def test_another_process_with_another_number_of_threads_trains_the_same(texts, capsys, monkeypatch, tmp_path):
    (tmp_path / "texts").write_text(json.dumps(texts))
    words = [sys.executable, "-c", DIGEST, str(tmp_path / "texts")]
    monkeypatch.setattr(sys, "argv", words[2:])
    for _ in range(2):
        exec(DIGEST, {})
    ours = capsys.readouterr().out.split()
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    root = Path(__file__).parents[4]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root, env=environment, check=True)
    assert ours[:3] == ours[3:] == done.stdout.split()
    assert len(set(ours)) == 3


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_short_text_is_refused_with_the_size_that_it_allows(kind, texts):
    with pytest.raises(
        ConfigError, match=rf"{kind.__name__}: vocab_size is 90,000, but .* allows ([\d,]+) only"
    ) as e:
        kind(90_000).prepare(texts[:20])
    allowed = int(str(e.value).partition("Set vocab_size to ")[2].split()[0])
    for size in (allowed, allowed - 1):
        tokenizer = kind(size)
        tokenizer.prepare(texts[:20])
        assert tokenizer.vocab_size == size > 600


@pytest.mark.parametrize(
    ("kind", "least"), [(BPETokenizer, 257), (UnigramTokenizer, 257), (WordPieceTokenizer, 513)]
)
def test_the_smallest_vocabulary_knows_bytes(kind, least, texts):
    tokenizer = kind(least)
    tokenizer.prepare(texts[:3])
    assert tokenizer.decode(tokenizer.encode_batch(["naïve 中文"])[0]) == "naïve 中文"
    assert len(tokenizer.encode_batch(["naïve 中文"])[0]) == len("naïve 中文".encode())
    with pytest.raises(ConfigError, match=f"take {least}"):
        kind(least - 1)


def test_the_fingerprint_tells_the_size():
    assert UnigramTokenizer(300).fingerprint() == UnigramTokenizer(300).fingerprint()
    assert UnigramTokenizer(300).fingerprint() != UnigramTokenizer(301).fingerprint()
