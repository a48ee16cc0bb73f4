"""Text is printed token by token as it would be decoded whole."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from plugins.commands.generate import texts

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
