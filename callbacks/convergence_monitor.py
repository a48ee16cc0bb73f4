"""Says from the validation losses whether a run has converged, still falls, over-fits or diverges; stops or restarts it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from core.contracts import GoesBack
from core.errors import ConfigError
from core.lightning_compat import set_logged_steps
from core.technique import technique
from core.training.figures import log_figures
from toolkit.new_weights import begin
from toolkit.snapshot_ring import SnapshotRing
from toolkit.trials import NOT_RESTORABLE, offloaded, say

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

DEVIATIONS = 1.959964
"""Of the normal distribution: an interval of 95%."""

ENDS = ("converged", "over-fitting", "diverging")
"""Verdicts at which a run may be stopped."""


@technique(
    paper="slope and interval: Sen, JASA 63, 1968 (median of the slopes between all pairs; interval from Kendall's tau)",
    conflicts=NOT_RESTORABLE,
    after=("RandomRestart",),
    before=("ExponentialMovingAverage",),
)
class ConvergenceMonitor(Callback):
    """Says from the last validations whether a run has converged, still falls, over-fits or diverges.

    The slope of the validation loss is the median of the slopes between all pairs of the last `window` validations,
    which one odd validation hardly moves; its interval (95%) comes from Kendall's tau. Logged after each validation from
    the `window`-th on: `convergence/slope_per_1000_steps`, `convergence/interval_low_per_1000_steps` and
    `convergence/interval_high_per_1000_steps`. The verdict, printed when it changes:

    - falling: the whole interval is below -`tolerance`;
    - converged: it is between -`tolerance` and `tolerance`;
    - over-fitting: it is above `tolerance`, and the training loss does not rise likewise;
    - diverging: it is above `tolerance` and so is that of the training loss, or the last loss is not finite;
    - undecided: anything else; more validations narrow the interval.

    A run that does not converge may begin again: with the weights of its first step, or those of another seed, and a lower
    learning rate. Steps count from there; the data continues. The first weights lie in `first_weights/` in the run folder,
    so that a resumed run does the same. A run does not converge if it diverges, and, where `restart_above` is given, if it is
    stuck: all losses of the window are above `restart_above`, and their slope is not below -`tolerance`.

    Args:
        window: Validations that are looked at; from 5 upwards: of 4, even the extreme slopes
            are no interval of 95%.
        scale: What the loss falls along: "linear", steps; "log", their logarithm, as losses of long runs do. The slope
            is then that at the present step.
        tolerance: Loss per 1000 steps below which a slope is none, in the unit of the loss.
        stop: Whether the run ends, with exit code 0, when it has converged, over-fits or diverges.
        restarts: How often a run that does not converge begins again, before it is stopped or goes on.
        new_seed: Whether it then begins with the weights of the next seed.
        lr_factor: What its learning rate is multiplied by at each restart.
        restart_above: Validation loss above which a run that no longer falls begins again, in nats per token (or the unit of the
            objective's loss); None: only a run that diverges does.

    Raises:
        ConfigError: If a value is out of range, or `restart_above` is given without restarts.

    Example:
        trainer:
          callbacks+:
            - class_path: ConvergenceMonitor
              init_args: {window: 6, tolerance: 0.01, stop: true}
    """

    def __init__(
        self,
        window: int = 6,
        scale: Literal["linear", "log"] = "linear",
        tolerance: float = 0.01,
        stop: bool = False,
        restarts: int = 0,
        new_seed: bool = True,
        lr_factor: float = 0.5,
        restart_above: float | None = None,
    ) -> None:
        if window < 5 or not 0 <= tolerance < math.inf or restarts < 0 or not 0 < lr_factor <= 1:
            raise ConfigError(
                "ConvergenceMonitor takes window >= 5, tolerance >= 0, restarts >= 0 and lr_factor above 0 and at most 1, not "
                f"{window}, {tolerance}, {restarts} and {lr_factor}."
            )
        if restart_above is not None and not (restarts and math.isfinite(restart_above)):
            raise ConfigError(
                f"ConvergenceMonitor takes a finite restart_above together with restarts >= 1, not {restart_above} and {restarts}."
            )
        self.window, self.scale, self.tolerance, self.stop = window, scale, tolerance, stop
        self.restart_above = restart_above
        self.restarts, self.new_seed, self.lr_factor = restarts, new_seed, lr_factor
        self.verdict = "undecided"
        # step, validation loss, mean training loss since the validation before
        self._points: list[list[float | None]] = []
        self._training = [0.0, 0.0]  # sum and number of the logged losses since
        self._restarted, self._due = 0, False
        self._ring: SnapshotRing | None = None
        self._found: dict[str, Any] = {}

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields that the first weights cannot be restored."""
        if own.arguments.get("restarts"):
            yield from offloaded(run)

    def state_dict(self) -> dict[str, Any]:
        """Returns the validations so far, the verdict, and the restarts."""
        return {
            "points": [list(point) for point in self._points],
            "training": list(self._training),
            "verdict": self.verdict,
            "restarted": self._restarted,
            "due": self._due,
            "ring": self._ring.state_dict() if self._ring is not None else self._found,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them."""
        self._points = [list(point) for point in state_dict["points"]]
        self._training, self.verdict = list(state_dict["training"]), state_dict["verdict"]
        self._restarted, self._due, self._found = (
            state_dict["restarted"],
            state_dict["due"],
            state_dict["ring"],
        )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Finds the first weights of a resumed run."""
        if self.restarts:
            folder = Path(trainer.default_root_dir, "first_weights")
            self._ring = SnapshotRing(2**62, folder)
            self._ring.find(trainer, self._found)
            if trainer.global_step and not self._ring:
                say(
                    trainer,
                    self,
                    f"{folder} does not hold the first weights on each rank: this run cannot begin again.",
                )
        self._set_rate(pl_module)
        if self._restarted and self.new_seed:
            pl_module.seed += self._restarted

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keeps the first weights, once every callback has begun; begins again where that is due."""
        if self._ring is None or batch_idx % trainer.accumulate_grad_batches:
            return
        if not self._ring and not trainer.global_step:
            self._ring.add(trainer)
            self._ring.hold()
        if self._due:
            self._restart(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the training loss of a logged step."""
        if pl_module.logging_step:
            self._training[0] += float(trainer.callback_metrics["train/loss"])
            self._training[1] += 1

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Adds the validation loss, which is the same on every rank, and judges the run."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        step, total = trainer.global_step, self._training
        if self._points and self._points[-1][0] == step:  # a resumed run validates again
            return
        mean: float | None = total[0] / total[1] if total[1] else None
        self._points.append([step, float(trainer.callback_metrics["val/loss"]), mean])
        self._points, self._training = self._points[-self.window :], [0.0, 0.0]
        before, (self.verdict, figures) = (
            self.verdict,
            judge(self._points, self.window, self.scale, self.tolerance),
        )
        if figures:
            log_figures(trainer, figures)
        if self.verdict != before:
            slope = f", {figures[SLOPE]:+.4f} per 1000 steps" if figures else ""
            say(
                trainer,
                self,
                f"step {step:,}: {self.verdict}{slope} over the last {len(self._points)} validations.",
            )
        self._react(trainer, step, figures)

    def _react(self, trainer: Trainer, step: int, figures: dict[str, float]) -> None:
        stuck = self._stuck(figures)
        if (stuck or self.verdict == "diverging") and self._restarted < self.restarts and self._ring:
            self._due = True
            if stuck:
                say(
                    trainer,
                    self,
                    f"step {step:,}: stuck: no loss of the window is below restart_above ({self.restart_above:g}), and they no longer fall.",
                )
        elif self.stop and self.verdict in ENDS:
            say(trainer, self, f"the run ends at step {step:,}: {self.verdict}.")
            trainer.should_stop = True

    def _stuck(self, figures: dict[str, float]) -> bool:
        if self.restart_above is None or not figures:
            return False
        lowest = min(np.array(self._points, dtype=float)[:, 1])
        return bool(figures[SLOPE] >= -self.tolerance and lowest > self.restart_above)

    def _set_rate(self, pl_module: Any) -> None:
        pl_module.lr_factors["ConvergenceMonitor"] = self.lr_factor**self._restarted

    def _restart(self, trainer: Trainer, pl_module: Any) -> None:
        assert self._ring is not None
        restarted, now = self._restarted + 1, trainer.global_step
        step = self._ring.go_back(trainer, 0)  # this callback's state too
        self._restarted, self._due, self._points, self._training = restarted, False, [], [0.0, 0.0]
        self.verdict = "undecided"
        if self.new_seed:
            begin(trainer, pl_module.seed + 1)
        self._set_rate(pl_module)
        set_logged_steps(trainer, step)
        for logger in trainer.loggers:
            if isinstance(logger, GoesBack):
                logger.go_back(step)
        seed = f" from seed {pl_module.seed}" if self.new_seed else ""
        rate = f", learning rate times {self.lr_factor**restarted:.3g}" if self.lr_factor < 1 else ""
        say(
            trainer,
            self,
            f"the run begins again at step {now:,}{seed}{rate}: restart {restarted} of {self.restarts}.",
        )


SLOPE = "convergence/slope_per_1000_steps"


def judge(
    points: Sequence[Sequence[float | None]], window: int, scale: str = "linear", tolerance: float = 0.01
) -> tuple[str, dict[str, float]]:
    """Returns the verdict on validations, and the figures that it rests on; none while there are too few.

    Args:
        points: (step, validation loss, mean training loss since the validation before, None if none was logged) of each, oldest first.
        window: How many it takes.
        scale: "linear" or "log".
        tolerance: See :class:`ConvergenceMonitor`.
    """
    steps, losses, training = np.array(points, dtype=float).T
    if not math.isfinite(losses[-1]):
        return "diverging", {}
    if len(points) < window or not np.isfinite(losses).all():
        return "undecided", {}
    slope, low, high = (1000 * value for value in slope_at_end(steps, losses, scale))
    figures = {
        SLOPE: slope,
        "convergence/interval_low_per_1000_steps": low,
        "convergence/interval_high_per_1000_steps": high,
    }
    if high < -tolerance:
        return "falling", figures
    if low > tolerance:
        known = np.isfinite(training)
        rises = known.sum() >= 5 and 1000 * slope_at_end(steps[known], training[known], scale)[1] > tolerance
        return ("diverging" if rises else "over-fitting"), figures
    return ("converged" if low > -tolerance and high < tolerance else "undecided"), figures


def slope_at_end(steps: np.ndarray, losses: np.ndarray, scale: str = "linear") -> tuple[float, float, float]:
    """Returns the slope of losses (n,) per step at the last step, and the ends of its 95% interval."""
    x = np.log(np.maximum(steps, 1)) if scale == "log" else steps
    one, other = np.triu_indices(len(x), 1)
    slopes = np.sort((losses[other] - losses[one]) / (x[other] - x[one]))
    n, pairs = len(x), len(slopes)
    spread = DEVIATIONS * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(round((pairs - spread) / 2) - 1, 0)
    high = min(round((pairs + spread) / 2), pairs - 1)
    per_step = 1 / max(steps[-1], 1) if scale == "log" else 1.0
    return tuple(float(value) * per_step for value in (np.median(slopes), slopes[low], slopes[high]))  # type: ignore[return-value]
