"""What is wrong with a mixture is said; the rest the conformance kit and tests/datamodules/packing hold."""

import json

import pytest
from tokenizers import Tokenizer, models

from core.errors import ConfigError
from datamodules.mixture_datamodule import MixtureDataModule
from datamodules.packing.best_fit import BestFit
from datamodules.packing.concatenate import Concatenate
from datamodules.preparation.writers.token_shards import TokenShards


@pytest.fixture
def folder(tmp_path):
    def make(name, vocabulary=("a", "b"), documents=20, end=0):
        root = tmp_path / name
        for split in ("train", "validation"):
            TokenShards().write([[1, 1, 0]] * documents, root / split, 2)
        tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(vocabulary)}, []))
        (root / "tokenizer.json").write_text(tokenizer.to_str())
        manifest = {
            "vocab_size": 2,
            "train_tokens": 3 * documents,
            "unigram_loss": 1.0,
            "end_of_text_id": end,
        }
        (root / "manifest.json").write_text(json.dumps(manifest))
        return str(root)

    return make


def build(sources, weights=None, **options):
    options = {"packing": Concatenate(), "sequence_length": 5, "batch_size": 2} | options
    return MixtureDataModule(sources, weights or dict.fromkeys(sources, 1.0), **options)


@pytest.mark.parametrize("packing", [Concatenate(), BestFit()])
def test_validation_takes_every_source_whole(folder, packing):
    data = build({"one": folder("one"), "two": folder("two", documents=7)}, packing=packing)
    data.setup()
    loader = data.val_dataloader()
    found = list(loader)
    labels = sum(int((batch["labels"] != -100).sum()) for batch in found)
    assert len(found) == len(loader)
    # every token but each source's first is a label; in packed documents every one but each document's first
    assert labels == ((20 + 7) * 3 - 2 if isinstance(packing, Concatenate) else (20 + 7) * 2)


def test_what_is_not_prepared_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data.sources.one: .* is no prepared folder"):
        build({"one": str(tmp_path)})


def test_different_tokenizers_are_refused(folder):
    data = build({"one": folder("one"), "two": folder("two", vocabulary=("b", "a"))})
    with pytest.raises(ConfigError, match="written by different tokenizers"):
        data.setup()


def test_different_ends_of_documents_are_refused(folder):
    data = build({"one": folder("one"), "two": folder("two", end=1)})
    with pytest.raises(ConfigError, match="written by different tokenizers"):
        data.setup()


def test_no_sources_are_refused():
    with pytest.raises(ConfigError, match=r"data.sources is empty"):
        build({})


def test_a_missing_weight_is_refused(folder):
    data = build({"one": folder("one"), "two": folder("two")}, {"one": 1.0})
    data.setup()
    with pytest.raises(ConfigError, match="needs a weight for each source"):
        data.train_dataloader()
