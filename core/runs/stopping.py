"""SIGTERM, and SLURM's notice that the time is up, end a run on all ranks after the same optimizer step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from torch import Tensor


class StopSignals:
    """Replaces Lightning's handlers, which save or communicate in the middle of a step, and wait for the device in each.

    A signal is noted; one rank alone heeds it after the step, several add up their notes where figures are logged.
    Lightning ends the run at the end of that batch, and callbacks are told (`on_exception`). Under SLURM, SIGUSR1
    (`#SBATCH --signal=USR1@120`) also puts the job back into the queue. See :func:`listen`; Lightning puts the old
    handlers back.

    Attributes:
        requeue: Whether the job is to be queued again.
    """

    def __init__(self, trainer: Trainer) -> None:
        early, connector = trainer.received_sigterm, trainer._signal_connector
        self.trainer, self.received, self.requeue = trainer, early, False
        connector.received_sigterm = False  # what one rank was told before is agreed on as well
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, self.note)
        if SLURMEnvironment.detect():
            signal.signal(signal.SIGUSR1, self.note)

    def note(self, number: int, frame: Any) -> None:
        """Takes a signal down."""
        if not self.received and self.trainer.strategy.launcher is not None:
            self.trainer.strategy.launcher.kill(number)  # the ranks that this process has started
        self.received = True
        self.requeue |= number == signal.SIGUSR1

    def heed(self, logging_step: bool, reduce: Callable[..., Tensor], device: Any) -> bool:
        """Ends the run if any rank has been told to; several ranks find out where figures are logged.

        Returns:
            Whether it ends; the same on every rank.
        """
        told, requeue = self.received, self.requeue
        if self.trainer.world_size > 1:
            if not logging_step:
                return False
            notes = torch.tensor([float(told), float(requeue)], device=device)
            told, requeue = (count > 0 for count in reduce(notes, reduce_op="sum").tolist())
        if told:  # what has come since is agreed on the next time
            self.received, self.requeue = True, self.requeue or requeue
            self.trainer._signal_connector.received_sigterm = True
        return told


def listen(module: Any) -> StopSignals:
    """Returns the signals to this fit of a LanguageModule, which are noted from the first call on.

    Lightning registers its handlers behind `on_fit_start`, so that it is `on_train_start` that calls this first.
    """
    signals: StopSignals | None = module.stop_signals
    if signals is None or signal.getsignal(signal.SIGTERM) != signals.note:
        signals = module.stop_signals = StopSignals(module.trainer)
    return signals


def queue_again() -> None:
    """Puts this SLURM job back into the queue; it will go on from its last checkpoint."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"The job could not be queued again: {error}\nSubmit it anew with --ckpt_path last.",
            file=sys.stderr,
        )
