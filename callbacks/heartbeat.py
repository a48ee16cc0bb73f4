"""A hang and straggler watchdog: names slow ranks, and writes all stacks when a step does not end."""

from __future__ import annotations

import faulthandler
import socket
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from core.errors import ConfigError
from core.technique import technique
from core.training.figures import log_figures
from toolkit.phase_clock import PhaseClock


@technique(
    paper="MegaScale, arXiv:2402.15627, sections 4.3 and 5.1: stragglers, and the stacks of a job that hangs",
    observer=True,
)
class Heartbeat(Callback):
    """A hang and straggler watchdog: names slow ranks, and writes all stacks when a step does not end.

    All ranks take the same time for a step, since they wait for each other. What differs is the time before the
    backward pass: waiting for data, and the forward pass, both measured on the device. Where figures are logged,
    the ranks share their means since the last time: `heartbeat/slowest_rank` and
    `heartbeat/slowest_over_median`. Above `straggler` a warning names the rank, its machine and both times.
    (Strategies that shard weights also synchronise in the forward pass: there, only slow data loading is detected.)

    When no batch ends for `timeout_s`, each process writes the stacks of its threads to
    `stacks.rank0.txt`... in the run folder, once for each stall, even when it hangs in native code. It does not end the
    run: the launcher or the timeout of the process group does.

    Args:
        timeout_s: Seconds without the end of a batch, of training or validation, longer than the longest usual
            pause, such as for a checkpoint.
        straggler: How many times the median of the ranks is an outlier; above 1.

    Raises:
        ConfigError: If an argument is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: Heartbeat
              init_args: {timeout_s: 600, straggler: 1.5}
    """

    def __init__(self, timeout_s: float = 600.0, straggler: float = 1.5) -> None:
        if timeout_s <= 0 or straggler <= 1:
            raise ConfigError(
                f"Heartbeat takes timeout_s > 0 and straggler > 1, not {timeout_s} and {straggler}."
            )
        self.timeout_s, self.straggler = timeout_s, straggler
        self._file: TextIO | None = None
        self._armed = 0.0
        self._clock = PhaseClock(torch.device("cpu"))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens this rank's file and starts the timer."""
        path = Path(trainer.default_root_dir, f"stacks.rank{trainer.global_rank}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._clock = PhaseClock(pl_module.device)
        self._clock.begin()
        self._beat()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measures the wait for data; the forward pass begins."""
        self._clock.mark("data")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Measures the forward pass."""
        self._clock.mark("forward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Restarts the timer; shares and logs the times where figures are logged."""
        self._clock.mark("backward")
        self._clock.end_step()
        self._beat()
        if not pl_module.logging_step:
            return
        if trainer.world_size > 1:
            self._share(trainer, pl_module)
            self._clock.mark("sharing")
        else:
            self._clock.begin()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Beats."""
        self._beat()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Does not count validation as a wait for data."""
        self._clock.mark("validation")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops the timer; a file without stacks is removed."""
        if self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        path = Path(self._file.name)
        self._file = None
        if path.exists() and not path.stat().st_size:
            path.unlink()

    def _beat(self) -> None:
        """Restarts the timer, at most a few times within `timeout_s`: each restart starts a thread."""
        now = time.perf_counter()
        if self._file is not None and now - self._armed > self.timeout_s / 20:
            faulthandler.dump_traceback_later(self.timeout_s, file=self._file)
            self._armed = now

    def _share(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = self._clock.read()
        phases = [phase for batch in batches for phase in batch]
        sums = [
            sum(end - begin for name, begin, end in phases if name == kind) for kind in ("data", "forward")
        ]
        own = torch.tensor(sums, device=pl_module.device) / max(len(batches), 1)
        times = torch.as_tensor(pl_module.all_gather(own)).view(-1, 2).cpu()
        totals = times.sum(dim=1)
        slowest = int(totals.argmax())
        ratio = float(totals[slowest] / totals.median().clamp(min=1e-9))
        figures = {"heartbeat/slowest_rank": float(slowest), "heartbeat/slowest_over_median": ratio}
        log_figures(trainer, figures)
        if ratio > self.straggler:
            where = socket.gethostname() if slowest == trainer.global_rank else ""
            where = trainer.strategy.broadcast(where, src=slowest)
            data, forward = times[slowest].tolist()
            rank_zero_warn(
                f"Heartbeat, step {trainer.global_step}: rank {slowest} on {where} takes {ratio:.1f} times the median "
                f"of the ranks before its backward pass: {data:.3f} s for data, {forward:.3f} s forward per batch."
            )
