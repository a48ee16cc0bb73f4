"""Kills a rank of a run at a moment that was drawn before, or as soon as a file of a checkpoint is there; or sends it another signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer

from core.errors import ConfigError


class Progress(Callback):
    """Notes this rank's process, and each number of steps that are done and, where it was due, saved.

    Args:
        folder: Where to write.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (self.folder / f"pid.{trainer.global_rank}").write_text(str(os.getpid()), encoding="utf-8")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        with open(self.folder / f"progress.{trainer.global_rank}", "a", encoding="utf-8") as file:
            file.write(f"{trainer.global_step}\n")


class FailsOnce(Callback):
    """Ends the run with a ConfigError, as a checkpoint does that could not be written; not when it is started again.

    Args:
        folder: Where to note that it has.
        step: Before which step.
    """

    def __init__(self, folder: str, step: int) -> None:
        self.note, self.step = Path(folder, "failed"), step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == self.step and not self.note.exists():
            self.note.touch()
            raise ConfigError("No space left on device")


class Exits(Callback):
    """Ends rank 1 with `sys.exit(3)` before the third step."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            sys.exit(3)


class DiesWhileOthersWait(Callback):
    """Kills rank 1 before the third step, and keeps the others where they do not notice."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            if trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


class DiesBehindOthers(Callback):
    """Kills rank 1 before the third step, for which rank 0 waits; each other rank waits for the one before that."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            if trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.recv(torch.zeros(1), {0: 1, 2: 0, 3: 2}[trainer.global_rank])


class DiesAtTheEndOnce(Callback):
    """Kills rank 1 when training is over, a second after rank 0 is there; not when it is started again.

    Args:
        folder: Where to note that it has.
    """

    def __init__(self, folder: str) -> None:
        self.note = Path(folder, "died")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.global_rank == 1 and not self.note.exists():
            self.note.touch()
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Moment:
    """When to kill whom.

    Attributes:
        rank: Who.
        batches: So many batches this rank begins before.
        delay_s: So much later.
        sees: And as soon as a checkpoint that is being written has a file of this name; "": as soon as it is there
            itself; None: at once.
        signal: With what.
    """

    rank: int
    batches: int
    delay_s: float
    sees: str | None = None
    signal: int = signal.SIGKILL


def steps_done(folder: Path, rank: int) -> list[int]:
    """Returns the steps that a rank had done and saved at the start of each of its batches."""
    path = folder / f"progress.{rank}"
    return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []


@contextmanager
def killer(folder: Path, moment: Moment) -> Iterator[list[float]]:
    """Kills while the body runs the ranks; yields a list that has the time (`time.monotonic`) once it is done."""
    for old in [*folder.glob("pid.*"), *folder.glob("progress.*")]:
        old.unlink()
    over, killed = threading.Event(), list[float]()
    thread = threading.Thread(target=_watch, args=(folder, moment, over, killed))
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def _watch(folder: Path, moment: Moment, over: threading.Event, killed: list[float]) -> None:
    while len(steps_done(folder, moment.rank)) < moment.batches:
        if over.wait(0.002):
            return
    time.sleep(moment.delay_s)
    while moment.sees is not None and not _is_there(folder / "checkpoints", moment.sees):
        if over.wait(0.0003):
            return
    os.kill(int((folder / f"pid.{moment.rank}").read_text(encoding="utf-8")), moment.signal)
    killed.append(time.monotonic())


def _is_there(checkpoints: Path, name: str) -> bool:
    try:
        with os.scandir(checkpoints) as entries:
            written = [entry.path for entry in entries if entry.name.endswith(".ckpt.tmp")]
    except FileNotFoundError:
        return False
    return any(os.path.exists(os.path.join(path, name) if name else path) for path in written)
