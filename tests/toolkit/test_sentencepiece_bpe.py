"""SentencePiece's BPE in GGUF files: the ids of sentencepiece itself, of llama.cpp and of the tokenizer before."""

import json

import pytest
import sentencepiece
from tokenizers import Tokenizer
from transformers import LlamaTokenizer

from core.errors import ConfigError
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from plugins.networks.llama import Llama
from tests.support.cli_runs import core  # noqa: F401
from tests.support.corpus import TOPICS
from tests.support.gguf_metadata import file_of
from tests.support.llama_cpp import token_ids
from tests.support.stored_networks import MLP, lively_network, store
from toolkit import sentencepiece_bpe
from toolkit.gguf_tokenizers import from_metadata, names_of_special, to_metadata

LLAMA = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
}
TEXTS = [
    "Two  spaces,\ta tab\r\nand   a line\n\n", " lead", "trail ", "", " ", "▁x ▁", "x" * 60 + " " * 70,
    "naïve Ünïcode 中文 שלום 한국어 각 e\u0301 é ﬁne ①② \uff15", "👩‍👩‍👧 🙂🙂 \u200b\u00a0 q\u0323\u0307", "<s>a</s> <0x41> <unk>",
    *TOPICS[:6],
]  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def trained(request, tmp_path_factory):
    """The model as sentencepiece reads it, and its tokenizer.json with a BOS token in front, as Llama 2 has it."""
    path = tmp_path_factory.mktemp("model") / "m"
    lines = [line for text in TOPICS[:12] for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(path), vocab_size=500, minloglevel=2, num_threads=1,
        add_dummy_prefix=request.param, **LLAMA,
    )  # fmt: skip
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    ours = PretrainedTokenizer(f"{path}.model")
    return sentencepiece.SentencePieceProcessor(model_file=f"{path}.model"), ours._tokenizer.to_str()


def test_ids_are_sentencepieces_after_a_file_and_back(trained, tmp_path):
    theirs, described = trained
    metadata = to_metadata(described, 510, {"eos": 2})
    file = file_of(metadata, tmp_path / "a.gguf")
    assert names_of_special(file) == {"bos": (1, "<s>"), "eos": (2, "</s>"), "unk": (0, "<unk>")}
    back = PretrainedTokenizer(str(tmp_path / "a.gguf"))
    assert (back.end_of_text_id, back.vocab_size) == (2, 500)
    for text in TEXTS:
        assert back.encode_batch([text]) == [theirs.encode(text)]
        assert back.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert Tokenizer.from_str(from_metadata(file)).encode("a b").ids == [1, *theirs.encode("a b")]
    again = to_metadata(from_metadata(file), 510, {"eos": 2})
    assert again == metadata


def test_a_tokenizer_of_transformers_keeps_its_ids(trained, tmp_path):
    """But of texts that begin with a space, in front of which SentencePiece and llama.cpp put another one."""
    theirs, _ = trained
    (tmp_path / "tokenizer.model").write_bytes(theirs.serialized_model_proto())
    before = LlamaTokenizer.from_pretrained(tmp_path)
    described = before.backend_tokenizer.to_str()
    file_of(to_metadata(described, 510, {"eos": 2}), tmp_path / "a.gguf")
    back = PretrainedTokenizer(str(tmp_path / "a.gguf"))
    texts = [text for text in TEXTS if text[:1] not in (" ", "▁", "<")]
    assert back.encode_batch(texts) == [before.encode(text, add_special_tokens=False) for text in texts]


def test_llama_cpp_has_the_same_ids(trained, core, tmp_path):  # noqa: F811
    theirs, described = trained
    arguments = {**MLP, "n_embd": 64, "vocab_size": 510}
    store(lively_network(Llama, arguments), arguments, tmp_path / "a.ckpt", tokenizer=described)
    done = core("export", "--ckpt_path=a.ckpt", "--format=gguf", "--output=a.gguf")
    assert done.code == 0, done.err
    for text, ids in zip(TEXTS, token_ids(tmp_path / "a.gguf", TEXTS), strict=True):
        assert ids == theirs.encode(text), text


