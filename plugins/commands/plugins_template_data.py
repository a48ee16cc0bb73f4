"""What `plugins new` starts a data module or a data stage from, each with its test.

Each is a small technique that works, to be changed into another. `TechniqueName`, `technique_name` and
`technique-name` stand for its name.
"""

DATAMODULE = '''
"""Data that needs no files: rows of numbers that count up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from core.technique import technique
from lightning.pytorch import LightningDataModule
from torch import Tensor

VALIDATION = 1 << 40
"""Added to the seed of the validation batches: no run has as many training batches."""


class _Batches:
    """An epoch of batches on one rank; its state is the next batch, so that a stopped run goes on exactly."""

    def __init__(self, data: TechniqueName, seed: int, rank: int, ranks: int) -> None:
        self.data, self.seed, self.rank, self.ranks = data, seed, rank, ranks
        self._start = self._next = 0

    def __len__(self) -> int:
        return self.data.batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._next, self._start = self._start, 0
        while self._next < len(self):
            self._next += 1
            yield self._batch(self._next - 1)

    def _batch(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed + index * self.ranks + self.rank)
        first = torch.randint(self.data.vocab_size, (self.data.batch_size, 1), generator=generator)
        rows = (first + torch.arange(self.data.sequence_length + 1)) % self.data.vocab_size
        return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}

    def state_dict(self) -> dict[str, int]:
        """Returns the position in the epoch."""
        return {"next": self._next % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Lets the next epoch begin at a position."""
        self._start = state["next"]


@technique(paper="own work: a task whose loss falls to 0 if the model is sound", api="API_RANGE")
class TechniqueName(LightningDataModule):
    """Rows (B, T) of token ids that count up from a random one, modulo `vocab_size`.

    Args:
        vocab_size: Number of token ids.
        sequence_length: Tokens T in a row.
        batch_size: Rows B in a micro-batch, on each rank.
        batches: Micro-batches in an epoch, on each rank.
        seed: Of the first tokens of the rows.

    Example:
        data:
          class_path: TechniqueName
          init_args: {vocab_size: 64, sequence_length: 16, batch_size: 8}
    """

    def __init__(
        self,
        vocab_size: int = 64,
        sequence_length: int = 16,
        batch_size: int = 8,
        batches: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size, self.sequence_length, self.batch_size = vocab_size, sequence_length, batch_size
        self.batches, self.seed = batches, seed

    def train_dataloader(self) -> _Batches:
        """Returns this rank's training batches."""
        return self._loader(self.seed)

    def val_dataloader(self) -> _Batches:
        """Returns this rank's validation batches."""
        return self._loader(self.seed + VALIDATION)

    def _loader(self, seed: int) -> _Batches:
        place = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"rank": 0, "num_replicas": 1}
        return _Batches(self, seed, place["rank"], place["num_replicas"])
'''

DATAMODULE_TEST = '''
"""What TechniqueName computes."""

from leyden_technique_name.technique_name import TechniqueName


def test_the_rows_count_up_and_labels_are_the_next_tokens():
    batch = next(iter(TechniqueName(vocab_size=5, sequence_length=7).train_dataloader()))
    assert batch["input_ids"].shape == (8, 7)
    assert ((batch["input_ids"] + 1) % 5 == batch["labels"]).all()


def test_a_stopped_epoch_goes_on_with_the_next_batch():
    data = TechniqueName(batches=3)
    whole = [batch["input_ids"].tolist() for batch in data.train_dataloader()]
    stopped, resumed = data.train_dataloader(), data.train_dataloader()
    next(iter(stopped))
    resumed.load_state_dict(stopped.state_dict())
    assert [batch["input_ids"].tolist() for batch in resumed] == whole[1:]
    assert [batch["input_ids"].tolist() for batch in resumed] == whole  # the epoch after it
'''

STAGE = '''
"""Reads the paragraphs of a text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.contracts import DocumentSource
from core.errors import ConfigError
from core.technique import technique


@technique(paper="own work", api="API_RANGE")
class TechniqueName(DocumentSource):
    """The paragraphs of one UTF-8 file, which blank lines divide; each is a document.

    Args:
        source: The file.

    Raises:
        ConfigError: If there is no such file.

    Example:
        data:
          init_args:
            source: notes.txt
            reader: TechniqueName
    """

    def __init__(self, source: str) -> None:
        self._path = Path(source).expanduser()
        if not self._path.is_file():
            raise ConfigError(f"data.source={source}: there is no such file; TechniqueName reads one text file.")

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns a digest of the text: data that was prepared from another text is not taken for this."""
        return {"sha256": hashlib.sha256(self._path.read_bytes()).hexdigest()}

    def documents(self) -> Iterator[str]:
        """Yields each paragraph, in order."""
        for paragraph in re.split(r"\\n\\s*\\n", self._path.read_text(encoding="utf-8")):
            if paragraph.strip():
                yield paragraph.strip()
'''

STAGE_TEST = '''
"""What TechniqueName computes."""

import pytest
from core.errors import ConfigError

from leyden_technique_name.technique_name import TechniqueName


def test_blank_lines_divide_documents(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("\\none\\ntwo\\n\\n \\t\\nthree\\n")
    before = TechniqueName(str(path)).fingerprint()
    assert list(TechniqueName(str(path)).documents()) == ["one\\ntwo", "three"]
    path.write_text("four\\n\\nfive\\n")
    assert TechniqueName(str(path)).fingerprint() != before


def test_a_missing_file_is_said():
    with pytest.raises(ConfigError, match="no such file"):
        TechniqueName("gone.txt")
'''

STAGE_CONFTEST = '''
"""What the conformance kit cannot know: a text for TechniqueName to read."""

import textwrap

from core.testing import Case


def pytest_leyden_cases():
    """Returns the techniques that are not tried as in their docstrings' examples."""
    source = textwrap.__file__  # any text will do
    return [Case("TechniqueName", config={"data": {"init_args": {"source": source}}})]
'''

TEMPLATES = {"datamodules": (DATAMODULE, DATAMODULE_TEST), "stages": (STAGE, STAGE_TEST, STAGE_CONFTEST)}
"""Kind -> the technique's module, its tests, and their conftest.py where the kit needs to know more."""
