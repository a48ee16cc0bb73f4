"""Rolls training back to before a loss spike, in the running process, and skips the data that caused it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from core import durable
from core.contracts import GoesBack, ScalesLosses, SkipsBatches
from core.data.token_datamodule import TRAIN_ON
from core.errors import ConfigError, deprecated
from core.lightning_compat import (
    is_accumulating,
    is_last_batch,
    set_logged_steps,
    steps_between_saves,
    validates_after_batch,
)
from core.technique import technique
from toolkit.outliers import OutlierWindow
from toolkit.snapshot_ring import SnapshotRing
from toolkit.trials import offloaded

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

NONE = (math.inf, 0.0, 0.0, math.inf, math.inf)
"""No spike. Of a spike: steps since the last look, loss, gradient norm, and their limits."""


@technique(
    paper="PaLM, arXiv:2204.02311, section 5.1: back about 100 steps, 200 to 500 batches skipped; "
    "6 sigma: OLMo-core's SkipStep optimizers",
    conflicts={
        "SkipStep": "both react to the same outliers, one by dropping the update, the other by going back",
        "NonFiniteGuard": "it ends the run at the first loss that is not finite, where SpikeRollback goes back",
    },
    # Callbacks that log see the spike; callbacks that decide about the next step see the step gone back to.
    after=("Heartbeat", "LossCurve", "MemoryMonitor", "ProgressBar", "TextSamples", "Throughput"),
    before=("BatchSizeRamp", "ExponentialMovingAverage", "GradientClip", "SequenceLengthSchedule"),
)
class SpikeRollback(Callback):
    """Rolls training back to a snapshot from before a loss spike, and skips the data that caused it.

    A spike is a step whose loss is more than `sigma` deviations above the mean of its rolling window, or whose gradient
    norm is, and is also `norm_factor` times its mean, or in which one of them is not finite (with fp16, gradients may
    overflow while the loss scale is being found: only the loss counts). Steps are judged on the device; the host looks
    where figures are logged, and before a validation, a checkpoint and the end of the run. Steps that were found good
    are copied into a ring of snapshots. At a spike all ranks go back to the newest snapshot that is `rewind_steps`
    older, or to the oldest. Steps count from there again; the data continues after what was read, at least
    `skip_batches` after the snapshot.

    A rollback counts as a retry until training is `rewind_steps` beyond its last spike: each further spike until then
    is one retry more, and the learning rate is lowered. Rollbacks are written to `spike_rollbacks.json` in the run folder, to
    stderr, and logged as `spike_rollback/rollbacks`, the number so far. metrics.csv holds the steps that count.

    A snapshot in memory costs each rank as much as its weights and optimizer state, with AdamW 12 bytes a
    parameter; with the defaults there are three. They end with the process: a resumed run begins a new ring, and does
    what the uninterrupted one would have done at spikes later than `rewind_steps` + `snapshot_every_n_steps` from
    there. Snapshots on disk (`snapshots/` in the run folder, a file for each rank) are used again on as many ranks,
    and the run is the same in any case.

    Gradient norms of ordinary steps have a long tail: in clean runs of 500 steps they came up to 18 deviations above
    their mean and to 6.3 times the mean (a window of 40), losses to 3.1 deviations; garbled batches raised the loss by
    9.9 deviations at least, in their first step (`tests.benchmarks.spike_rollback_defaults`). While the window holds steps in which
    the loss still fell fast, deviations are large and a bad batch hides among them: a shorter window sees it earlier in a run, a longer
    one has steadier limits (`tests.benchmarks.guilty_document`).

    Args:
        window: Steps of history; at least 2. No outlier is looked for until it is full.
        sigma: Standard deviations above the rolling mean that count as an outlier.
        rewind_steps: Optimizer steps to go back before the spike, at least.
        skip_batches: Batches (each of a full optimizer step) after the snapshot that are not trained on again,
            including those read since.
        retries: Rollbacks for successive spikes; at the next spike the run stops.
        lr_factor: What the learning rate is multiplied by for each retry, until training is beyond the spike.
        snapshot_every_n_steps: Optimizer steps between snapshots, which are taken where figures are logged.
        on_disk: Whether snapshots are kept on disk rather than in memory.
        norm_factor: How many times its rolling mean a gradient norm must be to count as an outlier; 1: only
            `sigma` decides.
        rate_factor: Deprecated: `lr_factor`, if given.

    Raises:
        ConfigError: If a value is out of range, the data module cannot skip batches, or no retries are left.

    Example:
        trainer:
          callbacks+:
            - class_path: SpikeRollback
              init_args: {window: 64, sigma: 6.0, rewind_steps: 100, skip_batches: 200}
    """

    def __init__(
        self,
        window: int = 64,
        sigma: float = 6.0,
        rewind_steps: int = 100,
        skip_batches: int = 200,
        retries: int = 3,
        lr_factor: float = 1.0,
        snapshot_every_n_steps: int = 50,
        on_disk: bool = False,
        norm_factor: float = 10.0,
        rate_factor: float | None = None,
    ) -> None:
        if rate_factor is not None:
            deprecated("SpikeRollback(rate_factor=...)", "lr_factor")
            lr_factor = rate_factor
        if window < 2 or not sigma > 0 or rewind_steps < 1 or snapshot_every_n_steps < 1:
            raise ConfigError(
                "SpikeRollback takes window >= 2, sigma > 0, rewind_steps >= 1 and snapshot_every_n_steps >= 1, not "
                f"{window}, {sigma}, {rewind_steps} and {snapshot_every_n_steps}."
            )
        if skip_batches < 0 or retries < 1 or not 0 < lr_factor <= 1:
            raise ConfigError(
                "SpikeRollback takes skip_batches >= 0, retries >= 1 and lr_factor above 0 and at most 1, not "
                f"{skip_batches}, {retries} and {lr_factor}."
            )
        if not 1 <= norm_factor < math.inf:
            raise ConfigError(f"SpikeRollback takes a norm_factor from 1 upwards, not {norm_factor}.")
        self.rewind_steps, self.skip_batches, self.retries = rewind_steps, skip_batches, retries
        self.lr_factor, self.snapshot_every_n_steps = lr_factor, snapshot_every_n_steps
        self.on_disk = on_disk
        self.rollbacks: list[dict[str, Any]] = []
        self._window = OutlierWindow(2, window, sigma, rises=(0.0, norm_factor - 1))
        self._first, self._unseen = torch.tensor(NONE), 0  # spike, steps since the last look
        self._scaled = False
        self._ring = SnapshotRing(rewind_steps)
        self._restored: dict[str, Any] = {}

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields that the data cannot be skipped, or the state cannot be restored."""
        yield from offloaded(run)
        for item in run.selected:
            if item.key == "data" and not issubclass(item.target, SkipsBatches):
                yield f"it skips batches, which {item.name} cannot: set --data=PretrainDataModule or MixtureDataModule"

    def state_dict(self) -> dict[str, Any]:
        """Returns the window, what was done, and which snapshots there are."""
        return {
            "window": self._window.state_dict(),
            "first": self._first.cpu().clone(),
            "unseen": self._unseen,
            "rollbacks": list(self.rollbacks),
            "ring": self._ring.state_dict() if self._ring else self._restored,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores it; snapshots are looked for when training starts."""
        self._window.load_state_dict(state_dict["window"])
        self._first = state_dict["first"].to(self._first.device, copy=True)
        self._unseen, self.rollbacks = state_dict["unseen"], list(state_dict["rollbacks"])
        self._restored = state_dict["ring"]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Moves the window to the device, and finds the snapshots of a resumed run."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, SkipsBatches):
            raise ConfigError(
                f"SpikeRollback skips batches, which {type(data).__name__} cannot.\n{TRAIN_ON}."
            )
        self._window.to(pl_module.device)
        self._first = self._first.to(pl_module.device)
        precision: Any = trainer.precision_plugin
        self._scaled = isinstance(precision, ScalesLosses) and precision.scaler is not None
        folder = Path(trainer.default_root_dir, "snapshots") if self.on_disk else None
        self._ring = SnapshotRing(self.rewind_steps, folder)
        self._ring.find(trainer, self._restored)
        self._set_rate(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Takes the first snapshot, once every callback has begun."""
        if self._ring or batch_idx % trainer.accumulate_grad_batches:
            return
        if not bool(self._first[0].isfinite()):  # else it was resumed in the middle of a spike
            self._ring.add(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Judges the step, on the device."""
        loss, norm = pl_module.step_loss, pl_module.gradient_norm(optimizer)
        outlier, figures, limits = self._window.take(loss, norm)
        if self._scaled:
            outlier = outlier & (figures[1].isfinite() | ~figures[0].isfinite())
        now = torch.cat((figures.new_full((1,), self._unseen), figures, limits))
        self._first = torch.where(self._first[0].isfinite() | ~outlier, self._first, now)
        self._unseen += 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks whether there was a spike, where the host waits anyway."""
        if is_accumulating(trainer):
            return
        if self._is_checked_on_host(trainer, pl_module.logging_step):
            step = trainer.global_step
            if (spike := self._find_spike(trainer, pl_module)) is not None:
                self._roll_back(trainer, spike)
            elif pl_module.logging_step:
                _log(trainer, len(self.rollbacks), step)
                if step // self.snapshot_every_n_steps != self._ring.newest // self.snapshot_every_n_steps:
                    self._ring.add(trainer)
        self._set_rate(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keeps the files of the snapshots that the checkpoint knows of."""
        self._ring.hold()

    def _is_checked_on_host(self, trainer: Trainer, logging_step: bool) -> bool:
        """Returns whether the host reads the flag after this step, the same on all ranks."""
        if logging_step or trainer.global_step == trainer.max_steps:
            return True
        if (
            trainer.received_sigterm
        ):  # snapshots in memory end here; with those on disk a resumed run looks when it is due
            return not self.on_disk
        if is_last_batch(trainer) or validates_after_batch(trainer):
            return True
        step = trainer.global_step
        return any(
            every and step % every == 0 for every in map(steps_between_saves, trainer.checkpoint_callbacks)
        )

    def _find_spike(self, trainer: Trainer, pl_module: Any) -> dict[str, Any] | None:
        """Returns the first spike since the last look, of all ranks; None: there was none."""
        found, self._unseen, unseen = self._first[0].isfinite().float(), 0, self._unseen
        if trainer.world_size > 1:
            found = trainer.strategy.reduce(found, reduce_op="sum")
        if not bool(found):
            return None
        ranks = torch.as_tensor(pl_module.all_gather(self._first)).view(-1, len(NONE))
        index, loss, norm, loss_limit, norm_limit = ranks[ranks[:, 0].argmin()].tolist()
        return {
            "step": trainer.global_step - unseen + int(index) + 1,
            "loss": loss,
            "loss_limit": loss_limit,
            "gradient_norm": norm,
            "gradient_norm_limit": norm_limit,
        }

    def _tries(self, step: int) -> int:
        """Returns the retries so far at a step; 0: training is beyond the last spike."""
        last = self.rollbacks[-1] if self.rollbacks else None
        return last["try"] if last and step <= last["step"] + self.rewind_steps else 0

    def _set_rate(self, trainer: Trainer) -> None:
        module: Any = trainer.lightning_module
        module.lr_factors["SpikeRollback"] = self.lr_factor ** self._tries(trainer.global_step + 1)

    def _roll_back(self, trainer: Trainer, spike: dict[str, Any]) -> None:
        now, tries = trainer.global_step, self._tries(spike["step"]) + 1
        message = (
            f"SpikeRollback: step {spike['step']:,}: loss {spike['loss']:.4g} (limit {spike['loss_limit']:.4g}), "
            f"gradient norm {spike['gradient_norm']:.4g} (limit {spike['gradient_norm_limit']:.4g})."
        )
        if tries > self.retries or not self._ring:
            why = (
                f"The run has gone back as often as it may (retries: {self.retries})"
                if self._ring
                else "There is no snapshot to go back to: the run was resumed in the middle of a spike"
            )
            raise ConfigError(
                f"{message}\n{why}. Resume from an earlier checkpoint with a lower learning rate,\nor other data."
            )
        rollbacks = self.rollbacks
        step = self._ring.go_back(trainer, spike["step"] - self.rewind_steps)
        done = {**spike, "seen_at_step": now, "rewound_to_step": step, "try": tries}
        done["batches_skipped"] = max(now - step, self.skip_batches)
        self.rollbacks = [*rollbacks, done]
        self._first, self._unseen = torch.tensor(NONE, device=self._first.device), 0
        if more := done["batches_skipped"] - (now - step):
            trainer.datamodule.skip_batches(more * trainer.accumulate_grad_batches)  # type: ignore[attr-defined]
        set_logged_steps(trainer, step - 1)
        _log(trainer, len(self.rollbacks), now)
        for logger in trainer.loggers:
            if isinstance(logger, GoesBack):
                logger.go_back(step)
        self._report(trainer, message, done)

    def _report(self, trainer: Trainer, message: str, done: dict[str, Any]) -> None:
        """Writes what was done to stderr and to the run folder."""
        if not trainer.is_global_zero:
            return
        rate = f", learning rate times {self.lr_factor ** done['try']:.3g}" if self.lr_factor < 1 else ""
        print(
            f"{message} Back to step {done['rewound_to_step']:,}, {done['batches_skipped']:,} batches further on"
            f"{rate}; try {done['try']} of {self.retries}.",
            file=sys.stderr,
            flush=True,
        )
        plain = [
            {k: v if math.isfinite(v) else str(v) for k, v in rollback.items()} for rollback in self.rollbacks
        ]
        path = Path(trainer.default_root_dir, "spike_rollbacks.json")
        try:
            durable.write(path, json.dumps(plain, indent=1) + "\n")
        except OSError as error:  # the run continues
            print(f"{path} could not be written: {error}", file=sys.stderr)


def _log(trainer: Trainer, rollbacks: int, step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics({"spike_rollback/rollbacks": float(rollbacks)}, step=step)
    trainer.callback_metrics["spike_rollback/rollbacks"] = torch.tensor(float(rollbacks))
