"""Says which rank is slow, and where every rank stands when nothing moves any more."""

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


@technique(
    paper="MegaScale, arXiv:2402.15627, sections 4.3 and 5.1: stragglers, and the stacks of a job that hangs",
    watches=True,
)
class Heartbeat(Callback):
    """Names ranks that are slower than the others, and writes down all stacks when a step does not end.

    In step all ranks take the same time, since they wait for each other. What tells them apart is the time until
    the backward pass: waiting for data, and the forward pass, measured on the device. Where figures are logged,
    the ranks share their means since the last time: `heartbeat/slowest_rank` and
    `heartbeat/slowest_over_median`. Above `straggler` a warning names the rank, its machine and both times.
    (Strategies that shard weights wait for each other in the forward pass too; then only data waits show.)

    When no batch ends for `timeout_s`, each process writes the stacks of its threads to
    `stacks.rank0.txt`... in the run folder, once for each stall, also when it hangs in code that is not Python's.
    The run is not ended: the launcher or the process group's own timeout does that.

    Args:
        timeout_s: Seconds without the end of a batch, of training or validation, above the longest pause that is
            usual, such as for a checkpoint.
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
        """Opens this rank's file and begins to watch."""
        path = Path(trainer.default_root_dir, f"stacks.rank{trainer.global_rank}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._idle_since = time.perf_counter()
        self._forget()
        self._beat()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Counts the wait for data; the forward pass begins."""
        self._begun = time.perf_counter()
        self._data_s += self._begun - self._idle_since
        if pl_module.device.type == "cuda":
            self._events.append((_event(), torch.cuda.Event(enable_timing=True)))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Counts the forward pass."""
        if self._events:
            self._events[-1][1].record()
        else:
            self._forward_s += time.perf_counter() - self._begun

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Beats; shares and logs the times where figures are logged."""
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
        """Validation is no wait for data."""
        self._idle_since = time.perf_counter()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the watch; a file without stacks is removed."""
        if self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        path = Path(self._file.name)
        self._file = None
        if path.exists() and not path.stat().st_size:
            path.unlink()

    def _beat(self) -> None:
        """Puts the alarm off, at most some times within `timeout_s`: it costs a thread."""
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
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)
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
