"""Ids against those of the sentencepiece package, on models that it trains here."""

import importlib.util
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError
from datamodules.preparation.pretrained_tokenizer import PretrainedTokenizer
from tests.datamodules.preparation.topics import TOPICS

DOCUMENTS = TOPICS[:40]
HARD = ["", " ", "naïve Ünïcode 中文 שלום", "👩‍👩‍👧 🙂🙂", "e\u0301 é ﬁne ①② \uff15\uff16", "<s>a</s> <0x41> <unk>", "</s>", "<0x0A>",
        "x<sep>y <sep><sep>", "<sep></s> <sep><unk><sep>", "<sep>hi", "  lead  and trail  ", "a\tb\r\nc\n\n", "a\n  b  \n",
        "▁x ▁", "한국어 각", "q\u0323\u0307", "~\uff5e \u3000x\u00a0y\u200b z", "a" * 60, "\n"]  # fmt: skip
COMMON = {"minloglevel": 2, "num_threads": 1, "vocab_size": 700}
LOSSLESS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
MODELS = {
    "bpe": {"model_type": "bpe", **LOSSLESS},
    "bpe-no-prefix": {"model_type": "bpe", **LOSSLESS, "add_dummy_prefix": False},
    "bpe-stripped": {"model_type": "bpe", "user_defined_symbols": ["<sep>", "::"]},
    "unigram": {"model_type": "unigram", **LOSSLESS},
    "unigram-stripped": {"model_type": "unigram", "user_defined_symbols": ["<sep>", "::"]},
    "unigram-names": {"model_type": "unigram", "eos_piece": "[END]", "normalization_rule_name": "nfkc"},
}


def trained(path, **options):
    lines = [line for text in DOCUMENTS for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(path), **COMMON | options
    )
    return Path(f"{path}.model")


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """Our tokenizer and sentencepiece's, of the same file."""
    path = trained(tmp_path_factory.mktemp("model") / request.param, **MODELS[request.param])
    return (
        PretrainedTokenizer(str(path)),
        sentencepiece.SentencePieceProcessor(model_file=str(path)),
        request.param,
    )


def check(pair, text):
    """Ids are equal, or, in a Unigram model, equally likely in single precision."""
    ours, theirs, name = pair
    (ids,), expected = ours.encode_batch([text]), theirs.encode(text)
    if ids == expected:
        return 0
    assert "unigram" in name, (text, theirs.id_to_piece(ids), theirs.id_to_piece(expected))
    scores = [sum(map(theirs.get_score, found)) for found in (ids, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3), (text, theirs.id_to_piece(ids))
    assert "".join(theirs.id_to_piece(ids)) == "".join(theirs.id_to_piece(expected))
    return 1


def test_ids_are_sentencepieces(pair):
    others = [
        check(pair, text) for text in (*HARD, *(line for text in DOCUMENTS for line in text.splitlines()))
    ]
    assert sum(others) <= 0.01 * len(others)
    for text in DOCUMENTS:
        check(pair, text)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(
        alphabet=st.one_of(st.sampled_from(" aeto<s>/_:.\n"), st.characters(categories=["L", "P", "Nd", "S"]))
    )
)
def test_ids_of_any_text_are_sentencepieces(pair, text):
    check(pair, text)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_text_comes_back_exactly_where_the_model_keeps_it(pair, text):
    ours, _, name = pair
    if name in ("bpe", "bpe-no-prefix", "unigram"):
        assert ours.decode(ours.encode_batch([text])[0]) == text


def test_decoding_is_sentencepieces(pair):
    ours, theirs, _ = pair
    for text in DOCUMENTS[:10]:
        assert ours.decode(theirs.encode(text)).replace("<unk>", " ⁇ ") == theirs.decode(theirs.encode(text))


def test_sizes_and_special_tokens_are_the_models(pair):
    ours, theirs, name = pair
    assert ours.vocab_size == theirs.vocab_size() == 700
    assert ours.end_of_text_id == theirs.eos_id()
    assert ours.decode([ours.end_of_text_id]) == ("[END]" if name == "unigram-names" else "</s>")
    text = f"a {ours.decode([ours.end_of_text_id])} b"
    assert ours.end_of_text_id not in ours.encode_batch([text])[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model_type": "char", "vocab_size": 60, "hard_vocab_limit": False}, "words or characters"),
        ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path, options, told):
    with pytest.raises(ConfigError, match=told):
        PretrainedTokenizer(str(trained(tmp_path / "m", **options)))


def test_damaged_files_are_refused_or_read(tmp_path):
    content = trained(tmp_path / "m", model_type="bpe").read_bytes()
    damaged = tmp_path / "damaged.model"
    complaints = []
    for number in range(60):
        place = number * len(content) // 60
        flipped = bytes([*content[:place], content[place] ^ 255, *content[place + 1 :]])
        damaged.write_bytes(content[:place] if number % 2 else flipped)
        try:
            PretrainedTokenizer(str(damaged)).encode_batch(["some text"])
        except ConfigError as error:
            complaints.append(str(error))
    assert len(complaints) > 20
    assert all("damaged.model" in complaint for complaint in complaints)


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("mistral_common"), reason="pip install --no-deps mistral-common"
)
def test_ids_of_real_models():
    folder = Path(importlib.util.find_spec("mistral_common").origin).parent / "data"
    files = sorted(folder.glob("*.model*"))
    assert files
    for file in files:
        pair = (
            PretrainedTokenizer(str(file)),
            sentencepiece.SentencePieceProcessor(model_file=str(file)),
            "bpe",
        )
        assert not any(
            check(pair, text) for text in (*HARD, *DOCUMENTS, "[INST] [REF] [REFERENCE_DOC_1]</s>")
        )
