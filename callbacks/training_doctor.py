"""Says what is wrong with a run, on which evidence, and what to switch on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from torch.optim import Optimizer

from core.errors import ConfigError
from core.technique import technique
from core.training.figures import log_figures
from toolkit.diagnosis import Case, Finding, History, diagnose, read_config, write_findings, write_remedy
from toolkit.diagnosis.probes import Probes
from toolkit.trials import say

EARLY_STEPS, SELDOM = 1000, 10
"""From this step on only every tenth examined step is compared with leyden's own parts, which takes longer than the rest."""


@technique(
    paper="silent errors: TrainCheck, arXiv:2506.14813; update-to-weight ratios: Karpathy, CS231n; spikes: PaLM, arXiv:2204.02311, 5.1",
    after=("WeightMonitor", "Throughput", "RoutingMonitor"),
    observer=True,
)
class TrainingDoctor(Callback):
    """Says in a line each what is wrong with a run: the cause, since when, the evidence, and what to switch on.

    It reads what the run logs: losses and rates, and what monitors add, such as `WeightMonitor`, `ActivationMonitor`,
    `AttentionMonitor`, `RoutingMonitor`, `GradientNoiseScale` and `StepTime`; and what it measures itself, as
    `doctor/...`. Before the first step: labels against inputs, rows that come again, order, validation text among the
    training text, ids against the tokenizer and the source, weights, and whether logits change with tokens that they must not depend on. In
    the 1st, 2nd, 4th logged step and so on, and every `every_n_steps`: whether the gradients of the step are those of its loss, and whether all
    weights that have one change. Such a step takes four to five times as long. All others cost nothing. Of a run with parts
    that are not leyden's, rows, network, loss, rate and update are also compared with what leyden's own would do, in each
    examined step of the first 1,000, then in every tenth: such a step takes about eleven times as long.

    Each cause is said once. What to switch on is written to `doctor/remedy-CAUSE.yaml` in the run folder, for
    `--config`. `python -m core doctor RUN` says the same of a finished run. A diagnosis is a hint and no proof:
    `tests/benchmarks/RESULTS.md` says how often it is right.

    What needs full weights is measured on one process and under DDP; under other strategies it is left out. An examined step takes memory for two more copies of
    the weights.

    Args:
        every_n_steps: Optimizer steps between two that are examined, of those that are logged.
        batches: Batches of 8 training rows that are read before the first step; 0: none.
        least_confidence: Findings below are not said, 0 to 1.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: WeightMonitor
            - class_path: TrainingDoctor
              init_args: {every_n_steps: 300}
    """

    def __init__(self, every_n_steps: int = 300, batches: int = 64, least_confidence: float = 0.6) -> None:
        if every_n_steps < 1 or batches < 0 or not 0 <= least_confidence <= 1:
            raise ConfigError(
                "TrainingDoctor takes every_n_steps >= 1, batches >= 0 and least_confidence from 0 to 1, "
                f"not {every_n_steps}, {batches} and {least_confidence}."
            )
        self.every_n_steps, self.batches, self.least_confidence = every_n_steps, batches, least_confidence
        self.history = History()
        self._probes = Probes(batches)
        self._config: dict[str, Any] = {}
        self._told: list[str] = []
        self._fresh: dict[str, Any] = {}
        self._start: dict[str, float] = {}
        self._examining = self._resumes = self._saves = False
        self._resumed: Any = None
        self._settings: str | None = None  # of the checkpoint
        self._changed = False
        self._sizes: list[float] = []
        self._state: list[float] = []
        self._validation: dict[str, float] = {}
        self._next = self._every = 0
        self._began = self._saving = self._saved = 0.0
        self._seen = 0  # steps, when a batch ended last

    def state_dict(self) -> dict[str, Any]:
        """Returns the figures so far, and which causes were said."""
        state = {"history": self.history.state_dict(), "told": list(self._told), "next": self._next}
        settings = Case(self.history, self._config).rate_settings
        return {**state, "probes": self._probes.state_dict(), "settings": settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with those of a checkpoint."""
        self.history.load_state_dict(state_dict["history"])
        self._told, self._next = list(state_dict["told"]), state_dict["next"]
        self._probes.load_state_dict(state_dict.get("probes", {"rows": [-1], "norms": []}))
        self._settings = state_dict.get("settings")

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Looks at the data and at what the network sees."""
        self._config = read_config(Path(trainer.default_root_dir))
        self._every = self.every_n_steps // trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._fresh = dict(trainer.callback_metrics)
        is_fresh = not self.history.names()
        state = [] if is_fresh else self._state
        self._start = self._probes.start(trainer, pl_module, is_fresh, self._config, state)
        self._resumes, self._seen = not is_fresh, trainer.global_step
        self._changed = self._settings not in (None, Case(self.history, self._config).rate_settings)
        self._began, self._saving, self._saved = time.monotonic(), 0.0, 0.0
        if missing := self._start.get("doctor/not_optimized"):  # at once: there may be no first step
            log_figures(trainer, {"doctor/not_optimized": missing})
            self._take(trainer)
            self._tell(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Starts the clock of a checkpoint that is written in training; keeps sizes of the weights in it."""
        self._saving = self._saving or time.monotonic()
        self._probes.pause()
        checkpoint["training_doctor_weights"] = self._probes.sizes(trainer, pl_module)
        checkpoint["training_doctor_state"] = self._probes.kept_state()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Takes the sizes of its weights, and of the optimizer's state."""
        self._sizes = list(checkpoint.get("training_doctor_weights", ()))
        self._state = list(checkpoint.get("training_doctor_state", ()))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keeps the micro-batches of a step that is examined."""
        if self._stop_clock():
            log_figures(trainer, {"time/checkpoint_share": self._saved / (time.monotonic() - self._began)})
        if self._resumes:
            self._resumes, self._resumed = False, batch
            if (lost := self._probes.not_restored(trainer, pl_module, self._sizes)) > 0:
                log_figures(trainer, {"doctor/not_restored": lost})
        self._probes.begin_batch(batch)
        logged, rest = divmod(trainer.global_step + 1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if not rest and self._is_due(logged):
            early = trainer.global_step < EARLY_STEPS
            self._probes.keep(
                pl_module, batch, batch_idx, compares=early or logged // max(1, self._every) % SELDOM == 0
            )
            self._examining = True

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Stops the clock of a checkpoint that was written before the validation."""
        self._probes.pause()
        self._saves = self._stop_clock()

    def _stop_clock(self) -> bool:
        """Adds the time since a checkpoint was begun; returns whether one was written since the last step."""
        if self._saving:
            self._saved += time.monotonic() - self._saving
        wrote, self._saving, self._saves = bool(self._saving) or self._saves, 0.0, False
        return wrote

    def _is_due(self, logged: int) -> bool:
        """Returns whether the n-th logged step is examined: the 1st, 2nd, 4th..., then every so many steps."""
        every = max(1, self._every)
        return logged % every == 0 or (logged < every and logged & (logged - 1) == 0)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Computes the gradients of the step again, where it is examined."""
        if self._resumed is not None:
            self._compare_with_end(trainer, optimizer)
            if self._changed:
                log_figures(trainer, {"doctor/settings_changed": 1.0})
        if between := self._probes.between(pl_module):
            log_figures(trainer, between)
        if self._examining:
            self._probes.before_step(trainer, pl_module)

    def _compare_with_end(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Logs what is odd in the first step after a resume; else nothing: it logs what it would have without a stop."""
        batch, self._resumed = self._resumed, None
        if self._probes.is_odd(batch, optimizer, self.history.series("train/lr").values.tolist()):
            anew = float(self._probes.rows.begins_anew(batch))
            log_figures(
                trainer, {"doctor/resumed_at": trainer.global_step + 1.0, "doctor/rows_of_start": anew}
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs what was measured, and looks at what was logged."""
        stepped = trainer.global_step != self._seen
        if stepped and (compared := self._probes.end_batch(batch, pl_module.logging_step)):
            log_figures(trainer, compared)
        self._seen = trainer.global_step
        if self._examining and self._probes.stepped:
            self._examining = False
            log_figures(trainer, self._probes.after_step(trainer, pl_module) | self._start)
            self._start = {}
        elif not pl_module.logging_step:
            return
        self._take(trainer)
        if self._jumped():
            log_figures(trainer, self._probes.anchor(pl_module))
            self._take(trainer)
        if trainer.global_step >= self._next:
            self._next = trainer.global_step + max(1, trainer.global_step // 50)
            self._tell(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Compares the first batch of a validation."""
        if not batch_idx and not trainer.sanity_checking and trainer.state.fn == "fit":
            self._validation = self._probes.in_validation(batch)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Takes the figures of the validation."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            if self._validation:
                log_figures(trainer, self._validation)
            self._take(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Looks at the finished run."""
        self._probes.close()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        meant = any(isinstance(one, EarlyStopping | Timer) for one in callbacks)  # also a user's own kind
        if trainer.should_stop and trainer.global_step < trainer.max_steps and not meant:
            log_figures(trainer, {"doctor/ended_at": float(trainer.global_step)})
        self._take(trainer)
        self._tell(trainer)

    def findings(self) -> list[Finding]:
        """Returns what is found in the figures so far, the most certain first."""
        found = diagnose(Case(self.history, self._config))
        return [finding for finding in found if finding.confidence >= self.least_confidence]

    def _take(self, trainer: Trainer) -> None:
        """Adds the figures that were logged since the last time: `callback_metrics` keeps the others."""
        now = dict(trainer.callback_metrics)
        new = {name: float(value) for name, value in now.items() if self._fresh.get(name) is not value}
        self._fresh = now
        self.history.add(trainer.global_step, new)

    def _jumped(self) -> bool:
        losses = self.history.series("train/loss").values
        if len(losses) < 12 or self.history.series("train/loss").steps[-1] != self.history.last_step:
            return False
        before = torch.tensor(losses[-11:-1])
        return bool(losses[-1] > 1.1 * before.median())

    def _tell(self, trainer: Trainer) -> None:
        found, folder = self.findings(), Path(trainer.default_root_dir)
        new = [finding for finding in found if finding.cause not in self._told]
        for finding in new:
            self._told.append(finding.cause)
            say(trainer, self, finding.line())
            if trainer.is_global_zero and finding.remedy:
                write_remedy(finding, folder)
        if trainer.is_global_zero and new:
            write_findings(found, folder)
