"""The progress of a run: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table

from core.errors import ConfigError
from core.technique import technique

ROOMY = 90
"""Columns of a terminal from which on there is room for the epoch beside the bar."""


@technique(
    paper="rich, rich.readthedocs.io/en/stable/live.html",
    after=("Throughput",),
    maturity="stable",
    observer=True,
)
class ProgressBar(lightning_callbacks.ProgressBar):
    """Shows step, loss, validation loss, epoch, tokens per second (of `Throughput`) and the time left.

    On a terminal a separate thread redraws the bar; what is printed appears above it. Elsewhere plain lines are
    printed: at the first logged step, then at each tenth of the run, or after `line_every_s`. A training step
    costs two tests of attributes; figures are read in logged steps only.

    The epoch is how often the data have been gone through (`epoch/NAME`): 1.25 is a quarter of the second time, 0.40
    to 2.10 the least and the most of several sources. Where the data module does not say, it is Lightning's, from 1 on.

    The time left is until `max_steps` or `max_epochs`, whichever comes first, and from the mean time per step,
    validation and checkpoints included, since the first logged step (up to that, since the first one).

    Args:
        redraws_per_s: How often the bar is redrawn; at most 10.
        line_every_s: Seconds between two plain lines at most, where there is no terminal.

    Raises:
        ConfigError: If `redraws_per_s` is not above 0 and at most 10, or `line_every_s` is below 0.

    Example:
        trainer:
          callbacks+:
            - class_path: ProgressBar
              init_args: {redraws_per_s: 5, line_every_s: 60}
    """

    def __init__(self, redraws_per_s: float = 5.0, line_every_s: float = 60.0) -> None:
        super().__init__()
        if not 0 < redraws_per_s <= 10 or line_every_s < 0:
            raise ConfigError(
                "ProgressBar takes 0 < redraws_per_s <= 10 and line_every_s >= 0, "
                f"not {redraws_per_s} and {line_every_s}."
            )
        self._redraws_per_s = redraws_per_s
        self._line_every_s = line_every_s
        self._enabled = True
        self._live: Live | None = None
        self._started: tuple[int, float] | None = None  # step and time from which the speed is computed
        self._total = float("inf")
        self._figures: dict[str, float] = {}
        self._epoch = ""
        self._shown: tuple[int, float] | None = None  # tenth of the run and time of the last figures
        self._pass: tuple[str, int, float] | None = None  # what passes over data, batches done, of how many

    # -- what Lightning asks of a bar --------------------------------------------------------------

    def disable(self) -> None:
        """Shows nothing from now on."""
        self._stop()
        self._enabled = False

    def enable(self) -> None:
        """Shows again what comes."""
        self._enabled = True

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Prints above the bar; takes what `print` takes."""
        if self._live is not None and not kwargs.get("file"):
            text = sep.join(str(arg) for arg in args) + kwargs.get("end", "\n")
            self._live.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        else:
            print(*args, sep=sep, **kwargs)

    # -- training ----------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins with the step that the run begins or continues with."""
        self._started = self._shown = None
        self._figures, self._epoch = {}, ""
        self._total = trainer.estimated_stepping_batches
        self._start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Updates the number of steps of the run: epochs may differ in length."""
        self._total = trainer.estimated_stepping_batches

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the end of the first step; fetches the figures of logged ones."""
        if self._started is None:
            self._started = (trainer.global_step, time.monotonic())
        if pl_module.logging_step and self._enabled:
            self._show_figures(trainer, time.monotonic())

    def _show_figures(self, trainer: Trainer, now: float) -> None:
        tenth = 0 if self._total == float("inf") else int(10 * trainer.global_step / self._total)
        if self._shown is not None:
            seconds = 1 / self._redraws_per_s if self._live else self._line_every_s
            if now - self._shown[1] < seconds and (self._live or tenth == self._shown[0]):
                return
        first, self._shown = self._shown is None, (tenth, now)
        metrics = trainer.callback_metrics
        for short, name in (("loss", "train/loss"), ("tokens/s", "throughput/tokens_per_second")):
            if name in metrics:
                self._figures[short] = float(metrics[name])
        self._epoch = _epoch(trainer)
        if self._live is None:
            self._print_line(trainer.global_step)
        if first:
            self._started = (trainer.global_step, now)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the bar with the last epoch, before Lightning says why it stopped."""
        if trainer.global_step >= self._total and self._live is not None:
            self._shown = (-1, 0.0)  # fetches the last figures, however short ago some were shown
            self._show_figures(trainer, time.monotonic())
            self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the last state of the bar on the screen."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the terminal."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives the terminal back."""
        self._stop()

    # -- validation, test, prediction ----------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the bar."""
        self._start()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds a bar for the pass over the validation data."""
        name = self.sanity_check_description if trainer.sanity_checking else self.validation_description
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._begin_pass(name, batches)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds a bar for the pass over the test data."""
        self._begin_pass(self.test_description, trainer.num_test_batches)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds a bar for the pass over the data."""
        self._begin_pass(self.predict_description, trainer.num_predict_batches)

    def _begin_pass(self, name: str, batches: Any) -> None:
        total = sum(batches) if isinstance(batches, list) else batches
        self._pass = (name, 0, total)
        if self.trainer.state.fn != "fit":
            self._start()
            if self._live is None and self._enabled:
                print(f"{name}: {_count(total)} batches", flush=True)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Counts a batch."""
        if self._pass is not None:
            self._pass = (self._pass[0], self._pass[1] + 1, self._pass[2])

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the bar of the pass, and shows the new validation loss."""
        if trainer.state.fn != "fit":
            self._stop()
        elif not trainer.sanity_checking and self._enabled and "val/loss" in trainer.callback_metrics:
            self._figures["val"] = float(trainer.callback_metrics["val/loss"])
            if self._live is None:
                step = f"{trainer.global_step:,}/{_count(self._total)}"
                print(f"step {step}: validation loss {self._figures['val']:.3f}", flush=True)
        self._pass = None

    on_test_end = on_predict_end = on_validation_end

    # -- drawing -----------------------------------------------------------------------------------

    def _start(self) -> None:
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        if self._enabled and terminal and self._live is None:
            self._live = Live(
                console=Console(), get_renderable=self._render, refresh_per_second=self._redraws_per_s
            )
            self._live.start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _render(self) -> Table:
        """Draws the present state; called by the thread of `Live`, a few times a second."""
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True)
        if self._started is not None or self._pass is None:
            step = self.trainer.global_step
            table.add_row(
                f"step {step:,}/{_count(self._total)}", _bar(step, self._total), self._summary(step)
            )
        if (current := self._pass) is not None:
            name, done, total = current
            table.add_row(f"{name} {done:,}/{_count(total)}", _bar(done, total), "")
        return table

    def _summary(self, step: int) -> str:
        formats = {"loss": "loss {:.3f}", "val": "val {:.3f}", "tokens/s": "{:,.0f} tokens/s"}
        parts = {
            name: form.format(self._figures[name]) for name, form in formats.items() if name in self._figures
        }
        speed = [parts.pop("tokens/s")] if "tokens/s" in parts else []
        roomy = self._live is None or self._live.console.width >= ROOMY
        epoch = [self._epoch] if self._epoch and roomy else []
        return "  ".join([*parts.values(), *epoch, *speed, f"{self._time_left(step)} left"])

    def _time_left(self, step: int) -> str:
        if step >= self._total:
            return str(timedelta(0))
        if self._started is None or step <= self._started[0] or self._total == float("inf"):
            return "-:--:--"
        first, since = self._started
        seconds = (time.monotonic() - since) / (step - first) * (self._total - step)
        return str(timedelta(seconds=round(min(seconds, timedelta.max.total_seconds() // 2))))

    def _print_line(self, step: int) -> None:
        percent = "" if self._total == float("inf") else f" ({step / self._total:.0%})"
        print(f"step {step:,}/{_count(self._total)}{percent}: {self._summary(step)}", flush=True)


def _epoch(trainer: Trainer) -> str:
    counts = [float(value) for name, value in trainer.callback_metrics.items() if name.startswith("epoch/")]
    if not counts:
        return f"epoch {trainer.current_epoch + 1}"
    least, most = f"{min(counts):.2f}", f"{max(counts):.2f}"
    return f"epoch {least}" if least == most else f"epoch {least} to {most}"


def _count(number: float) -> str:
    return "?" if number == float("inf") else f"{int(number):,}"


def _bar(done: float, total: float) -> Bar:
    return Bar(total=None if total == float("inf") else total, completed=done)
