"""Hands out batches with or without worker processes, and knows exactly how far it has come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from core.contracts import Batch, PackedBatches
from core.errors import ConfigError


class TokenLoader:
    """Hands out packed batches, with or without worker processes, and knows how far it has come.

    Lightning saves and restores the position with the checkpoint and says which epoch begins; elsewhere
    each complete pass is followed by the next epoch's. A pass begins with its epoch's first batch, the
    first pass after `load_state_dict` with the first batch that had not been handed out.

    Args:
        batches: What is handed out.
        num_workers: Worker processes that read ahead; the batches and their order do not depend on it.
        pin_memory: Whether batches lie in page-locked memory, for faster copies to a CUDA device.
    """

    def __init__(self, batches: PackedBatches, num_workers: int = 0, pin_memory: bool = False) -> None:
        self.batches, self.num_workers, self.pin_memory = batches, num_workers, pin_memory
        self.batch_size = batches.batch_size
        self._epoch = self._done = self._resume_at = 0
        self._announced: int | None = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so that nothing is settled before the first batch is asked for: Lightning calls
        # iter() ahead of set_epoch().
        self._done, self._resume_at = self._resume_at, 0
        self.batches.epoch, self.batches.first = self._epoch, self._done
        loader = DataLoader(
            self.batches,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # otherwise each pass draws from the global generator
        )
        for batch in loader:
            self._done += 1
            if self._done == len(self):
                self._epoch, self._done = self._epoch + 1, 0
            yield batch

    @property
    def sampler(self) -> TokenLoader:
        """Where Lightning looks for `set_epoch`, and DeepSpeed for `batch_size`."""
        return self

    batch_sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Says that an epoch begins: what is left of the present one (`limit_train_batches`) is passed over.

        The number counts only at the very first: when Lightning resumes from a checkpoint that was written
        at the end of an epoch, with `max_steps`, it announces one epoch too many.
        """
        if self._announced is None:
            self._epoch = epoch
        elif epoch > self._announced and self._done:
            self._epoch, self._done, self._resume_at = self._epoch + 1, 0, 0
        self._announced = epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, how many of its rows all ranks together were handed, and what orders them."""
        names = ("rows", "global_batch", "sequence_length", "shuffle", "seed")
        return {
            "epoch": self._epoch,
            "rows": self._done * self.batches.global_batch,
            "announced": self._announced,
            "order": {name: getattr(self.batches, name) for name in names},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after what had been handed out when the state was taken.

        Raises:
            ConfigError: If that lies within an epoch of another order.
        """
        then, now = state["order"], self.state_dict()["order"]
        if state["rows"] and then != now:
            lines = [
                f"  {name}: {then.get(name)} then, {now[name]} now"
                for name in now
                if then.get(name) != now[name]
            ]
            raise ConfigError(
                "The checkpoint was written within an epoch that this run would cut or order otherwise, so "
                "that\nsome rows would come twice and others never:\n" + "\n".join(lines) + "\n"
                "Take the old values back."
            )
        self._epoch, self._announced = state["epoch"], state["announced"]
        self._done = self._resume_at = state["rows"] // self.batches.global_batch
