"""Ids against those of the tiktoken package, with ranks that are trained here."""

import random
from pydoc_data.topics import topics

import pytest
import tiktoken

from core.errors import ConfigError
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.preparation.tokenizers.tiktoken_ranks import PATTERNS
from tests.support.ranks import ranks_of, write_ranks

PAGES = list(topics.values())[:12]
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
"""tiktoken's own pattern of cl100k_base, which it writes in another way; of the others it has ours."""

HARD = ["", " ", "naïve Ünïcode 中文", "👩‍👩‍👧", "don't I'LL we'\u017f", "a\r\n\r\n  b \n", "12345 ١٢٣", "<|endoftext|> <|im_end|>", "\n" * 40, "  x  ",
        "e\u0301", "HTTPServer isn't /a/b/", "ǅ ʰx", "a" * 60, "\t\t\u3000\x85x"]  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    """Token -> rank: bytes, then merges in the order in which BPE found them."""
    trained = BPETokenizer(900)
    trained.prepare(PAGES)
    return ranks_of(trained)


def written(folder, name, ranks):
    return write_ranks(folder / name, ranks)


def texts():
    draw = random.Random(0)
    blocks = [range(32, 127), range(9, 14), range(0x250), range(0x300, 0x370), range(0x600, 0x700), range(0x1E00, 0x2100),
              range(0x4E00, 0x4E20), range(0x1F300, 0x1F340)]  # fmt: skip
    drawn = [
        "".join(chr(draw.choice(draw.choice(blocks))) for _ in range(draw.randint(1, 60))) for _ in range(800)
    ]
    return [*PAGES, *HARD, *drawn]


@pytest.mark.parametrize("name", PATTERNS)
def test_ids_are_tiktokens(name, ranks, tmp_path):
    ours = PretrainedTokenizer(str(written(tmp_path, "x.tiktoken", ranks)), pattern=name)
    pattern = CL100K if name == "cl100k_base" else PATTERNS[name]
    theirs = tiktoken.Encoding(
        "x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
    )
    for text, ids in zip(texts(), ours.encode_batch(texts()), strict=True):
        assert ids == theirs.encode_ordinary(text), text
        assert ours.decode(ids) == text
    assert (ours.vocab_size, ours.end_of_text_id) == (theirs.n_vocab, theirs.eot_token)


def test_any_ranks_are_merged_as_tiktoken_merges_them(tmp_path):
    """Tokens that no training gives: several pairs of tokens make the same one."""
    draw = random.Random(1)
    words = sorted({"".join(draw.choices("abc", k=draw.randint(2, 5))).encode() for _ in range(90)})
    draw.shuffle(words)
    ranks = {bytes([byte]): byte for byte in range(256)} | {word: 256 + n for n, word in enumerate(words)}
    ours = PretrainedTokenizer(str(written(tmp_path, "r50k_base.tiktoken", ranks)), pattern="r50k_base")
    theirs = tiktoken.Encoding("x", pat_str=PATTERNS["r50k_base"], mergeable_ranks=ranks, special_tokens={})
    found = ["".join(draw.choices("abc", k=draw.randint(6, 30))) for _ in range(2000)]
    assert ours.encode_batch(found) == [theirs.encode_ordinary(text) for text in found]


def test_special_tokens_are_those_of_the_encoding_and_read_in_texts_only_if_asked(ranks, tmp_path):
    path = str(written(tmp_path, "cl100k_base.tiktoken", ranks))
    special = {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|endofprompt|>": 100276}
    theirs = tiktoken.Encoding("x", pat_str=CL100K, mergeable_ranks=ranks, special_tokens=special)
    text = "a<|fim_prefix|> b<|endoftext|>"
    for asked in (False, True):
        ours = PretrainedTokenizer(path, special_tokens_in_text=asked)
        (ids,) = ours.encode_batch([text])
        assert ids == theirs.encode(text, allowed_special="all" if asked else set(), disallowed_special=())
        assert (ours.vocab_size, ours.end_of_text_id) == (100277, 100257)
        assert ours.decode(ids) == text


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (b"", {}, "SentencePiece"),
        (b"YQ== 0\nYg== 1\n", {"pattern": "r50k_base"}, "the byte 0 has no rank"),
        (b"YQ== 0\nYQ== 1\n", {"pattern": "r50k_base"}, "occurs twice"),
        (b"YQ== 0\n!! 1\n", {"pattern": "r50k_base"}, "line 2 is no token"),
        (b"YQ== 0\n", {}, "does not say how texts are cut"),
        (None, {"pattern": "("}, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(content, options, said, ranks, tmp_path):
    path = written(tmp_path, "own.tiktoken", ranks)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        PretrainedTokenizer(str(path), **options)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
