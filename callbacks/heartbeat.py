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


@technique(
    paper="MegaScale, arXiv:2402.15627, sections 4.3 and 5.1: stragglers, and the stacks of a job that hangs",
    observer=True,
)
class Heartbeat(Callback):
    """A hang and straggler watchdog: names slow ranks, and writes all stacks when a step does not end.

    All ranks take the same time for a step, since they wait for each other. What differs is the time before the
    backward pass: waiting for data, and the forward pass, measured on the device. Where figures are logged,
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
        self._armed = self._idle_since = self._begun = 0.0
        self._data_s = self._forward_s = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens this rank's file and starts the timer."""
        path = Path(trainer.default_root_dir, f"stacks.rank{trainer.global_rank}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._idle_since = time.perf_counter()
        self._forget()
        self._beat()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measures the wait for data; the forward pass begins."""
        self._begun = time.perf_counter()
        self._data_s += self._begun - self._idle_since
        if pl_module.device.type == "cuda":
            self._events.append((_event(), torch.cuda.Event(enable_timing=True)))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Measures the forward pass."""
        if self._events:
            self._events[-1][1].record()
        else:
            self._forward_s += time.perf_counter() - self._begun

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Restarts the timer; shares and logs the times where figures are logged."""
        self._batches += 1
        self._beat()
        if pl_module.logging_step:
            if trainer.world_size > 1:
                self._share(trainer, pl_module)
            self._forget()
        self._idle_since = time.perf_counter()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Beats."""
        self._beat()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Does not count validation as a wait for data."""
        self._idle_since = time.perf_counter()

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

    def _forget(self) -> None:
        self._data_s = self._forward_s = 0.0
        self._events, self._batches = [], 0

    def _share(self, trainer: Trainer, pl_module: LightningModule) -> None:
        forward = self._forward_s + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        own = torch.tensor([self._data_s, forward], device=pl_module.device) / self._batches
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


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
