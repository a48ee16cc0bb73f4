"""Filling in the middle: the parts put back in order are the document, on every rank and after every resume."""

import re
from itertools import islice

import numpy as np
import pytest
import torch

from core.errors import ConfigError
from core.pretrain_datamodule import PretrainDataModule
from datamodules.packing.best_fit import BestFit
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.fill_in_the_middle import FillInTheMiddle, Sentinels, rearranged
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.corpus import corpus

MARKS = Sentinels(prefix=1, suffix=2, middle=3, end_of_text=0)
IDS = {"prefix": 1, "suffix": 2, "middle": 3, "end_of_text": 0}


def restored(tokens):
    """Returns a rearranged document in its order, and whether its suffix came first."""
    tokens = list(tokens)
    ending = [0] if tokens[-1] == 0 else []
    tokens = tokens[: len(tokens) - len(ending)]
    assert tokens[0] == 1
    assert [tokens.count(mark) for mark in (1, 2, 3)] == [1, 1, 1]
    suffix, middle = tokens.index(2), tokens.index(3)
    if suffix == 1:  # PRE SUF suffix MID prefix middle
        return tokens[middle + 1 :] + tokens[2:middle] + ending, True
    return tokens[1:suffix] + tokens[middle + 1 :] + tokens[suffix + 1 : middle] + ending, False


@pytest.mark.parametrize("ends", [True, False])
def test_the_parts_in_order_are_the_document(ends):
    random = np.random.default_rng(0)
    changed, suffix_first, cuts = 0, [], []
    for _ in range(2000):
        document = random.integers(4, 60, random.integers(1, 40))
        if ends:
            document = np.append(document, 0)
        found = rearranged(document, MARKS, 0.6, 0.3, seed=5)
        again = rearranged(document.copy(), MARKS, 0.6, 0.3, seed=5)
        assert (found is None and again is None) or np.array_equal(found, again)
        if found is None:
            continue
        assert len(found) == len(document)
        text, first = restored(found)
        assert text == document[3:].tolist()
        changed += 1
        if len(document) > 30:
            suffix_first.append(first)
        if not first and len(document) > 30:
            cuts.append((found.tolist().index(2) - 1) / (len(document) - 3 - ends))
    assert changed / (2000 * 34 / 39) == pytest.approx(0.6, abs=0.035)  # 34 of 39 lengths are at least 6
    # an empty prefix, about one in 16 of these, looks the same in both orders
    assert np.mean(suffix_first) == pytest.approx(0.3 + 0.7 / 16, abs=0.07)
    assert np.mean(cuts) == pytest.approx(1 / 3, abs=0.05)  # of the first of two uniform cuts


def stored(folder, lengths):
    random = np.random.default_rng(1)
    documents = [[*random.integers(4, 500, length).tolist(), 0] for length in lengths]
    folder.mkdir()
    TokenShards().write(iter(documents), folder, 500)
    return folder, documents


@pytest.mark.parametrize(
    "packing", [Concatenate(), Concatenate(mask_documents=True), BestFit()], ids=lambda p: type(p).__name__
)
def test_rows_keep_their_shape_and_labels_follow_the_tokens(packing, tmp_path):
    folder, _ = stored(tmp_path / "train", [5, 40, 17, 80, 3, 30, 64, 9] * 4)
    options = {"sequence_length": 48, "batch_size": 4, "shuffle": True, "seed": 2}
    plain = packing.batches(folder, **options)
    filled = FillInTheMiddle(packing, **IDS, rate=1.0).batches(folder, **options)
    assert len(filled) == len(plain)
    rows = 0
    for (cursor, before), (place, after) in islice(zip(plain, filled, strict=True), 6):
        assert cursor == place
        assert before.keys() == after.keys()
        for key in before.keys() - {"input_ids", "labels"}:
            assert torch.equal(before[key], after[key])
        ignored = before["labels"] == -100
        assert torch.equal(ignored, after["labels"] == -100)
        joined = ~ignored[:, :-1]
        assert torch.equal(after["labels"][:, :-1][joined], after["input_ids"][:, 1:][joined])
        assert (
            (after["input_ids"] == 1).sum()
            == (after["input_ids"] == 3).sum() + (after["labels"][:, -1] == 3).sum()
        ).item()
        rows += int((after["input_ids"] != before["input_ids"]).any(1).sum())
    assert rows > 15
    padded = [
        packed.batches(folder, **options | {"shuffle": False, "pad": True})
        for packed in (packing, FillInTheMiddle(packing, **IDS, rate=1.0))
    ]
    for (_, one), (_, other) in zip(*padded, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])


def test_each_document_of_a_row_can_be_put_back(tmp_path):
    folder, documents = stored(tmp_path / "train", [20, 30, 25] * 8)
    batches = FillInTheMiddle(BestFit(), **IDS, rate=1.0).batches(folder, sequence_length=64, batch_size=2)
    known, found = {tuple(document[3:]) for document in documents}, set()
    for _, batch in islice(batches, len(batches)):
        for ids, places in zip(batch["input_ids"], batch["document_ids"], strict=True):
            for document in places.unique():
                tokens = ids[places == document].tolist()
                if tokens[0] == 1:
                    found.add(tuple(restored(tokens)[0]))
    assert found
    assert found <= known


def test_a_tokenizer_without_the_sentinels_is_no_reason_to_delete_the_data(tmp_path):
    folder = corpus(tmp_path / "source", documents=30)
    parts = JSONLinesDocuments, BPETokenizer(300), TokenShards()
    for packing, said in (
        (FillInTheMiddle(Concatenate()), "has no token '<|fim_prefix|>'"),
        (FillInTheMiddle(Concatenate(), prefix=400, suffix=401, middle=399), "401 is no id of the tokenizer"),
    ):
        data = PretrainDataModule(*parts, packing, source=str(folder), cache_dir=str(tmp_path / "cache"))
        data.setup()
        with pytest.raises(ConfigError, match=re.escape(said)) as caught:
            data.train_dataloader()
        assert "elete" not in str(caught.value)


def test_unknown_tokens_and_wrong_rates_are_refused():
    with pytest.raises(ConfigError, match=r"rate from 0 to 1, not 1\.5"):
        FillInTheMiddle(Concatenate(), rate=1.5)
    with pytest.raises(ConfigError, match="three different tokens"):
        FillInTheMiddle(Concatenate(), prefix=1, suffix=1)
    with pytest.raises(ConfigError, match="an id is -1"):
        FillInTheMiddle(Concatenate(), prefix=-1)
