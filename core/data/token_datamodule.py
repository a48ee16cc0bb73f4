"""Prepared tokens, streamed in exact order: what every data module that trains on token folders shares."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from core.contracts import PackedBatches
from core.data.token_loader import TokenLoader
from core.errors import ConfigError

__all__ = ["TRAIN_ON", "TokenDataModule", "default_cache_dir"]

TRAIN_ON = "Train on --data=PretrainDataModule or MixtureDataModule"
"""What to do where a technique needs what stored tokens alone offer: a position, rows of any shape."""

WORKERS_PER_CORE, LEAST_BOUND = 4, 64
"""Bounds of `num_workers`: so many for each core, but not fewer than 64, as runs are checked on smaller machines too."""


def default_cache_dir() -> Path:
    """Returns where data goes that was prepared or downloaded without a place being named."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "leyden")


class TokenDataModule(LightningDataModule):
    """Deals out stored tokens as rows of `sequence_length`; the position is part of every checkpoint.

    Args:
        sequence_length: Tokens in a row.
        batch_size: Rows in a micro-batch, on each rank.
        shuffle: Whether each epoch takes the training rows in a new order.
        seed: Seed of these orders.
        num_workers: Processes that read ahead, on each rank.

    Attributes:
        tokenizer_json: The tokenizer, for `tokenizers.Tokenizer.from_str`; this and the following are known after
            `setup`.
        vocab_size: Number of token ids.
        end_of_text_id: The id that ends every document.
        train_tokens: Tokens of the training split.
        training_loader: The training batches, with their position; None before training.
        test_split: What `test` reads: "test", or "validation" where there is no such split.

    Raises:
        ConfigError: If a number is out of range.
    """

    tokenizer_json: str
    vocab_size: int
    end_of_text_id: int
    train_tokens: int
    test_split: str = "validation"

    def __init__(
        self, sequence_length: int, batch_size: int, shuffle: bool, seed: int, num_workers: int
    ) -> None:
        super().__init__()
        self.sequence_length, self.batch_size, self.num_workers = sequence_length, batch_size, num_workers
        self.shuffle, self.seed = shuffle, seed
        self.training_loader: TokenLoader | None = None
        self._position: dict[str, Any] | None = None
        self._reshuffled: int | None = None
        for name, least in {"sequence_length": 1, "batch_size": 1, "seed": 0, "num_workers": 0}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"data.{name} is {getattr(self, name)}; it must be at least {least}.")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if num_workers > (most := max(LEAST_BOUND, WORKERS_PER_CORE * cores)):
            raise ConfigError(
                f"data.num_workers is {num_workers:,}; with {cores} cores at most {most} are allowed on each rank, each a process "
                "of some 100 MB.\n0 is fastest for files on this machine; 2 to 8 are usual where data lies on object storage."
            )

    @abstractmethod
    def packed(self, split: str, **order: Any) -> PackedBatches:
        """Returns the batches of "train", "validation" or "test"; `order` is what :class:`core.contracts.Packing` takes.

        Raises:
            ConfigError: If the data is damaged.
        """

    def setup(self, stage: str | None = None) -> None:
        """Forgets the position of an earlier run; a checkpoint's is loaded after this."""
        self._position = self._reshuffled = None

    def train_dataloader(self) -> TokenLoader:
        """Returns this rank's training batches; Lightning saves their position with the checkpoint.

        Raises:
            ConfigError: If there are fewer rows than one global batch takes.
        """
        overfits = getattr(self.trainer, "overfit_batches", 0) > 0  # on the same few batches in each epoch
        shuffle = self.shuffle and not overfits
        self.training_loader = self._loader("train", shuffle=shuffle, seed=self.seed, repeat=overfits)
        if len(self.training_loader) == 0:
            batches = self.training_loader.batches
            raise ConfigError(
                f"The training split has {self.train_tokens:,} tokens, too few for a global batch of "
                f"{batches.world_size} ranks x {self.batch_size} rows x\n{self.sequence_length} tokens. Lower "
                "data.sequence_length or data.batch_size, or add text."
            )
        if self._position is not None:
            self.training_loader.load_state_dict(self._position)
        return self.training_loader

    def reshape_batches(self, sequence_length: int | None = None, batch_size: int | None = None) -> None:
        """Changes the training rows from the next batch on, in the middle of a run; call it on every rank.

        No token is lost or repeated: the next rows begin where the last ones ended. Checkpoints hold the
        position, not the shape: after a resume whoever changes it has to set it again.

        Args:
            sequence_length: Tokens in a row; None: as it is.
            batch_size: Rows in a micro-batch, on each rank; None: as it is.

        Raises:
            ConfigError: If there are no training batches yet.
        """
        if self.training_loader is None:
            raise ConfigError("reshape_batches: there are no training batches before training begins.")
        self.training_loader.reshape(sequence_length, batch_size)

    def skip_batches(self, batches: int) -> None:
        """Leaves out the coming training batches (micro-batches of each rank), in the middle of a run; on every rank.

        Raises:
            ConfigError: If there are no training batches yet.
        """
        if self.training_loader is None:
            raise ConfigError("skip_batches: there are no training batches before training begins.")
        self.training_loader.skip(batches)

    def reshuffle(self, seed: int) -> None:
        """Puts the training data into another order, before the first batch; call it on every rank.

        A checkpoint holds the seed: a resumed run has the same order.

        Args:
            seed: In the place of `data.seed`.

        Raises:
            ConfigError: If there are no training batches yet, or the data is not shuffled.
        """
        if self.training_loader is None or not self.shuffle:
            raise ConfigError("reshuffle: it takes training batches, and data.shuffle=true.")
        self.seed = self._reshuffled = seed
        self.training_loader.batches = self._loader("train", shuffle=True, seed=seed).batches

    def epochs(self) -> dict[str, float]:
        """Returns how often the training tokens have been gone through, by the name of the source; "all": of one."""
        return self.training_loader.epochs() if self.training_loader is not None else {}

    def val_dataloader(self) -> TokenLoader:
        """Returns this rank's validation batches: every token once, in order, the last batch filled up."""
        return self._loader("validation", pad=True)

    def test_dataloader(self) -> TokenLoader:
        """Returns the test batches, or the validation batches where no text was held out for tests."""
        return self._loader(self.test_split, pad=True)

    def predict_dataloader(self) -> TokenLoader:
        """Returns the validation batches."""
        return self.val_dataloader()

    def _loader(self, split: str, repeat: bool = False, **order: Any) -> TokenLoader:
        # The data-parallel rank: under tensor parallelism several ranks read the same rows. None: one rank.
        place = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"rank": 0, "num_replicas": 1}
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        batches = self.packed(
            split,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            rank=place["rank"],
            world_size=place["num_replicas"],
            **order,
        )
        return TokenLoader(batches, self.num_workers, on_cuda, repeat, self.vocab_size)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and the tokenizer: a checkpoint alone is enough to turn text into ids and back."""
        # Lightning saves the loader's position too, but at the end of an epoch it does not give it back.
        position = self.training_loader.state_dict() if self.training_loader is not None else None
        state = {
            "tokenizer": self.tokenizer_json,
            "end_of_text_id": self.end_of_text_id,
            "position": position,
        }
        return state if self._reshuffled is None else state | {"reshuffled": self._reshuffled}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position over, and makes sure that token ids mean what they meant to the checkpoint.

        Raises:
            ConfigError: If the data was written by another tokenizer.
        """
        self._position = state_dict.get("position")
        if (seed := state_dict.get("reshuffled")) is not None:
            self.seed = self._reshuffled = seed
        if not _same_tokenizer(state_dict.get("tokenizer"), self.tokenizer_json):
            raise ConfigError(
                "The data was written by another tokenizer than the checkpoint's: its token ids mean other text.\n"
                "Take data.source, data.tokenizer and data.validation_fraction from the run that wrote the checkpoint."
            )


def _same_tokenizer(one: Any, other: str) -> bool:
    """Returns whether two texts describe the same tokenizer, in whatever way they are written."""
    try:
        return one == other or json.loads(str(one)) == json.loads(other)
    except (ValueError, RecursionError):
        return False