def test_runs_of_spaces_are_tokens_as_in_gemma(core, tmp_path):  # noqa: F811
    """Added tokens of SentencePiece's spaces, which are merged before all others; llama.cpp finds them in the text."""
    letters = ["▁", *"abn", "▁a", "ab", "▁ab", "\n"]
    words = [
        "<unk>",
        "<bos>",
        *sentencepiece_bpe.BYTES,
        *letters,
        *("▁" * size for size in range(2, 9)),
        "\n\n",
    ]
    vocabulary = {word: number for number, word in enumerate(words)}
    scores = [(piece, -float(place)) for place, piece in enumerate(letters)]
    parts = sentencepiece_bpe.described(scores, vocabulary, "<unk>", prefix=False)
    runs = sentencepiece_bpe.merges([(word, float(len(word))) for word in words if not word.strip("▁")])
    parts["model"]["merges"] = [*map(list, runs), *parts["model"]["merges"]]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": vocabulary[word], "content": word, **plain, "special": word == "<bos>"} for word in ["<bos>", *words[-8:]]]  # fmt: skip
    described = json.dumps({"version": "1.0", "added_tokens": added, **parts})
    arguments = {**MLP, "n_embd": 64, "vocab_size": len(words)}
    store(lively_network(Llama, arguments), arguments, tmp_path / "a.ckpt", tokenizer=described)
    assert core("export", "--ckpt_path=a.ckpt", "--format=gguf", "--output=a.gguf").code == 0
    texts = ["ab  ab", "   a\n\n\n b" + " " * 5 + "é", "a ab" + " " * 8]
    ids = [Tokenizer.from_str(described).encode(text).ids for text in texts]
    assert vocabulary["▁" * 5] in ids[1]
    assert token_ids(tmp_path / "a.gguf", texts) == ids
    assert PretrainedTokenizer(str(tmp_path / "a.gguf"), end_of_text="<bos>").encode_batch(texts) == ids


def later(described):
    """Takes the first of several merges that make the same piece to the end."""
    merges = described["model"]["merges"]
    made = [first + second for first, second in merges]
    place = next(place for place, piece in enumerate(made) if piece in made[place + 1 :])
    merges.append(merges.pop(place))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["model"]["merges"].pop(), "not those of SentencePiece"),
        (later, "not those of SentencePiece"),
        (lambda t: t["model"]["vocab"].pop("<0x41>"), "no token <0x41>"),
        (lambda t: t.update(normalizer={"type": "NFKC"}), "no form for the NFKC"),
        (lambda t: t.update(normalizer=None), "keeps spaces"),
        (
            lambda t: t["post_processor"]["single"].insert(0, t["post_processor"]["single"][0]),
            "with 2 tokens",
        ),
    ],
    ids=["merge", "order", "byte", "normalizer", "spaces", "beginning"],
)
def test_what_scores_cannot_say_is_refused(trained, change, words):
    found = json.loads(trained[1])
    change(found)
    with pytest.raises(ConfigError, match=words):
        to_metadata(json.dumps(found), 510, {})


def test_a_piece_that_would_take_hours_to_cut_is_refused(trained, tmp_path):
    metadata = to_metadata(trained[1], 510, {"eos": 2})
    place = metadata["tokenizer.ggml.token_type"].index(1)
    metadata["tokenizer.ggml.tokens"][place] = "x" * 5000
    with pytest.raises(ConfigError, match="a token has 5,000 characters"):
        from_metadata(file_of(metadata, tmp_path / "a.gguf"))


def test_a_score_that_is_no_number_is_refused(trained, tmp_path):
    metadata = to_metadata(trained[1], 510, {"eos": 2})
    metadata["tokenizer.ggml.scores"][9] = float("nan")
    with pytest.raises(ConfigError, match="its scores are no list of a number for each token"):
        from_metadata(file_of(metadata, tmp_path / "a.gguf"))
