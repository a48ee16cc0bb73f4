"""What is held out for `test`: other documents than training and validation have, and only where it is asked for."""

import json
from itertools import chain

import numpy as np
import pytest

from core.errors import ConfigError
from core.pretrain_datamodule import PretrainDataModule
from datamodules.mixture_datamodule import MixtureDataModule
from datamodules.packing.concatenate import Concatenate
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.split import chosen_split
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.commands.inspect_data import inspect_data
from plugins.commands.verify_data import verify_data
from tests.support.corpus import contents, corpus, documents_of, preparation, prepare, texts

SHARES = {"validation_fraction": 0.2, "test_fraction": 0.1}


def sides(split, documents):
    found = [[], [], []]
    for text in documents:
        for side, part in split.parts(text):
            found[side].append(part)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("split")
    return prepare(corpus(base / "in"), base / "out", transforms=[], **SHARES)


def test_what_is_validated_on_does_not_change_and_each_document_is_in_one_split():
    documents = texts(1000)
    without = sides(chosen_split(documents, 0.2, "x"), documents)
    train, validation, test = sides(chosen_split(documents, 0.2, "x", 0.1), documents)
    assert validation == without[1]
    assert sorted(train + test) == sorted(without[0])
    # the standard deviation of a binomial share of a tenth of 1,000 documents is 1%
    assert len(test) / 1000 == pytest.approx(0.1, abs=0.04)


def test_a_long_document_has_three_parts_in_their_order():
    text = "\n".join(texts(300))
    [(_, head), (_, middle), (_, tail)] = parts = chosen_split([text], 0.2, "x", 0.1).parts(text)
    assert [side for side, _ in parts] == [0, 1, 2]
    assert head + middle + tail == text
    assert len(middle) / len(text) == pytest.approx(0.2, rel=0.3)
    assert len(tail) / len(text) == pytest.approx(0.1, rel=0.3)


@pytest.mark.parametrize("shares", [(0.001, 0.001), (0.5, 0.4), (0.001, 0.9)])
def test_three_documents_fill_three_splits(shares):
    documents = ["one", "two", "three"]
    assert [len(found) for found in sides(chosen_split(documents, shares[0], "x", shares[1]), documents)] == [
        1,
        1,
        1,
    ]


def test_two_documents_are_too_few():
    with pytest.raises(ConfigError, match="2 different documents: training, validation and test"):
        chosen_split(["one", "two", "two"], 0.1, "x", 0.1)


def test_the_folder_has_it_whoever_does_the_tasks(tmp_path, monkeypatch, folder, capsys):
    monkeypatch.setattr(source_files, "LEAST", 700)
    source = corpus(tmp_path / "in")
    one, two = (
        prepare(source, tmp_path / str(n), transforms=[], engine=engine, **SHARES)
        for n, engine in enumerate((None, LocalEngine(2)))
    )
    assert contents(one) == contents(two)
    found = {split: documents_of(folder, split) for split in ("train", "validation", "test")}
    assert sorted(chain.from_iterable(found.values())) == sorted(texts(120))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {split: manifest[f"{split}_documents"] for split in found} == {k: len(v) for k, v in found.items()}
    assert f"| test | {len(found['test'])} |" in (folder / "report.md").read_text()
    assert verify_data([str(folder)]) == 0
    assert inspect_data([str(folder), "--split", "test"]) == 0
    assert "row 0 of batch 0, test" in capsys.readouterr().out


def test_a_damaged_test_split_is_found(tmp_path):
    folder = prepare(corpus(tmp_path / "in"), tmp_path / "out", transforms=[], **SHARES)
    chunk = min((folder / "test").glob("*.bin"))
    content = bytearray(chunk.read_bytes())
    content[-1] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(ConfigError, match=r"test.*its content has changed"):
        verify_data([str(folder)])


def tokens_of(loader):
    rows = [batch["labels"].numpy() for batch in loader]
    ids = np.concatenate([row[row >= 0] for row in rows])
    return sorted(ids.tolist())


@pytest.mark.parametrize("where", ["here", "remote"])
def test_test_reads_the_test_split(tmp_path, folder, where):
    source = str(folder) if where == "here" else f"local:{folder}"
    data = PretrainDataModule(
        TextDocuments,
        BPETokenizer(),
        TokenShards(),
        Concatenate(),
        source,
        str(tmp_path),
        sequence_length=16,
        batch_size=2,
    )
    data.setup()
    assert data.test_split == "test"
    held_out = tokens_of(data.test_dataloader())
    expected = TokenShards.open(folder / "test")
    assert held_out == sorted(expected.read(1, len(expected)).tolist())  # nothing predicts the first
    assert held_out != tokens_of(data.val_dataloader())


def test_without_one_test_reads_the_validation_split_and_mixtures_need_it_of_all(tmp_path, folder):
    tokenizer = PretrainedTokenizer(str(folder / "tokenizer.json"))
    other = prepare(corpus(tmp_path / "in"), tmp_path / "out", tokenizer=tokenizer)
    assert not (other / "test").exists()
    with pytest.raises(ConfigError, match=r"--split is test; .* has train and validation"):
        inspect_data([str(other), "--split", "test"])
    for second, expected in {other: "validation", folder: "test"}.items():
        data = MixtureDataModule({"a": str(folder), "b": str(second)}, {"a": 1, "b": 1}, Concatenate(), 16, 2)
        data.setup()
        assert data.test_split == expected
        assert tokens_of(data.test_dataloader())


def test_the_plan_of_data_without_it_is_what_it_was(tmp_path):
    source = corpus(tmp_path / "in")
    assert "test_fraction" not in preparation(source).options()
    assert preparation(source, **SHARES).options()["test_fraction"] == 0.1


@pytest.mark.parametrize("share", [-0.1, 0.8, float("nan")])
def test_shares_out_of_range_are_refused(tmp_path, share):
    parts = JSONLinesDocuments, BPETokenizer(), TokenShards(), Concatenate()
    with pytest.raises(
        ConfigError,
        match=r"data\.test_fraction is .*; it is at least 0, and below 1 - data\.validation_fraction = 0\.8",
    ):
        PretrainDataModule(*parts, str(tmp_path), validation_fraction=0.2, test_fraction=share)
