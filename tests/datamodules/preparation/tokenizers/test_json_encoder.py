"""Encoding in groups and in parts: the ids are those of each document alone and whole."""

import json
import random

import pytest
from tokenizers import Tokenizer

from datamodules.preparation.tokenizers import json_encoder
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.json_encoder import JSONEncoder, splits_at_spaces
from datamodules.preparation.tokenizers.unigram_tokenizer import UnigramTokenizer
from datamodules.preparation.tokenizers.word_piece_tokenizer import WordPieceTokenizer
from tests.support.corpus import TOPICS

PARTS = ["a", "the", "don't", "'s", "x" * 300, " " * 300, " ", " ", " ", "\n", "\t", "\xa0", "\u2003", "\x1c", "\x85",
         "1", "20", "北京", "ß", "e\u0301", "!?", "_", "<|endoftext|>", "🙂", "\u200b", "\ufeff"]  # fmt: skip


def test_documents_that_are_encoded_in_groups_get_the_ids_that_they_have_alone(tmp_path):
    texts = ["", "a b", "c " * 200_000, "short", "d e " * 40_000, "f " * 30_000, "the end"]
    tokenizer = BPETokenizer(vocab_size=300)
    tokenizer.prepare(texts)
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    encode = JSONEncoder(path)
    found = encode(texts)
    assert found == [encode([text])[0] for text in texts]
    assert [len(ids) > 0 for ids in found] == [bool(text) for text in texts]
    assert encode([]) == []


@pytest.mark.parametrize(
    ("kind", "size"), [(BPETokenizer, 600), (UnigramTokenizer, 600), (WordPieceTokenizer, 900)]
)
def test_long_documents_are_encoded_in_parts_with_the_ids_of_the_whole(kind, size, tmp_path, monkeypatch):
    tokenizer = kind(size)
    tokenizer.prepare([*TOPICS[:12], " ".join(PARTS)])
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    draw = random.Random(1)
    texts = [*TOPICS[12:16], *("".join(draw.choices(PARTS, k=40)) for _ in range(300))]
    whole = tokenizer.encode_batch(texts)
    monkeypatch.setattr(json_encoder, "_TOGETHER", 5)
    encode = JSONEncoder(path)
    assert max(len(list(encode._parts(text))) for text in texts) > 100
    assert ["".join(encode._parts(text)) for text in texts] == texts
    assert encode(texts) == whole


def changed(**parts):
    tokenizer = BPETokenizer(300)
    tokenizer.prepare(["some text"])
    return json.loads(tokenizer.to_json()) | parts


def test_texts_are_divided_only_where_the_tokenizer_is_known_to_allow_it():
    assert splits_at_spaces(changed())
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    assert splits_at_spaces(changed(pre_tokenizer=level))
    token = {
        "id": 300,
        "content": "a b",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    for parts in (
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": level | {"use_regex": False}},
        {"pre_tokenizer": level | {"add_prefix_space": True}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, level],
            }
        },
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"added_tokens": [token | {"special": False}]},
    ):
        assert not splits_at_spaces(changed(**parts))
        Tokenizer.from_str(json.dumps(changed(**parts)))  # a real one
