"""A model that trains in a second on real text, byte by byte, for the tests of this folder."""

import contextlib
import io
import pydoc_data.topics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.utils.data import DataLoader

from callbacks.loss_curve import LossCurve
from callbacks.progress_bar import ProgressBar
from callbacks.run_summary import RunSummary
from callbacks.text_samples import TextSamples
from callbacks.throughput import Throughput
from core.contracts import Network
from core.language_module import LanguageModule
from plugins.loggers.metrics_csv import MetricsCSV
from plugins.objectives.causal_lm import CausalLM

BATCH, LENGTH = 8, 32


class BytePairs(Network):
    """Predicts a byte from the one before; dropout, so that a wrong mode would be seen."""

    vocab_size = 257
    max_sequence_length = None

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(self.vocab_size, 16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, self.vocab_size, bias=False)
        self.init_weights()

    def forward(self, batch, cache=None):
        return self.dropout(self.embedding(batch["input_ids"]))

    def init_weights(self):
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)

    @property
    def blocks(self):
        return []

    @property
    def output_weight(self):
        return self.head.weight

    def flops_per_token(self, sequence_length):
        return 6.0 * self.head.weight.numel()


class Bytes(LightningDataModule):
    sequence_length = LENGTH

    def __init__(self, batches: int = 60):
        super().__init__()
        text = "".join(pydoc_data.topics.topics.values())
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({s: i for i, s in enumerate([*symbols, "<|endoftext|>"])}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer_json = tokenizer.to_str()
        self.end_of_text_id = 256
        ids = torch.tensor(tokenizer.encode(text[: (batches + 3) * BATCH * LENGTH + 1]).ids)
        rows = (len(ids) - 1) // LENGTH
        self.rows = [
            {"input_ids": ids[i : i + LENGTH], "labels": ids[i + 1 : i + LENGTH + 1]}
            for i in range(0, rows * LENGTH, LENGTH)
        ]
        shares = torch.bincount(torch.cat([row["labels"] for row in self.rows[-2 * BATCH :]])).double()
        shares = shares[shares > 0] / shares.sum()
        self.unigram_loss = float(-(shares * shares.log()).sum())

    def train_dataloader(self):
        return DataLoader(self.rows[: -2 * BATCH], batch_size=BATCH)

    def val_dataloader(self):
        return DataLoader(self.rows[-2 * BATCH :], batch_size=BATCH)

    test_dataloader = predict_dataloader = val_dataloader


@dataclass
class Run:
    folder: Path
    trainer: Trainer
    module: LanguageModule
    stdout: str

    def callback(self, kind: type) -> Any:
        return next(callback for callback in self.trainer.callbacks if isinstance(callback, kind))


def language_module() -> LanguageModule:
    return LanguageModule(BytePairs, CausalLM(), partial(torch.optim.AdamW, lr=0.02))


def new_trainer(
    folder: Path, callbacks: list[Callback], kind: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    defaults = {"max_steps": 60, "log_every_n_steps": 5, "val_check_interval": 20, "logger": False}
    return kind(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        callbacks=callbacks,
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        **{**defaults, **options},
    )


def run_fit(
    folder: Path, callbacks: list[Callback], ckpt_path: Any = None, data: Any = None, **options: Any
) -> Run:
    trainer, module = new_trainer(folder, callbacks, **options), language_module()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(module, datamodule=data or Bytes(), ckpt_path=ckpt_path, weights_only=True)
    return Run(folder, trainer, module, printed.getvalue())


def all_callbacks(folder: Path) -> list[Callback]:
    checkpoint = ModelCheckpoint(
        folder / "checkpoints", every_n_train_steps=20, save_top_k=-1, save_last=True
    )
    return [
        Throughput(),
        ProgressBar(),
        LossCurve(),
        TextSamples(num_samples=2, every_n_steps=40, max_new_tokens=12),
        RunSummary(),
        checkpoint,
    ]


@pytest.fixture(scope="session")
def fit():
    """The function that runs a fit; see `run_fit`."""
    return run_fit


@pytest.fixture(scope="session")
def make_trainer():
    return new_trainer


@pytest.fixture(scope="session")
def module():
    return language_module


@pytest.fixture(scope="session")
def data():
    return Bytes


@pytest.fixture(scope="session")
def everything():
    """The function that makes all callbacks of this project for a run folder."""
    return all_callbacks


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """60 steps with every callback and logger."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text("seed_everything: 0\n")
    loggers = [MetricsCSV(str(folder)), TensorBoardLogger(str(folder), name="tensorboard", version="")]
    return run_fit(folder, all_callbacks(folder), logger=loggers)


@pytest.fixture(scope="session")
def resumed(tmp_path_factory, run) -> Run:
    """The same from the checkpoint at step 40 on, in a folder that a run killed at step 60 left."""
    import shutil

    folder = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(run.folder, folder)
    checkpoint = next((folder / "checkpoints").glob("*step=40.ckpt"))
    return run_fit(
        folder, all_callbacks(folder), ckpt_path=checkpoint, logger=[MetricsCSV(str(folder))], max_steps=80
    )
