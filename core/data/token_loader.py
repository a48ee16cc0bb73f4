"""Hands out batches with or without worker processes, and knows exactly how far it has come."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from core.contracts import Batch, PackedBatches
from core.errors import ConfigError


class TokenLoader:
    """Hands out packed batches, with or without worker processes, and knows how far it has come.

    A pass has as many batches as an epoch of the data; the next one goes on where it stopped, so that a pass
    that was cut short (`limit_train_batches`), or whose last batch reached into the next epoch, loses nothing.
    Padded batches, as for validation, begin from the first token in each pass.

    Args:
        batches: The packed batches of this rank.
        num_workers: Worker processes that read ahead; the batches and their order do not depend on it.
        pin_memory: Whether batches lie in page-locked memory, for faster copies to a CUDA device.
        repeat: Whether each pass begins from the first token, as padded ones do.
        vocab_size: Number of token ids, below which all must lie; None: nothing is checked.

    Raises:
        ConfigError: While reading: at a token id beyond the vocabulary, of which a network would read or write
            memory outside its weights, or stop with an error of the device.
    """

    def __init__(
        self,
        batches: PackedBatches,
        num_workers: int = 0,
        pin_memory: bool = False,
        repeat: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.batches, self.num_workers, self.pin_memory = batches, num_workers, pin_memory
        self.begin = batches.cursor if batches.pad or repeat else None
        self._done = self._resume_at = 0
        self._reshaped = False

    @property
    def batch_size(self) -> int:
        """Rows of this rank's batch."""
        return self.batches.batch_size

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so that nothing is read before the first batch is requested: Lightning calls
        # iter() before it restores the state.
        try:
            yield from self._batches()
        except ConfigError as error:  # of a worker: its message is the traceback there
            # Lets go of the reader, which ends its workers: the garbage collector would wait 10 s for them.
            traceback.clear_frames(error.__traceback__)
            raise ConfigError(str(error).rpartition("core.errors.ConfigError: ")[2].strip()) from error

    def _batches(self) -> Iterator[Batch]:
        # The rows may be others now than those that were counted.
        self._done, self._resume_at = self._resume_at % max(len(self), 1), 0
        if self.begin is not None and not self._done:
            self.batches.cursor = self.begin
        while self._done < len(self):
            self._reshaped = False
            for cursor, batch in self._reader():
                self._done += 1
                self.batches.cursor = cursor
                ends = self._done == len(self)
                if ends:
                    self._done = 0
                self._require_known(batch)
                yield batch
                if ends:
                    return
                if self._reshaped:
                    break
            else:
                self._done = 0
                return

    def _require_known(self, batch: Batch) -> None:
        if self.vocab_size is None:
            return
        # The batch is on the host: this waits for no device. numpy does not know pinned memory.
        ids = [batch[name] for name in ("input_ids", "labels")]
        largest = max(int((part if self.pin_memory else np.from_dlpack(part)).max()) for part in ids)
        if largest >= self.vocab_size:
            raise ConfigError(
                f"The data has the token id {largest:,}, its vocabulary has {self.vocab_size:,} ids: it is damaged, or was not "
                "written by prepare.\nSee what is wrong with `python -m core verify-data`, and prepare it again."
            )

    def _reader(self) -> Iterable[tuple[Any, Batch]]:
        if not self.num_workers and not self.pin_memory:
            return self.batches
        return DataLoader(
            self.batches,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # otherwise each pass draws from the global generator
        )

    def reshape(self, sequence_length: int | None = None, batch_size: int | None = None) -> None:
        """Changes the rows from the next batch on; what workers have read ahead is read again."""
        self.batches.sequence_length = sequence_length or self.batches.sequence_length
        self.batches.batch_size = batch_size or self.batches.batch_size
        self._reshaped = True

    def skip(self, batches: int) -> None:
        """Leaves out the coming batches; those after them take their place in this pass."""
        cursor, rows = self.batches.cursor, batches * self.batches.batch_size * self.batches.world_size
        self.batches.cursor = self.batches.take(cursor, rows)[1]
        self._reshaped = True

    @property
    def sampler(self) -> TokenLoader:
        """Where Lightning and DeepSpeed look for `batch_size`."""
        return self

    batch_sampler = sampler

    def epochs(self) -> dict[str, float]:
        """Returns how often the data has been gone through, by the name of the source."""
        return self.batches.epochs(self.batches.cursor)

    def state_dict(self) -> dict[str, Any]:
        """Returns where the next batch begins, and what that depends on."""
        return {
            "cursor": self.batches.cursor,
            "done": self._done,
            "batch_tokens": self._batch_tokens,
            "order": self.batches.order(),
        }

    @property
    def _batch_tokens(self) -> int:
        """Tokens of a batch on all ranks."""
        batches = self.batches
        return batches.batch_size * batches.world_size * batches.sequence_length

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken, with rows and ranks of any number.

        Raises:
            ConfigError: If the tokens come in another order now.
        """
        then, now = state["order"], self.batches.order()
        if then != now:
            lines = [
                f"  {name}: {then.get(name)} then, {now.get(name)} now"
                for name in {**then, **now}
                if then.get(name) != now.get(name)
            ]
            raise ConfigError(
                "The checkpoint was written when the data had another order, so that some tokens would come "
                "twice\nand others never:\n" + "\n".join(lines) + "\nTake the old values back."
            )
        self.batches.cursor = state["cursor"]
        done = state["done"] * state.get("batch_tokens", self._batch_tokens) // self._batch_tokens
        self._done = self._resume_at = done


def _as_it_is(batch: Any) -> Any:
    return batch
