"""The parts of a loss add up to it: in one process, on ranks, of packed documents and of a mixture."""

import csv
import json
import math
from itertools import pairwise

import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models

from callbacks.gradient_noise_scale import GradientNoiseScale
from callbacks.loss_breakdown import LossBreakdown, bins, places, spans
from core.data.token_datamodule import TokenDataModule
from core.errors import ConfigError
from datamodules.mixture_datamodule import MixtureDataModule
from datamodules.packing.best_fit import BestFit
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.padded_documents import PaddedDocuments
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.cli.preflight import ordered
from plugins.loggers.metrics_csv import MetricsCSV
from tests.support.launched_ranks import column, forked, results
from toolkit.document_places import TABLE
from toolkit.sources import mark_stored_sources


def test_places_agree_with_a_loop():
    generator = torch.Generator().manual_seed(0)
    documents = (torch.rand(5, 40, generator=generator) < 0.2).long().cumsum(1)
    positions, lengths = places({"labels": documents, "document_ids": documents})
    for row in range(5):
        starts = [t for t in range(40) if not t or documents[row, t] != documents[row, t - 1]]
        for begin, end in pairwise([*starts, 40]):
            assert positions[row, begin:end].tolist() == list(range(end - begin))
            assert set(lengths[row, begin:end].tolist()) == {end - begin}


def test_a_row_without_documents_ends_with_its_last_label():
    labels = torch.tensor([[1, -100, 2, -100, -100], [-100] * 5])
    positions, lengths = places({"labels": labels})
    assert positions[0].tolist() == [0, 1, 2, 3, 4]
    assert lengths[:, 0].tolist() == [3, 0]


def test_bins_are_as_they_are_called():
    values = torch.tensor([0, 3, 4, 7, 8, 15, 16])
    names = [spans(4)[index] for index in bins(values, 4)]
    assert names == ["0_4", "0_4", "4_8", "4_8", "8_16", "8_16", "16_32"]


def test_the_parts_are_the_loss_of_each_position(fit, data, tmp_path):
    """Against the losses of the network's logits, position by position; the network's dropout is 0 here."""
    rows = []

    def seen(module, batch):
        module.network.dropout.p = 0.0
        rows.append((module.network.embedding.weight.clone(), module.network.head.weight.clone(), batch))

    class Watch(LossBreakdown):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen(pl_module, batch)
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    logger = MetricsCSV(str(tmp_path))
    fit(
        tmp_path,
        [Watch(every_n_steps=3, first_bin=8)],
        logger=[logger],
        max_steps=3,
        log_every_n_steps=1,
        val_check_interval=3,
    )
    with open(tmp_path / "metrics.csv", encoding="utf-8") as file:
        row = {int(row["step"]): row for row in csv.DictReader(file)}[3]
    embedding, head, batch = rows[2]
    logits = embedding[batch["input_ids"]].double() @ head.double().T
    losses = -logits.detach().log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    parts = {
        name: float(losses[:, lo:hi].mean())
        for name, lo, hi in (("0_8", 0, 8), ("8_16", 8, 16), ("16_32", 16, 32))
    }
    for name, value in parts.items():
        assert float(row[f"loss/position_{name}"]) == pytest.approx(value, rel=1e-6)  # float32 logits
        assert row[f"val/loss/position_{name}"]
    assert float(row["loss/length_32_64"]) == pytest.approx(float(row["train/loss"]), rel=1e-6)
    validation = sum(
        w * float(row[f"val/loss/position_{name}"]) for name, w in (("0_8", 8), ("8_16", 8), ("16_32", 16))
    )
    assert validation / 32 == pytest.approx(float(row["val/loss"]), rel=1e-6)


def test_what_the_noise_scale_computes_besides_does_not_count(fit, tmp_path):
    """With dropout, the halves of a batch have other losses than the batch."""
    found = []
    for more in ([], [GradientNoiseScale(2)]):
        callbacks = ordered([LossBreakdown(every_n_steps=2), *more])
        done = fit(
            tmp_path / str(len(more)), callbacks, max_steps=2, log_every_n_steps=1, limit_val_batches=0
        )
        metrics = done.trainer.callback_metrics
        found.append({name: float(value) for name, value in metrics.items() if name.startswith("loss/")})
    assert found[0] == found[1]
    assert found[0]


@pytest.mark.ci
def test_two_ranks_agree_with_one_process(tmp_path):
    words = [
        "--trainer.callbacks+=LossBreakdown",
        "--trainer.callbacks.every_n_steps=2",
        "--trainer.max_steps=4",
    ]
    words += ["--trainer.callbacks.first_bin=4", "--data.documents=true"]
    found = []
    for ranks, more in ((1, []), (2, ["--trainer.strategy=FSDP"])):
        done = forked(ranks, tmp_path / str(ranks), *words, *more)
        assert done.code == 0, done.error_text
        found.append(results(tmp_path / str(ranks))[0])
    names = [name for name in found[0][4] if "loss/position_" in name or "loss/length_" in name]
    assert {name.partition("loss/")[0] for name in names} == {"", "val/"}
    for name in names:
        assert column(found[1], name) == pytest.approx(column(found[0], name), rel=1e-5), name


