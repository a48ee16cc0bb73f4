"""How often each source has been gone through is logged, and nothing is counted on other steps."""

import csv

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from core.__main__ import main
from core.data.token_datamodule import TokenDataModule
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from tests.support.corpus import corpus, prepare
from toolkit.prepared import read_manifest

LENGTH, ROWS = 16, 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    web = prepare(corpus(folder / "web-source", documents=60), folder / "web")
    tokenizer = PretrainedTokenizer(str(web / "tokenizer.json"))
    code = prepare(corpus(folder / "code-source", documents=25), folder / "code", tokenizer=tokenizer)
    return {"web": web, "code": code}


@pytest.fixture
def train(tiny, write_yaml, tmp_path):
    """Trains 12 steps, of which every third is logged; returns rows and TensorBoard's scalars."""

    def run(data):
        tiny["trainer"] |= {
            "default_root_dir": str(tmp_path / "run"),
            "log_every_n_steps": 3,
            "max_steps": 12,
            "limit_val_batches": 0,
            "callbacks": [],
            "logger": [
                {"class_path": "MetricsCSV", "init_args": {"save_dir": "${run_folder}"}},
                {
                    "class_path": f"{TensorBoardLogger.__module__}.TensorBoardLogger",
                    "init_args": {"save_dir": "${run_folder}", "name": "", "version": ""},
                },
            ],
        }
        tiny["model"]["network"]["init_args"]["vocab_size"] = 320
        tiny["data"] = data
        assert main(["fit", f"--config={write_yaml('run.yaml', tiny)}"]) == 0
        with open(tmp_path / "run" / "metrics.csv", encoding="utf-8", newline="") as file:
            rows = {int(row["step"]): row for row in csv.DictReader(file)}
        events = EventAccumulator(str(tmp_path / "run"))
        events.Reload()
        return rows, events

    return run


def shape(**more):
    return {"sequence_length": LENGTH, "batch_size": ROWS, "packing": "Concatenate", **more}


@pytest.mark.parametrize("workers", [0, 1])
def test_one_source(folders, train, monkeypatch, workers):
    counted = []
    epochs = TokenDataModule.epochs
    monkeypatch.setattr(TokenDataModule, "epochs", lambda self: counted.append(1) or epochs(self))
    stages = {"reader": "TextDocuments", "tokenizer": "BPETokenizer", "writer": "TokenShards"}
    options = shape(source=str(folders["code"]), num_workers=workers, **stages)
    rows, events = train({"class_path": "PretrainDataModule", "init_args": options})
    tokens = read_manifest(folders["code"])["train_tokens"] - 1  # the last one has no label
    expected = {step: step * ROWS * LENGTH / tokens for step in (3, 6, 9, 12)}
    assert expected[12] > 1
    assert {step: float(row["epoch/all"]) for step, row in rows.items()} == pytest.approx(expected)
    assert {e.step: e.value for e in events.Scalars("epoch/all")} == pytest.approx(expected, rel=1e-6)
    assert len(counted) == 4


def test_several_sources(folders, train):
    options = shape(
        sources={name: str(folder) for name, folder in folders.items()}, weights={"web": 0.8, "code": 0.2}
    )
    rows, events = train({"class_path": "MixtureDataModule", "init_args": options})
    for name, share in options["weights"].items():
        tokens = read_manifest(folders[name])["train_tokens"] - 1
        # 10 rows a step: 8 of one and 2 of the other, to within the row that the shares are exact to
        expected = {step: step * ROWS * share * LENGTH / tokens for step in (3, 6, 9, 12)}
        found = {step: float(row[f"epoch/{name}"]) for step, row in rows.items()}
        assert found == pytest.approx(expected, abs=LENGTH / tokens)
        assert {e.step: e.value for e in events.Scalars(f"epoch/{name}")} == pytest.approx(found, rel=1e-6)
