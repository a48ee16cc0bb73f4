import json
import os
import shutil
from pydoc_data.topics import topics

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GPT2Tokenizer

from core.errors import ConfigError
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.preparation.tokenizers.unigram_tokenizer import UnigramTokenizer

TEXTS = [*list(topics.values())[:20], "naïve 中文 🙂 <|endoftext|> </s>  \n\n\tx", ""]


@pytest.fixture(scope="module")
def bpe():
    tokenizer = BPETokenizer(600)
    tokenizer.prepare(TEXTS)
    return tokenizer


@pytest.fixture
def written(tmp_path, bpe):
    """A tokenizer.json."""
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.to_json(), encoding="utf-8")
    return path


@pytest.fixture
def gpt2(tmp_path, bpe):
    """A folder with vocab.json and merges.txt."""
    model = json.loads(bpe.to_json())["model"]
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    return folder


def test_a_tokenizer_json_gives_its_ids(written, bpe):
    loaded = PretrainedTokenizer(str(written))
    loaded.prepare(iter(()))
    assert loaded.encode_batch(TEXTS) == bpe.encode_batch(TEXTS)
    assert [loaded.decode(ids) for ids in loaded.encode_batch(TEXTS)] == TEXTS
    assert (loaded.vocab_size, loaded.end_of_text_id) == (600, 0)
    assert Tokenizer.from_str(loaded.to_json()).encode(TEXTS[0]).ids == bpe.encode_batch(TEXTS[:1])[0]


@pytest.mark.parametrize("name", ["", "vocab.json", "merges.txt"])
def test_gpt2_files_give_the_ids_of_transformers(gpt2, name):
    loaded = PretrainedTokenizer(str(gpt2 / name))
    reference = GPT2Tokenizer(vocab=str(gpt2 / "vocab.json"), merges=str(gpt2 / "merges.txt"))
    for text in TEXTS:
        plain = text.replace("<|endoftext|>", "")  # which transformers reads as the control token
        assert loaded.encode_batch([plain])[0] == reference.encode(plain)
    assert [loaded.decode(ids) for ids in loaded.encode_batch(TEXTS)] == TEXTS
    assert loaded.end_of_text_id == 0


def test_openais_names_of_these_files_are_known(gpt2, tmp_path):
    (gpt2 / "vocab.json").rename(gpt2 / "encoder.json")
    (gpt2 / "merges.txt").rename(gpt2 / "vocab.bpe")
    assert PretrainedTokenizer(str(gpt2)).encode_batch(["the end"]) == PretrainedTokenizer(
        str(gpt2 / "vocab.bpe")
    ).encode_batch(["the end"])


def test_nothing_is_cut_off_filled_up_or_added(written, bpe):
    tokenizer = Tokenizer.from_file(str(written))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=4000)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(written))
    for loaded in (PretrainedTokenizer(str(written)), PretrainedTokenizer(str(written), None, False)):
        assert loaded.encode_batch(TEXTS) == bpe.encode_batch(TEXTS)
    stored = Tokenizer.from_str(loaded.to_json())  # of add_special_tokens=False
    assert stored.encode(TEXTS[0]).ids == bpe.encode_batch(TEXTS[:1])[0]


def test_tokens_that_are_added_count_and_only_the_special_ones_are_no_text(written):
    tokenizer = Tokenizer.from_file(str(written))
    tokenizer.add_special_tokens(["<|user|>"])
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(written))
    loaded = PretrainedTokenizer(str(written), end_of_text="<|user|>")
    assert loaded.vocab_size == 602
    assert loaded.end_of_text_id == 600
    (ids,) = loaded.encode_batch(["<|user|> says <think>"])
    assert ids[-1] == 601
    assert 600 not in ids


