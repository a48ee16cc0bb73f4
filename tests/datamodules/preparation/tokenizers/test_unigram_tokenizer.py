import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from datamodules.preparation.tokenizers.library_tokenizer import END_OF_TEXT, byte_alphabet
from datamodules.preparation.tokenizers.unigram_tokenizer import UnigramTokenizer
from tests.support.corpus import TOPICS


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = UnigramTokenizer(1000)
    tokenizer.prepare(TOPICS)
    return tokenizer


def pieces_of(tokenizer):
    return dict(json.loads(tokenizer)["model"]["vocab"])


def best(word, scores):
    """The highest score of a segmentation of a word into pieces."""
    known = [0.0] + [-1e30] * len(word)
    for end in range(1, len(word) + 1):
        for start in range(max(0, end - 16), end):
            if word[start:end] in scores:
                known[end] = max(known[end], known[start] + scores[word[start:end]])
    return known[-1]


def test_segmentations_are_the_most_likely_ones(tokenizer):
    scores = pieces_of(tokenizer.to_json())
    stored = Tokenizer.from_str(tokenizer.to_json())
    for text in [*TOPICS[:10], "unseen wordings, naïve 中文 🙂 <|endoftext|>"]:
        expected = sum(best(word, scores) for word, _ in stored.pre_tokenizer.pre_tokenize_str(text))
        ids = tokenizer.encode_batch([text])[0]
        assert sum(scores[stored.id_to_token(id)] for id in ids) == pytest.approx(expected, abs=1e-6)


def test_pieces_and_scores_are_those_of_the_library(tokenizer):
    reference = Tokenizer(models.Unigram())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=1000, special_tokens=[END_OF_TEXT], initial_alphabet=byte_alphabet(), show_progress=False
    )
    reference.train_from_iterator(TOPICS, trainer)
    theirs, ours = pieces_of(reference.to_str()), pieces_of(tokenizer.to_json())
    assert ours.keys() == theirs.keys()
    for piece, score in ours.items():
        if piece != END_OF_TEXT:
            assert score == pytest.approx(theirs[piece], abs=0.0006 if len(piece) > 1 else 0.027), piece


def test_the_likeliest_pieces_come_first(tokenizer):
    scores = list(pieces_of(tokenizer.to_json()).values())[1:]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > -5
