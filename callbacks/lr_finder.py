"""The learning-rate range test: the loss while the learning rate rises from step to step."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from core import durable
from core.data.token_datamodule import TokenDataModule
from core.errors import ConfigError, deprecated
from core.technique import technique
from toolkit import pictures
from toolkit.learning_rates import rebuild_at, resume_at, set_rates
from toolkit.trials import NOT_RESTORABLE, compatibility_errors, say, trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from toolkit.selection import Run, Selected

LEAST_STEPS = 8
"""Fewer losses are not enough for a curve."""


class Curve(NamedTuple):
    """What a range test measured, all (steps,).

    Attributes:
        rates: Learning rates.
        losses: Mean losses of the steps at these rates, before their updates, in the objective's `loss_unit`.
        smooth: Losses, smoothed.
        slopes: Nats per token and factor e of the rate; NaN near the ends, where they are uncertain.
    """

    rates: np.ndarray
    losses: np.ndarray
    smooth: np.ndarray
    slopes: np.ndarray


@technique(
    paper="the range test: Smith, arXiv:1506.01186, section 3.3; steepest slope and minimum/10 as in fastai's lr_find",
    conflicts=NOT_RESTORABLE | {"LearningRateFinder": "both would set the learning rate"},
    after=("BatchSizeFinder", "RandomRestart"),
)
class LRFinder(Callback):
    """Learning-rate range test: tries rising rates before the first step, suggests one, and restores everything.

    Each of `num_steps` optimizer steps on the run's first batches has a higher rate, without the schedule; the test
    ends early when the loss blows up. `lr_finder.png` and `lr_finder.csv` in the run folder show the losses. Two
    rates are suggested: where the loss falls most steeply over the logarithm of the rate, and a tenth of that of the
    least loss. Groups with another rate (`model.parameter_options`) keep their ratio to it; a schedule uses the new
    rate as if it had been configured. A resumed run continues at the rate found.

    Args:
        min_lr: Learning rate of the first step.
        max_lr: Learning rate of the last step.
        num_steps: Optimizer steps, at least 8; no more than an epoch of the data has.
        sweep: How the rate rises, "exponential" or "linear".
        pick: Which suggestion counts, "steepest" or "minimum/10".
        then: "keep": train at the configured rate; "use": at the suggested one; "stop": end the run.
        blow_up: The test ends when a loss is this many times the least so far, or not finite.
        min_rate: Deprecated: `min_lr`.
        max_rate: Deprecated: `max_lr`.

    Raises:
        ConfigError: If a value is out of range, or no rate could be found that lowers the loss.

    Example:
        trainer:
          callbacks+:
            - class_path: LRFinder
              init_args: {min_lr: 1.0e-5, max_lr: 1.0, num_steps: 60, then: use}
    """

    def __init__(
        self,
        min_lr: float = 1e-6,
        max_lr: float = 1.0,
        num_steps: int = 100,
        sweep: Literal["exponential", "linear"] = "exponential",
        pick: Literal["steepest", "minimum/10"] = "steepest",
        then: Literal["keep", "use", "stop"] = "keep",
        blow_up: float = 2.0,
        min_rate: float | None = None,
        max_rate: float | None = None,
    ) -> None:
        if min_rate is not None or max_rate is not None:
            deprecated("LRFinder(min_rate=..., max_rate=...)", "min_lr and max_lr")
            min_lr, max_lr = (
                new if old is None else old for old, new in ((min_rate, min_lr), (max_rate, max_lr))
            )
        if not 0 < min_lr < max_lr or not math.isfinite(max_lr):
            raise ConfigError(f"LRFinder takes 0 < min_lr < max_lr, not {min_lr:g} and {max_lr:g}.")
        if num_steps < LEAST_STEPS or not blow_up > 1:
            raise ConfigError(
                f"LRFinder takes num_steps from {LEAST_STEPS} upwards and blow_up above 1, not {num_steps} and {blow_up:g}."
            )
        self.min_lr, self.max_lr, self.num_steps, self.sweep = min_lr, max_lr, num_steps, sweep
        self.pick, self.then, self.blow_up = pick, then, blow_up
        self._rate: float | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what trial steps do not work with."""
        yield from compatibility_errors(run)

    def state_dict(self) -> dict[str, Any]:
        """Returns the rate that was found and used, if any."""
        return {"rate": self._rate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores that rate."""
        self._rate = state_dict["rate"]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Lets a resumed run continue at the rate that was found."""
        if trainer.ckpt_path and self._rate is not None:
            resume_at(trainer, self._rate)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Runs the test before the first step of a run, when all callbacks are ready."""
        if trainer.ckpt_path or trainer.global_step:
            return
        self._check_length(trainer)
        configured = trainer.optimizers[0].defaults["lr"]
        say(
            trainer,
            self,
            f"{self.num_steps} trial steps at rates from {self.min_lr:g} to {self.max_lr:g} ...",
        )
        curve = measured(*self._measure(trainer))
        steepest, tenth = suggestions(curve)
        chosen = steepest if self.pick == "steepest" else tenth
        if trainer.is_global_zero:
            unit = pl_module.objective.loss_unit
            _write(Path(trainer.default_root_dir), curve, steepest, tenth, configured, unit)
        if chosen is None and self.then == "use":
            raise ConfigError(
                "LRFinder: the loss fell at none of the rates; see lr_finder.png in the run folder.\n"
                "Widen min_lr and max_lr, or look for another cause: the model does not seem to learn."
            )
        found = (
            f"{chosen:.3g} by {self.pick} (steepest {steepest:.3g}, minimum/10 {tenth:.3g})"
            if chosen
            else "no rate lowers the loss"
        )
        goes_on = {"keep": f"The run continues at {configured:g}", "use": "The run continues at that rate"}
        say(
            trainer,
            self,
            f"{found}; configured {configured:g}. {goes_on.get(self.then, 'The run ends here')}. The curve: "
            f"{Path(trainer.default_root_dir) / 'lr_finder.png'}",
        )
        if chosen is not None and self.then == "use":
            self._rate = chosen
            rebuild_at(trainer, chosen)
        trainer.should_stop |= self.then == "stop"

    def _check_length(self, trainer: Trainer) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        known = isinstance(data, TokenDataModule) and data.training_loader is not None
        batches = len(data.training_loader) if known else 0
        steps = batches // trainer.accumulate_grad_batches
        if 0 < steps < self.num_steps:
            raise ConfigError(
                f"LRFinder: num_steps is {self.num_steps}, and an epoch of the data has {steps} steps: losses on text "
                f"seen before would mislead.\nLower num_steps to {steps} or less, or add text."
            )

    def _measure(self, trainer: Trainer) -> tuple[np.ndarray, np.ndarray]:
        """Returns rates and losses up to where the loss blows up; the same on every rank."""
        spaced = np.geomspace if self.sweep == "exponential" else np.linspace
        rates = spaced(self.min_lr, self.max_lr, self.num_steps).tolist()
        losses: list[float] = []
        optimizer = trainer.optimizers[0]
        module: Any = trainer.lightning_module
        main, written = optimizer.defaults["lr"], [group["lr"] for group in module.written_groups]
        with trial(trainer, hold_schedules=True) as steps:
            for rate in rates:
                set_rates(optimizer.param_groups, rate, main, written)
                loss = float(trainer.strategy.broadcast(float(next(steps))))
                if not math.isfinite(loss) or loss > self.blow_up * min(losses, default=math.inf):
                    break
                losses.append(loss)
        return np.array(rates[: len(losses)]), np.array(losses)


def measured(rates: np.ndarray, losses: np.ndarray) -> Curve:
    """Returns the curve of losses over rates, smoothed by a line through the tenth of the points around each.

    The line is a least-squares fit over the logarithm of the rate; the smoothed loss is its value. It does not lag as a
    running mean does.

    Raises:
        ConfigError: If there are too few.
    """
    if len(rates) < LEAST_STEPS:
        raise ConfigError(
            f"LRFinder: the loss blew up after {len(rates)} steps, at a rate of {rates[-1] if len(rates) else 0:.3g}; "
            "lower min_lr."
        )
    x, half = np.log(rates), max(len(rates) // 20, 2)
    smooth, slopes = losses.copy(), np.full(len(losses), np.nan)
    for at in range(len(rates)):
        around = slice(max(at - half, 0), at + half + 1)
        slope, height = np.polyfit(x[around] - x[at], losses[around], 1)
        smooth[at] = height
        if half <= at < len(rates) - half:
            slopes[at] = slope
    return Curve(rates, losses, smooth, slopes)


def suggestions(curve: Curve) -> tuple[float | None, float | None]:
    """Returns the rate of the steepest fall, and a tenth of that of the least loss; None where it never falls."""
    at = int(np.nanargmin(curve.slopes))
    if curve.slopes[at] >= 0:
        return None, None
    return float(curve.rates[at]), float(curve.rates[int(np.argmin(curve.smooth))]) / 10


def _write(
    folder: Path, curve: Curve, steepest: float | None, tenth: float | None, configured: float, unit: str
) -> None:
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["step", "learning rate", f"loss ({unit})", f"smoothed loss ({unit})"])
    rows.writerows(
        [number, *map(repr, map(float, values))]
        for number, *values in zip(range(1, len(curve.rates) + 1), *islice(curve, 3), strict=True)
    )
    durable.write(folder / "lr_finder.csv", table.getvalue())
    figure = draw(curve, steepest, tenth, configured, unit)
    pictures.save(figure, folder / "lr_finder.png")


def draw(
    curve: Curve, steepest: float | None, tenth: float | None, configured: float, unit: str = "nats/token"
) -> Figure:
    """Draws the losses over the rates, with what is suggested and what is configured."""
    figure = pictures.new_figure(8, 5)
    axes = figure.add_subplot()
    axes.plot(curve.rates, curve.losses, color="tab:blue", alpha=0.35, linewidth=0.8, label="loss of a step")
    axes.plot(curve.rates, curve.smooth, color="tab:blue", linewidth=1.8, label="smoothed")
    marks = {"steepest": steepest, "minimum/10": tenth, "configured": configured}
    styles = {"steepest": ("tab:orange", "-"), "minimum/10": ("tab:green", "-"), "configured": ("0.35", "--")}
    for name, rate in marks.items():
        if rate is not None:
            color, style = styles[name]
            axes.axvline(rate, color=color, linestyle=style, linewidth=1.4, label=f"{name} ({rate:.3g})")
    axes.set_xscale("log")
    low, high = curve.losses.min(), max(curve.smooth[0], np.median(curve.losses))
    axes.set_ylim(low - 0.1 * (high - low) - 1e-6, high + 0.5 * (high - low) + 1e-6)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(f"loss ({unit.replace('/', ' per ')})")
    axes.set_title("learning-rate range test", loc="left")
    pictures.tidy(axes)
    axes.legend(frameon=False)
    return figure