def test_a_unigram_models_own_special_pieces_are_no_text(tmp_path):
    vocab = [("<unk>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", 0.0) for byte in range(256))]
    vocab += [(letter, -3.0) for letter in "▁abcs/<>x014"]
    tokenizer = Tokenizer(models.Unigram(vocab, 0, True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = PretrainedTokenizer(str(tmp_path))
    text = "a </s> <unk> <0x41> é"
    assert loaded.decode(loaded.encode_batch([text])[0]) == text
    assert loaded.end_of_text_id == 1
    assert 1 not in loaded.encode_batch([text])[0]


def test_what_would_end_a_document_in_mid_text_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="end a document in mid-text"):
        PretrainedTokenizer(str(tmp_path))


def test_a_config_beside_it_says_what_ends_a_text(written):
    tokenizer = Tokenizer.from_file(str(written))
    tokenizer.add_special_tokens(["<stop>", "<halt>"])
    tokenizer.save(str(written))
    assert PretrainedTokenizer(str(written)).end_of_text_id == 0
    for token, expected in (("<stop>", 600), ({"content": "<halt>", "special": True}, 601), (None, 0)):
        written.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert PretrainedTokenizer(str(written)).end_of_text_id == expected
        assert PretrainedTokenizer(str(written), "<stop>").end_of_text_id == 600


@pytest.mark.parametrize("name", ["<eos>", "</s>", "<|end_of_text|>", "[SEP]"])
def test_common_names_are_found(written, name):
    written.write_text(written.read_text(encoding="utf-8").replace("<|endoftext|>", name), encoding="utf-8")
    assert PretrainedTokenizer(str(written)).end_of_text_id == 0


def test_without_a_known_name_the_user_has_to_say_it(written):
    written.write_text(
        written.read_text(encoding="utf-8").replace("<|endoftext|>", "<fin>"), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"does not say which token ends a text.*\n.*Special ones: <fin>"):
        PretrainedTokenizer(str(written))
    with pytest.raises(ConfigError, match=r"no token '<fim>'. Did you mean <fin>"):
        PretrainedTokenizer(str(written), end_of_text="<fim>")
    assert PretrainedTokenizer(str(written), end_of_text="<fin>").end_of_text_id == 0


def test_the_fingerprint_tells_content_and_end_not_place(written, tmp_path):
    first = PretrainedTokenizer(str(written)).fingerprint()
    (tmp_path / "other").mkdir()
    copy = shutil.copy(written, tmp_path / "other" / "tokenizer.json")
    assert PretrainedTokenizer(str(copy)).fingerprint() == first == json.loads(json.dumps(first))
    tokenizer = Tokenizer.from_file(str(copy))
    tokenizer.add_special_tokens(["<stop>"])
    tokenizer.save(str(copy))
    changed = PretrainedTokenizer(str(copy)).fingerprint()
    assert changed != first
    assert PretrainedTokenizer(str(copy), end_of_text="<stop>").fingerprint() not in (first, changed)


def test_merges_count_too(gpt2):
    first = PretrainedTokenizer(str(gpt2)).fingerprint()
    lines = (gpt2 / "merges.txt").read_text(encoding="utf-8").splitlines()
    (gpt2 / "merges.txt").write_text("\n".join(lines[:-1]), encoding="utf-8")
    assert PretrainedTokenizer(str(gpt2)).fingerprint() != first


def test_a_trained_unigram_survives_the_file(tmp_path):
    tokenizer = UnigramTokenizer(500)
    tokenizer.prepare(TEXTS)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    assert PretrainedTokenizer(str(tmp_path)).encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "cannot be read as a tokenizer"),
        ("tokenizer.json", "{}", "lacks the key 'model'"),
        ("tokenizer.json", "[1]", "lacks the key 'model'"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "cannot be read as a tokenizer"),
        (  # over which the library panics
            "tokenizer.json",
            '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}',
            "cannot be read as a tokenizer",
        ),
        ("tokenizer.json", '{"model": 3}', "cannot be read as a tokenizer"),
        ("x.model", "hello", "SentencePiece model, or a damaged one"),
        ("x.model", "", "SentencePiece model, or a damaged one"),
        ("notes.txt", "some words", "SentencePiece model, or a damaged one"),
        ("merges.txt", "a b", "there is no vocab.json"),
        ("vocab.json", "{}", "there is no merges.txt"),
    ],
)
def test_files_that_are_no_tokenizer_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        PretrainedTokenizer(str(tmp_path / name))
    assert name in str(error.value)
    assert len(str(error.value).splitlines()) <= 4


@pytest.mark.parametrize("name", ["tokenizer.json", "x.model", "vocab.json"])
def test_a_file_that_claims_to_be_huge_is_not_read(tmp_path, name):
    (tmp_path / "merges.txt").touch()
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="more than 256 MiB"):
        PretrainedTokenizer(str(tmp_path / name))


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "{}", "[]", '{"eos_token": 3}', '{"eos_token": ["a"]}', None]
)
def test_an_odd_config_beside_it_says_nothing(written, content):
    written.write_text(
        written.read_text(encoding="utf-8").replace("<|endoftext|>", "<fin>"), encoding="utf-8"
    )
    config = written.with_name("tokenizer_config.json")
    if content is None:
        os.mkfifo(config)
    else:
        config.write_text(content)
    with pytest.raises(ConfigError, match="does not say which token ends a text"):
        PretrainedTokenizer(str(written))


@pytest.mark.parametrize("merges", ["a", "a b c", "q zz"])
def test_damaged_merges_are_named(gpt2, merges):
    (gpt2 / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        PretrainedTokenizer(str(gpt2))


def test_paths_that_lead_nowhere(tmp_path, written):
    with pytest.raises(
        ConfigError, match=r"no file or folder .*tokeniser.json. Did you mean tokenizer.json\?"
    ):
        PretrainedTokenizer(str(tmp_path / "tokeniser.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        PretrainedTokenizer(str(tmp_path / "empty"))


def test_a_folder_may_hold_a_sentencepiece_model_of_any_name(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[0].splitlines()),
        model_prefix=str(tmp_path / "mine"),
        vocab_size=120,
        minloglevel=2,
    )
    assert PretrainedTokenizer(str(tmp_path)).vocab_size == 120
