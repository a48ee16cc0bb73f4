"""A ring of snapshots of the last steps, in memory or on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer

from core import durable
from toolkit import snapshots


class Entry(NamedTuple):
    """A snapshot.

    Attributes:
        number: Counts snapshots; steps may come again.
        step: Optimizer steps done.
        snapshot: The snapshot, or None where it is on disk.
    """

    number: int
    step: int
    snapshot: snapshots.Snapshot | None


class SnapshotRing:
    """Keeps the snapshots that training may go back to, oldest first; each rank has its own.

    Args:
        reach: Steps that it must be possible to go back; fewer only before the first snapshot.
        folder: Where to keep them, in a file for each rank; None: in memory.
    """

    def __init__(self, reach: int, folder: Path | None = None) -> None:
        self.reach, self.folder = reach, folder
        self._entries: list[Entry] = []
        self._number = 0
        # the newest checkpoint may be damaged: snapshots of the one before it are kept too
        self._held: deque[set[int]] = deque(maxlen=2)
        self._place = "rank0-of-1"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def newest(self) -> int:
        """The step of the newest snapshot; -1 without one."""
        return self._entries[-1].step if self._entries else -1

    def add(self, trainer: Trainer) -> None:
        """Takes a snapshot, between two optimizer steps, and removes those that are no longer needed."""
        self._place = f"rank{trainer.global_rank}-of-{trainer.world_size}"
        step = trainer.global_step
        later = [*(entry.step for entry in self._entries[1:]), step]
        self._entries = [
            entry for entry, after in zip(self._entries, later, strict=False) if after > step + 1 - self.reach
        ]
        self._number += 1
        snapshot: snapshots.Snapshot | None = snapshots.take_snapshot(trainer)
        if self.folder is not None:
            with durable.replacing(self._path(self._number)) as temporary:
                torch.save(snapshot, temporary)
            snapshot = None
        self._entries.append(Entry(self._number, step, snapshot))
        self._remove_files()

    def go_back(self, trainer: Trainer, step: int) -> int:
        """Restores the newest snapshot that is not after a step, or the oldest; forgets later ones.

        Returns:
            Its step.
        """
        while len(self) > 1 and self._entries[-1].step > step:
            del self._entries[-1]
        entry = self._entries[-1]
        snapshots.put_back(trainer, entry.snapshot or self._read(entry.number))
        self._remove_files()
        return entry.step

    def hold(self) -> None:
        """Keeps the files of the present snapshots for a checkpoint that is saved now."""
        self._held.append({entry.number for entry in self._entries})

    def state_dict(self) -> dict[str, Any]:
        """Returns the numbers and steps of the snapshots."""
        return {"number": self._number, "entries": [[entry.number, entry.step] for entry in self._entries]}

    def find(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Uses the snapshots that a checkpoint lists, if every rank has all of them, with the right shapes."""
        self._place = f"rank{trainer.global_rank}-of-{trainer.world_size}"
        self._number = state.get("number", 0)
        numbers = [(number, step) for number, step in state.get("entries", ())]
        if self.folder is None or not numbers:
            return
        usable = torch.tensor(
            float(all(self._fits(trainer, n) for n, _ in numbers)), device=trainer.strategy.root_device
        )
        if trainer.world_size > 1:
            usable = trainer.strategy.reduce(usable, reduce_op="sum")
        if int(usable) == trainer.world_size:
            self._entries = [Entry(number, step, None) for number, step in numbers]
            self.hold()

    def _fits(self, trainer: Trainer, number: int) -> bool:
        try:
            snapshot = self._read(number)
        except (OSError, EOFError, RuntimeError, ValueError, UnpicklingError):
            return False
        return [t.shape for t in snapshot["tensors"]] == [t.shape for t in snapshots.tensors(trainer)]

    def _read(self, number: int) -> snapshots.Snapshot:
        found: snapshots.Snapshot = torch.load(self._path(number), weights_only=True, mmap=True)
        return found

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{number:08d}.{self._place}.pt"

    def _remove_files(self) -> None:
        if self.folder is None:
            return
        needed = {entry.number for entry in self._entries}.union(*self._held)
        for path in self.folder.glob(f"*.{self._place}.pt"):
            if path.name.partition(".")[0].isdigit() and int(path.name.partition(".")[0]) not in needed:
                with suppress(OSError):
                    path.unlink()
