"""Special tokens: which begin a document, and texts that spell them, on each way from a text to ids."""

import json
import pickle
from itertools import pairwise

import pytest
import sentencepiece
import yaml
from tokenizers import Tokenizer, processors

from core.__main__ import main
from core.errors import ConfigError
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.json_encoder import JSONEncoder
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.preparation.tokenizers.unigram_tokenizer import UnigramTokenizer
from datamodules.preparation.tokenizers.word_piece_tokenizer import WordPieceTokenizer
from tests.conftest import TINY
from tests.support.corpus import TOPICS, prepare, write_lines
from tests.support.ranks import ranks_of, write_ranks
from toolkit.generation.prompts import PromptEncoder

TEXTS = TOPICS[:6]


def sentencepiece_model(folder, kind):
    lines = [line for text in TOPICS[:20] for line in text.splitlines() if line.strip()]
    options = {"minloglevel": 2, "num_threads": 1, "vocab_size": 500, "byte_fallback": True}
    options |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / kind), model_type=kind, **options
    )
    return PretrainedTokenizer(str(folder / f"{kind}.model"))


def trained(kind, size=600):
    tokenizer = kind(size)
    tokenizer.prepare(TEXTS)
    return tokenizer


def with_bos(folder):
    """A tokenizer.json as Llama 3's: a BOS token in front, by the post-processor."""
    tokenizer = Tokenizer.from_str(trained(BPETokenizer).to_json())
    tokenizer.add_special_tokens(["<bos>", "<|user|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <|endoftext|>", special_tokens=[("<bos>", 600), ("<|endoftext|>", 0)]
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return folder / "tokenizer.json"


def gpt2_files(folder):
    model = json.loads(trained(BPETokenizer).to_json())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    return PretrainedTokenizer(str(folder / "vocab.json"))


def ranks_file(folder):
    path = write_ranks(folder / "own.tiktoken", ranks_of(trained(BPETokenizer)))
    return PretrainedTokenizer(str(path), pattern="cl100k_base")


WAYS = {
    "BPE": lambda folder: trained(BPETokenizer),
    "Unigram": lambda folder: trained(UnigramTokenizer),
    "WordPiece": lambda folder: trained(WordPieceTokenizer),
    "tokenizer.json": lambda folder: PretrainedTokenizer(str(with_bos(folder))),
    "vocab.json": gpt2_files,
    "tiktoken": ranks_file,
    "SentencePiece BPE": lambda folder: sentencepiece_model(folder, "bpe"),
    "SentencePiece Unigram": lambda folder: sentencepiece_model(folder, "unigram"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_that_spells_a_special_token_stays_text(way, tmp_path):
    tokenizer = WAYS[way](tmp_path)
    path = tmp_path / "stored.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    encoder = PromptEncoder(tokenizer.to_json())
    special = set(encoder.special.values())
    assert tokenizer.end_of_text_id in special
    # "a" in front: SentencePiece drops a space at the beginning of a decoded text
    texts = [f"a {name}b {name}{name} <{name}> {name}" for name in encoder.special] + ["a plain text"]
    in_worker = pickle.loads(pickle.dumps(tokenizer.encoder() or JSONEncoder(path)))
    found = tokenizer.encode_batch(texts)
    assert found == in_worker(texts)
    assert encoder.encode_prompts(texts) == [[*encoder.leading, *ids] for ids in found]
    for text, ids in zip(texts, found, strict=True):
        assert not special & set(ids)
        assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == text
    if way != "SentencePiece Unigram":  # asked, each is the token; the library does it
        stored = Tokenizer.from_str(tokenizer.to_json())
        for text, ids in zip(texts, encoder.encode_prompts(texts, special_tokens=True), strict=True):
            assert ids == [*encoder.leading, *stored.encode(text, add_special_tokens=False).ids]
            assert bool(special & set(ids[len(encoder.leading) :])) == (text != texts[-1])


def stored_documents(folder):
    stores = [TokenStore(folder / split) for split in ("train", "validation")]
    return sorted(
        store.read(a, b).tolist()
        for store in stores
        for a, b in pairwise([*store.document_starts().tolist(), len(store)])
    )


def test_documents_begin_as_the_post_processor_says_and_end_once(tmp_path):
    path = with_bos(tmp_path)
    texts = [f"number {n} <|user|> <bos> hello <|endoftext|>" for n in range(250)]
    corpus = write_lines(tmp_path / "a.jsonl", texts)
    plain = Tokenizer.from_file(str(path))
    asked = [[600, *plain.encode(text, add_special_tokens=False).ids, 0] for text in texts]
    plain.encode_special_tokens = True
    expected = [[600, *plain.encode(text, add_special_tokens=False).ids, 0] for text in texts]
    cases = {
        "here": ({}, None, expected),
        "bare": ({"add_special_tokens": False}, None, [ids[1:] for ids in expected]),
        "asked in workers": ({"special_tokens_in_text": True}, LocalEngine(1), asked),
    }
    digests = set()
    for name, (options, engine, wanted) in cases.items():
        tokenizer = PretrainedTokenizer(str(path), **options)
        folder = prepare(corpus, tmp_path / name, tokenizer=tokenizer, engine=engine)
        assert stored_documents(folder) == sorted(wanted), name
        digests.add(json.loads((folder / "manifest.json").read_text())["digest"])
        begins = [] if name == "bare" else [600]
        assert PromptEncoder((folder / "tokenizer.json").read_text(encoding="utf-8")).leading == begins
    assert len(digests) == 3  # by what decides the tokens


def test_add_bos_token_of_a_config_counts_where_there_is_no_tokenizer_json(tmp_path):
    tokenizer = sentencepiece_model(tmp_path, "bpe")
    before = tokenizer.fingerprint()
    config = {"add_bos_token": True, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    begun = PretrainedTokenizer(str(tmp_path / "bpe.model"))
    assert begun.encode_batch(["a text"]) == tokenizer.encode_batch(["a text"])
    encoder = PromptEncoder(begun.to_json())
    assert encoder.leading == [encoder.special["<s>"]] == begun.fingerprint()["leading"]
    assert PretrainedTokenizer(str(tmp_path / "bpe.model"), None, False).fingerprint() == before
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<nothing>"}))
    with pytest.raises(ConfigError, match="'<nothing>', which is none of its tokens"):
        PretrainedTokenizer(str(tmp_path / "bpe.model"))


def test_special_tokens_in_texts_are_refused_where_they_are_not_known(tmp_path):
    sentencepiece_model(tmp_path, "unigram")
    with pytest.raises(ConfigError, match="special_tokens_in_text is not known"):
        PretrainedTokenizer(str(tmp_path / "unigram.model"), special_tokens_in_text=True)


def test_a_vocabulary_that_is_not_that_of_the_data_is_refused_with_three_numbers(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = prepare(write_lines(tmp_path / "a.jsonl", TOPICS[:12]), tmp_path / "prepared")  # 300 ids
    with_bos(tmp_path)
    data = {
        "source": str(folder),
        "reader": "TextDocuments",
        "writer": "TokenShards",
        "packing": "Concatenate",
    }
    data["tokenizer"] = {"class_path": "PretrainedTokenizer", "init_args": {"path": "tokenizer.json"}}
    config = TINY | {
        "data": {"class_path": "PretrainDataModule", "init_args": {**data, "sequence_length": 8}}
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
    assert main(["check", "--config", "a.yaml", "--model.network.vocab_size=640"]) == 2
    said = capsys.readouterr().err
    assert "300 token ids in the data" in said
    assert "602 in the tokenizer" in said
    assert "vocab_size is 640" in said
    assert len(said.splitlines()) <= 10
    fits = f"--data.tokenizer.path={folder / 'tokenizer.json'}"
    assert main(["check", "--config", "a.yaml", "--model.network.vocab_size=640", fits]) == 0
