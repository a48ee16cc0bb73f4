"""WordPiece with [UNK] as BERT has it, Unigram with byte fallback and <unk> as SentencePiece has them."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import Tokenizer
from transformers.models.bert_japanese.tokenization_bert_japanese import BasicTokenizer, WordpieceTokenizer

from core.errors import ConfigError
from datamodules.preparation.tokenizers.unigram_tokenizer import UnigramTokenizer
from datamodules.preparation.tokenizers.word_piece_tokenizer import WordPieceTokenizer
from tests.support.corpus import TOPICS

TEXTS = [*TOPICS, *["Der Bär über die Straße, naïve façade. " * 20] * 3]
ODD = ["", "Über-naïve Ünïcode 中文 שלום", "a\tb\r\nc\x00d\ufeffe", "👩‍👩‍👧 🙂🙂 <0x41> <unk>[UNK] ##a ▁", "x" * 101 + " y", "ﬁne ① é e\u0301",
       "<|endoftext|> [MASK]", " two  spaces ", "\n\n\n"]  # fmt: skip


def trained(kind, *arguments):
    tokenizer = kind(*arguments)
    tokenizer.prepare(iter(TEXTS))
    assert tokenizer.vocab_size == arguments[0]
    return tokenizer


# WordPiece ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["cased", "uncased"])
def bert(request):
    ours = trained(WordPieceTokenizer, 1500, ["[MASK]"], "unk", request.param)
    stored = Tokenizer.from_str(ours.to_json())
    cut = BasicTokenizer(do_lower_case=request.param, never_split=[])
    split = WordpieceTokenizer(stored.get_vocab(), unk_token="[UNK]", max_input_chars_per_word=100)
    return ours, lambda text: [
        stored.token_to_id(p) for word in cut.tokenize(text) for p in split.tokenize(word)
    ]


def test_ids_are_those_of_transformers_bert_in_python(bert):
    ours, theirs = bert
    for text in [*TEXTS[:100], *ODD]:
        assert ours.encode_batch([text])[0] == theirs(text), text


@settings(max_examples=200, deadline=None)
@given(st.text(st.one_of(st.characters(max_codepoint=0x24F), st.sampled_from(" \n,.#[]中é")), max_size=60))
def test_ids_of_any_text_are_those_of_transformers_bert_in_python(bert, text):
    ours, theirs = bert
    text = (
        text.replace("\x85", "")
        .replace("\x1c", "")
        .replace("\x1d", "")
        .replace("\x1e", "")
        .replace("\x1f", "")
    )
    assert ours.encode_batch([text])[0] == theirs(text)


def test_what_bert_loses_and_keeps(bert):
    ours, _ = bert
    assert [Tokenizer.from_str(ours.to_json()).id_to_token(n) for n in range(3)] == [
        "<|endoftext|>",
        "[UNK]",
        "[MASK]",
    ]
    said = ours.decode(ours.encode_batch(["The  Naïve\nstatement, 中"])[0])
    assert said == ("the naive statement, [UNK]" if ours.lower_case else "The Naïve statement, [UNK]")
    ids = ours.encode_batch(["[UNK] [MASK] <|endoftext|>"])[0]
    assert not {0, 2} & set(ids)  # what a text spells is text; [UNK] may be a character that is not known


# Unigram ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["byte_fallback", "unk"])
def unigram(request):
    return trained(UnigramTokenizer, 1200, ["[MASK]"], request.param)


def as_sentencepiece(ours):
    """The same pieces and scores as a model of SentencePiece."""
    fallback = ours.unknown == "byte_fallback"
    state = json.loads(ours.to_json())["model"]["vocab"]
    kinds = {"<unk>": 2, "<|endoftext|>": 3, "[MASK]": 3}
    found = proto.ModelProto()
    for piece, score in state:
        kind = kinds.get(piece, 6 if fallback and piece.startswith("<0x") else 1)
        found.pieces.add(piece=piece, score=score, type=kind)
    found.trainer_spec.model_type = 1
    found.trainer_spec.byte_fallback = fallback
    found.trainer_spec.unk_id = 1
    found.normalizer_spec.add_dummy_prefix = False
    found.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=found.SerializeToString())


def test_ids_are_those_of_sentencepiece(unigram):
    """But for segmentations of equal likelihood, which rounding decides there."""
    theirs = as_sentencepiece(unigram)
    scores = [theirs.get_score(n) for n in range(theirs.get_piece_size())]
    words = [word for text in TEXTS for word in text.split(" ")]
    draw = random.Random(0)
    short = [" ".join(draw.sample(words, 6)) for _ in range(2000)]
    same = 0
    for text in [*short, *ODD]:
        ours, reference = unigram.encode_batch([text])[0], theirs.encode(text)
        same += ours == reference
        if ours != reference:
            assert sum(scores[n] for n in ours) == pytest.approx(
                sum(scores[n] for n in reference), abs=1e-3
            ), text
    assert same > 0.97 * len(short)


@pytest.mark.ci
def test_byte_fallback_loses_nothing_but_one_character():
    tokenizer = trained(UnigramTokenizer, 1200, [], "byte_fallback")
    draw = np.random.default_rng(0)
    for text in [*TEXTS, *ODD, *("".join(map(chr, draw.integers(0, 0xD7FF, 40))) for _ in range(300))]:
        assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text.replace("▁", " ")
    assert tokenizer.encode_batch(["<0x41>"])[0] != tokenizer.encode_batch(["A"])[0]


def test_without_fallback_unknown_characters_are_lost():
    tokenizer = trained(UnigramTokenizer, 600, [], "unk")
    assert tokenizer.decode(tokenizer.encode_batch(["a 中文字 b\U0001f642c"])[0]) == "a <unk> b<unk>c"
    for text in TOPICS[:20]:
        if text.isascii() and "\t" not in text:
            assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


@pytest.mark.ci
def test_pieces_are_characters_and_the_rare_ones_have_none():
    texts = [*TOPICS, "ж" * 2 + "中"]
    tokenizer = UnigramTokenizer(700, [], "unk")
    tokenizer.prepare(texts)
    pieces = Tokenizer.from_str(tokenizer.to_json()).get_vocab()
    assert not any("ж" in piece or "中" in piece for piece in pieces)
    assert any(piece.startswith("▁") and len(piece) > 3 for piece in pieces)
    assert not any("▁" in piece[1:] for piece in pieces)


# Both ---------------------------------------------------------------------------------------------------

DIGEST = """
import hashlib
from datamodules.preparation.tokenizers.unigram_tokenizer import UnigramTokenizer
from datamodules.preparation.tokenizers.word_piece_tokenizer import WordPieceTokenizer
from pydoc_data.topics import topics
for tokenizer in (WordPieceTokenizer(1500, [], "unk"), UnigramTokenizer(900, [], "byte_fallback")):
    tokenizer.prepare(list(topics.values())[:60])
    print(hashlib.sha256(tokenizer.to_json().encode()).hexdigest())
"""


@pytest.mark.ci
def test_the_same_documents_give_the_same_tokenizer_in_every_process():
    root = Path(__file__).parents[4]
    said = {subprocess.check_output([sys.executable, "-c", DIGEST], cwd=root) for _ in range(2)}
    assert len(said) == 1


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: WordPieceTokenizer(lower_case=True), "lower_case .* Add unknown: unk"),
        (
            lambda: UnigramTokenizer(353, unknown="byte_fallback"),
            "256 bytes and ASCII and 1 special tokens take 354",
        ),
        (lambda: UnigramTokenizer(97, unknown="unk"), "tokens take 98"),
        (lambda: WordPieceTokenizer(unknown="unk", special_tokens=["[UNK]"]), "one twice"),
    ],
)
def test_options_that_do_not_fit_are_refused(build, said):
    with pytest.raises(ConfigError, match=said):
        build()


def test_fingerprints_of_earlier_configs_are_what_they_were():
    assert WordPieceTokenizer(600).fingerprint() == {"vocab_size": 600}
    assert UnigramTokenizer(600).fingerprint() == {"vocab_size": 600}
    assert (
        UnigramTokenizer(600, unknown="unk").fingerprint() != UnigramTokenizer(600, ["<unk>"]).fingerprint()
    )
