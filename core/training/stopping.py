"""SIGTERM, and SLURM's notice that the time is up, end a run on all ranks after the same optimizer step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from torch import Tensor

from core import lightning_compat


class StopSignals:
    """Replaces Lightning's signal handlers, which save or communicate within a step and wait for the device in each step.

    A signal is recorded. A single rank ends after the step; several ranks sum up their records in logging steps.
    Lightning ends the run at the end of that batch, and calls `on_exception` of the callbacks. Under SLURM, SIGUSR1
    (`#SBATCH --signal=USR1@120`) also puts the job back into the queue. See :func:`listen`; Lightning puts the old
    handlers back.

    Attributes:
        requeue: Whether the job is to be queued again.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.requeue = trainer, False
        # Ranks agree on an earlier signal as well.
        self.received = lightning_compat.take_over_sigterm(trainer)
        signal.signal(signal.SIGTERM, self.record)
        if SLURMEnvironment.detect():
            signal.signal(signal.SIGUSR1, self.record)

    def record(self, number: int, frame: Any) -> None:
        """Records a signal; Python calls this as the signal handler."""
        if not self.received and self.trainer.strategy.launcher is not None:
            self.trainer.strategy.launcher.kill(number)  # the ranks that this process has started
        self.received = True
        self.requeue |= number == signal.SIGUSR1

    def poll(self, logging_step: bool, reduce: Callable[..., Tensor], device: Any) -> bool:
        """Ends the run if any rank has received a signal; several ranks exchange this in logging steps only.

        Returns:
            Whether it ends; the same on every rank.
        """
        stops, requeue = self.received, self.requeue
        if self.trainer.world_size > 1:
            if not logging_step:
                return False
            notes = torch.tensor([float(stops), float(requeue)], device=device)
            stops, requeue = (count > 0 for count in reduce(notes, reduce_op="sum").tolist())
        if stops:  # signals that arrive from now on are exchanged in the next logging step
            self.received, self.requeue = True, self.requeue or requeue
            lightning_compat.end_by_sigterm(self.trainer)
        return stops


def listen(module: Any) -> StopSignals:
    """Returns the signals of this fit of a LanguageModule, which are recorded from the first call on.

    Lightning registers its handlers behind `on_fit_start`, so that it is `on_train_start` that calls this first.
    """
    signals: StopSignals | None = module.stop_signals
    if signals is None or signal.getsignal(signal.SIGTERM) != signals.record:
        signals = module.stop_signals = StopSignals(module.trainer)
    return signals