@pytest.fixture
def mixture(tmp_path):
    """Two prepared folders: of one all tokens are even, of the other odd."""
    folders = {}
    for name, tokens in (("even", range(2, 256, 2)), ("odd", range(3, 257, 2))):
        folders[name] = str(tmp_path / name)
        documents = [[*tokens[n : n + 9], 0] for n in range(100)]
        for split in ("train", "validation"):
            TokenShards().write(documents, tmp_path / name / split, 2)
        tokenizer = Tokenizer(models.BPE({chr(200 + n): n for n in range(257)}, []))
        (tmp_path / name / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        manifest = {"vocab_size": 257, "train_tokens": 1000, "unigram_loss": 1.0, "end_of_text_id": 0}
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folders


def test_sources_of_a_mixture(fit, tmp_path, mixture):
    data = MixtureDataModule(mixture, {"even": 3.0, "odd": 1.0}, BestFit(), sequence_length=16, batch_size=4)
    logger = MetricsCSV(str(tmp_path))
    run = fit(
        tmp_path,
        [LossBreakdown(every_n_steps=2)],
        data=data,
        logger=[logger],
        max_steps=4,
        log_every_n_steps=1,
        limit_val_batches=0,
    )
    found = run.trainer.callback_metrics
    # the untrained network gives all 257 tokens about the same probability
    assert {name: round(float(found[f"loss/source/{name}"]) / math.log(257), 1) for name in mixture} == {
        "even": 1,
        "odd": 1,
    }
    # 16 rows, each with one document of 10 tokens, for which the next is too long
    assert [float(found[f"tokens/source/{name}"]) for name in mixture] == [120, 40]
    batch = next(iter(data.train_dataloader()))
    for ids, source in zip(batch["input_ids"], batch["source_ids"], strict=True):
        assert set((ids[ids > 1] % 2).tolist()) == {int(source[0])}


class Folder(TokenDataModule):
    """A prepared folder."""

    vocab_size, train_tokens = 257, 1000

    def __init__(self, folder, packing):
        super().__init__(16, 8, True, 0, 0)
        self.folder, self.packing = folder, packing

    def packed(self, split, **order):
        return self.packing.batches(self.folder / split, **order)


@pytest.mark.parametrize("packing", [Concatenate(), BestFit(), PaddedDocuments()])
def test_sources_of_the_documents_of_a_prepared_folder(packing, fit, tmp_path):
    """Documents of `even` have even tokens alone, those of `odd` odd ones: the tokens say which source they are of."""
    rows = []
    for split in ("train", "validation"):
        documents = [[2 + n % 2 + 2 * (n * k % 127) for k in range(1, 4 + n % 9)] for n in range(120)]
        TokenShards().write(documents, tmp_path / split, 2)
        rows += [
            {"split": split, "source": ("even", "odd")[n % 2], "tokens": len(d)}
            for n, d in enumerate(documents)
        ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / TABLE, row_group_size=50)
    seen = []

    class Watch(LossBreakdown):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            pl_module.network.dropout.p = 0.0
            seen.append(
                (pl_module.network.embedding.weight.clone(), pl_module.network.head.weight.clone(), batch)
            )
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    data = Folder(tmp_path, packing)
    run = fit(
        tmp_path / "run",
        [Watch(every_n_steps=3)],
        data=data,
        max_steps=3,
        log_every_n_steps=1,
        val_check_interval=3,
    )
    embedding, head, batch = seen[2]
    ids, labels = batch["input_ids"], batch["labels"]
    losses = (
        -(embedding[ids].detach().double() @ head.detach().double().T)
        .log_softmax(-1)
        .gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    )
    metrics, expected = run.trainer.callback_metrics, {}
    for number, name in enumerate(("even", "odd")):
        chosen = (labels != -100) & (ids % 2 == number)
        if chosen.any():
            expected[f"loss/source/{name}"] = float(losses[chosen].mean())
        assert f"val/loss/source/{name}" in metrics
    found = {name: float(value) for name, value in metrics.items() if name.startswith("loss/source/")}
    assert found == pytest.approx(expected, rel=1e-6)  # float32 logits
    assert not any(name.startswith("tokens/source") for name in run.trainer.callback_metrics)


def test_one_source_costs_nothing(tmp_path):
    rows = [{"split": "train", "source": "one", "tokens": 3}] * 2
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / TABLE)
    data = Folder(tmp_path, Concatenate())
    assert mark_stored_sources(data) == []
    assert "packed" not in vars(data)


def test_a_table_of_other_documents_is_left_out(tmp_path):
    TokenShards().write([[2, 3, 4]] * 100, tmp_path / "train", 2)
    rows = [{"split": "train", "source": name, "tokens": 3} for name in "ab"]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / TABLE)
    data = Folder(tmp_path, Concatenate())
    assert mark_stored_sources(data) == ["a", "b"]
    with pytest.warns(UserWarning, match="does not have one row for each document of the train split"):
        batch = next(iter(data.train_dataloader()))
    assert "source_ids" not in batch


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"first_bin": 12}])
def test_mistakes(options):
    with pytest.raises(ConfigError, match="a power of two as first_bin"):
        LossBreakdown(**options)
