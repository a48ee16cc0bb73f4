import json

from tokenizers import Tokenizer

from datamodules.preparation.tokenizers.word_piece_tokenizer import CONTINUES, WordPieceTokenizer
from tests.support.corpus import TOPICS


def longest_first(word, vocabulary):
    """The ids of a word: the longest piece that begins it, then the longest that goes on, and so forth."""
    ids, start = [], 0
    while start < len(word):
        prefix = CONTINUES if start else ""
        end = next(end for end in range(len(word), start, -1) if prefix + word[start:end] in vocabulary)
        ids.append(vocabulary[prefix + word[start:end]])
        start = end
    return ids


def test_ids_are_those_of_the_longest_match_first():
    texts = TOPICS[:40]
    tokenizer = WordPieceTokenizer(900)
    tokenizer.prepare(texts)
    vocabulary = json.loads(tokenizer.to_json())["model"]["vocab"]
    cut = Tokenizer.from_str(tokenizer.to_json()).pre_tokenizer
    for text in [*texts[:10], "unseen wordings, naïve 中文 🙂"]:
        expected = [id for word, _ in cut.pre_tokenize_str(text) for id in longest_first(word, vocabulary)]
        assert tokenizer.encode_batch([text])[0] == expected


def test_pieces_at_the_start_of_a_word_and_within_it_are_different_ones():
    tokenizer = WordPieceTokenizer(524)
    tokenizer.prepare(["able table stable unstable cable " * 20])
    stored = Tokenizer.from_str(tokenizer.to_json())
    first, second = tokenizer.encode_batch(["able", "Zable"])
    assert [stored.id_to_token(id) for id in first] != [stored.id_to_token(id) for id in second][1:]
    assert all(stored.id_to_token(id).startswith(CONTINUES) for id in second[1:])
    assert tokenizer.decode(second[1:]) == "able"
