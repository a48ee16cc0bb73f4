"""Goes back to before a loss spike, in the running process, and leaves out the data that caused it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from callbacks.shared.outliers import OutlierWindow
from callbacks.shared.snapshot_ring import SnapshotRing
from core.data.token_datamodule import TRAIN_ON
from core.errors import ConfigError
from core.files import durable
from core.technique import technique

if TYPE_CHECKING:
    from core.selection import Run, Selected

NONE = (math.inf, 0.0, 0.0, math.inf, math.inf)
"""No spike. Of one: how many steps came between the last look and it, loss, gradient norm, and their limits."""


@technique(
    paper="PaLM, arXiv:2204.02311, section 5.1: back about 100 steps, 200 to 500 batches skipped; "
    "window 128 and 6 sigma: OLMo-core's SkipStep optimizers",
    conflicts={
        "SkipStep": "both answer the same outliers, one by dropping the update, the other by going back",
        "NonFiniteGuard": "it ends the run at the first loss that is not finite, where SpikeRollback goes back",
        "DeepSpeedZero": "DeepSpeed steps the optimizer by itself, and keeps weights where snapshots do not see them",
    },
    # What is logged is logged of the spike; what decides about the next step decides about the one gone back to.
    after=("Heartbeat", "LossCurve", "MemoryMonitor", "ProgressBar", "TextSamples", "Throughput"),
    before=("BatchSizeRamp", "ExponentialMovingAverage", "GradientClip", "SequenceLengthSchedule"),
)
class SpikeRollback(Callback):
    """Rewinds to a snapshot from before a loss spike and goes on with later data.

    A spike is a step whose loss or gradient norm lies beyond `sigma` deviations of its rolling window, or is not
    finite (with fp16 gradients may overflow while the loss scale is being found: only the loss counts). Steps are
    judged on the device; the host looks where figures are logged, and before a validation, a checkpoint and the end
    of the run. What has been looked at and found good is copied into a ring of snapshots. At a spike all ranks go
    back to the newest that is `rewind_steps` older, or to the oldest. The steps count from there again; the data
    goes on behind what was read since, `skip_batches` further than the snapshot at least.

    A run is in trouble until it is `rewind_steps` beyond its last spike. Spikes until then count as tries, and the
    rate is lowered. All is written to `spike_rollbacks.json` in the run folder, to stderr, and logged as
    `spike_rollback/rollbacks`, the number so far. metrics.csv holds the steps that count.

    A snapshot in memory costs each rank what it holds of weights and optimizer state, with AdamW 12 bytes a
    parameter; at the defaults there are three. They end with the process: a resumed run begins a new ring where it
    was resumed, and does what the uninterrupted one would have done at spikes that come later than `rewind_steps` +
    `snapshot_every_n_steps` from there. Snapshots on disk (`snapshots/` in the run folder, a file for each rank) are
    taken up again on as many ranks, and the run is the same in any case.

    Args:
        window: Steps of history; at least 2. No outlier is looked for until it is full.
        sigma: Standard deviations above the rolling mean that count as an outlier.
        rewind_steps: Optimizer steps to go back before the spike, at least.
        skip_batches: Batches (of a whole optimizer step) from the snapshot on that are not trained on again, those
            read since among them.
        retries: Rewinds in one trouble; at the next spike the run stops.
        rate_factor: What the learning rate is multiplied by for each try, until the trouble is over.
        snapshot_every_n_steps: Optimizer steps between snapshots, which are taken where figures are logged.
        on_disk: Whether snapshots are kept on disk rather than in memory.

    Raises:
        ConfigError: If a value is out of range, the data module cannot skip batches, or there are no tries left.

    Example:
        trainer:
          callbacks+:
            - class_path: SpikeRollback
              init_args: {window: 128, sigma: 6.0, rewind_steps: 100, skip_batches: 200}
    """

    def __init__(
        self,
        window: int = 128,
        sigma: float = 6.0,
        rewind_steps: int = 100,
        skip_batches: int = 200,
        retries: int = 3,
        rate_factor: float = 1.0,
        snapshot_every_n_steps: int = 50,
        on_disk: bool = False,
    ) -> None:
        if window < 2 or not sigma > 0 or rewind_steps < 1 or snapshot_every_n_steps < 1:
            raise ConfigError(
                "SpikeRollback takes window >= 2, sigma > 0, rewind_steps >= 1 and snapshot_every_n_steps >= 1, not "
                f"{window}, {sigma}, {rewind_steps} and {snapshot_every_n_steps}."
            )
        if skip_batches < 0 or retries < 1 or not 0 < rate_factor <= 1:
            raise ConfigError(
                "SpikeRollback takes skip_batches >= 0, retries >= 1 and rate_factor above 0 and at most 1, not "
                f"{skip_batches}, {retries} and {rate_factor}."
            )
        self.rewind_steps, self.skip_batches, self.retries = rewind_steps, skip_batches, retries
        self.rate_factor, self.snapshot_every_n_steps = rate_factor, snapshot_every_n_steps
        self.on_disk = on_disk
        self.rollbacks: list[dict[str, Any]] = []
        self._window = OutlierWindow(2, window, sigma)
        self._first, self._unseen = torch.tensor(NONE), 0  # spike, steps since the last look
        self._scaled = False
        self._ring = SnapshotRing(rewind_steps)
        self._restored: dict[str, Any] = {}

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields that the data cannot be skipped."""
        for item in run.selected:
            if item.key == "data" and not hasattr(item.target, "skip_batches"):
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
        """Goes on from there; snapshots are looked for when training starts."""
        self._window.load_state_dict(state_dict["window"])
        self._first = state_dict["first"].to(self._first.device, copy=True)
        self._unseen, self.rollbacks = state_dict["unseen"], list(state_dict["rollbacks"])
        self._restored = state_dict["ring"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Moves the window to the device, and finds the snapshots of a resumed run."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not hasattr(data, "skip_batches"):
            raise ConfigError(
                f"SpikeRollback skips batches, which {type(data).__name__} cannot.\n{TRAIN_ON}."
            )
        self._window.to(pl_module.device)
        self._first = self._first.to(pl_module.device)
        self._scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        folder = Path(trainer.default_root_dir, "snapshots") if self.on_disk else None
        self._ring = SnapshotRing(self.rewind_steps, folder)
        self._ring.find(trainer, self._restored)
        self._set_rate(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Takes the first snapshot, once every callback has begun."""
        if self._ring or batch_idx % trainer.accumulate_grad_batches:
            return
        if not bool(self._first[0].isfinite()):  # else it was resumed in the middle of a spike
            self._ring.add(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Judges the step, on the device."""
        loss, norm = pl_module.step_loss, pl_module.gradient_norm(optimizer)
        outlier, figures, limits = self._window.take(loss, norm)
        if self._scaled:
            outlier = outlier & (figures[1].isfinite() | ~figures[0].isfinite())
        now = torch.cat((figures.new_full((1,), self._unseen), figures, limits))
        self._first = torch.where(self._first[0].isfinite() | ~outlier, self._first, now)
        self._unseen += 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks whether there was a spike, where the host waits anyway."""
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        if self._looks(trainer, pl_module.logging_step):
            step = trainer.global_step
            if (spike := self._seen(trainer, pl_module)) is not None:
                self._roll_back(trainer, spike)
            elif pl_module.logging_step:
                _log(trainer, len(self.rollbacks), step)
                if step // self.snapshot_every_n_steps != self._ring.newest // self.snapshot_every_n_steps:
                    self._ring.add(trainer)
        self._set_rate(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the files of the snapshots that the checkpoint knows of."""
        self._ring.hold()

    def _looks(self, trainer: Trainer, logging_step: bool) -> bool:
        """Returns whether the host looks behind this step; all ranks come to the same."""
        if logging_step or trainer.global_step == trainer.max_steps:
            return True
        if (
            trainer.received_sigterm
        ):  # snapshots in memory end here; those on disk wait for the look that was to come
            return not self.on_disk
        loop, fetcher, step = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher, trainer.global_step
        if loop._num_ready_batches_reached() or loop._should_check_val_fx(fetcher):
            return True
        # ours, and Lightning's ModelCheckpoint
        every = (
            getattr(saver, name, 0)
            for saver in trainer.checkpoint_callbacks
            for name in ("every_n_steps", "_every_n_train_steps")
        )
        return any(n and step % n == 0 for n in every)

    def _seen(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any] | None:
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
        """Returns the tries that were made in the trouble that a step is in; 0: in none."""
        last = self.rollbacks[-1] if self.rollbacks else None
        return last["try"] if last and step <= last["step"] + self.rewind_steps else 0

    def _set_rate(self, trainer: Trainer) -> None:
        module: Any = trainer.lightning_module
        module.rate_factors["SpikeRollback"] = self.rate_factor ** self._tries(trainer.global_step + 1)

    def _roll_back(self, trainer: Trainer, spike: dict[str, Any]) -> None:
        now, tries = trainer.global_step, self._tries(spike["step"]) + 1
        told = (
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
                f"{told}\n{why}. Resume from an earlier checkpoint with a lower learning rate,\nor other data."
            )
        rollbacks = self.rollbacks
        step = self._ring.go_back(trainer, spike["step"] - self.rewind_steps)
        done = {**spike, "seen_at_step": now, "rewound_to_step": step, "try": tries}
        done["batches_skipped"] = max(now - step, self.skip_batches)
        self.rollbacks = [*rollbacks, done]
        self._first, self._unseen = torch.tensor(NONE, device=self._first.device), 0
        if more := done["batches_skipped"] - (now - step):
            trainer.datamodule.skip_batches(more * trainer.accumulate_grad_batches)  # type: ignore[attr-defined]
        trainer.fit_loop.epoch_loop._batches_that_stepped = step - 1  # Lightning adds one behind the batch
        _log(trainer, len(self.rollbacks), now)
        for logger in trainer.loggers:
            if hasattr(logger, "go_back"):
                logger.go_back(step)
        self._tell(trainer, told, done)

    def _tell(self, trainer: Trainer, told: str, done: dict[str, Any]) -> None:
        """Writes what was done to stderr and to the run folder."""
        if not trainer.is_global_zero:
            return
        rate = f", learning rate times {self.rate_factor ** done['try']:.3g}" if self.rate_factor < 1 else ""
        print(
            f"{told} Back to step {done['rewound_to_step']:,}, {done['batches_skipped']:,} batches further on"
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
        except OSError as error:  # no reason to lose a run
            print(f"{path} could not be written: {error}", file=sys.stderr)


def _log(trainer: Trainer, rollbacks: int, step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics({"spike_rollback/rollbacks": float(rollbacks)}, step=step)
    trainer.callback_metrics["spike_rollback/rollbacks"] = torch.tensor(float(rollbacks))
