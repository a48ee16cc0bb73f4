"""Watches whether a network earns its reward, or games it."""

from __future__ import annotations

import logging
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from core.errors import ConfigError
from core.technique import Feature, technique
from toolkit import pictures
from toolkit.rewards import KL, LENGTH, REPETITION, REWARD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

FIGURES = (REWARD, KL, LENGTH, REPETITION)
"""Columns of a point behind the step; NaN where a figure was not logged."""

MAX_POINTS = 4000
"""When there are as many points, every second one is dropped."""

SHARE = 0.05
"""The part of a run's time that pictures in between may take."""

PICTURE = "reward_watch.png"

Point = tuple[int, float, float, float, float]


@technique(
    paper="reward against KL: Gao et al., arXiv:2210.10760, figure 1; rewards that pay for length: Singhal et al., "
    "arXiv:2310.03716",
    needs=(Feature("rollouts"),),
    after=("Rollouts",),
    observer=True,
)
class RewardWatch(Callback):
    """Draws reward against KL, length and repetition of the answers, and warns where the reward seems to be gamed.

    A network that finds a flaw of its reward, such as one that pays for length, drives the reward up and its texts into ruin.
    The signs: the mean reward of the last `window` logged rollouts is above that of the first `window`, and at the same time

    - the answers are more than `max_length_ratio` times as long, or
    - the share of repeated 4-grams in an answer rose by more than `max_repetition`, or
    - the KL divergence from the reference is above `max_kl`.

    Each sign is logged once, when it first shows, with the figures. They are signs, no proof, and none of them shows every
    flaw: read answers. `reward_watch.png` in the run folder shows reward over KL, coloured by step, and all figures over steps.
    It is drawn at the end, when an error ends the run, and now and then in between, in 5% of the time.

    Args:
        window: Logged rollouts of each mean; at least 2.
        max_length_ratio: Mean length over that at the beginning.
        max_repetition: Rise of the mean share of repeated 4-grams, 0 to 1.
        max_kl: Mean KL divergence, nats per token; without a reference in the objective there is none.

    Raises:
        ConfigError: If `window` < 2, or a limit is below 0.

    Example:
        trainer:
          callbacks+:
            - class_path: RewardWatch
              init_args: {window: 10, max_kl: 1.0}
    """

    def __init__(
        self,
        window: int = 10,
        max_length_ratio: float = 2.0,
        max_repetition: float = 0.1,
        max_kl: float = 1.0,
    ) -> None:
        if window < 2:
            raise ConfigError(f"RewardWatch takes window >= 2 (logged rollouts), not {window}.")
        limits = {"max_length_ratio": max_length_ratio, "max_repetition": max_repetition, "max_kl": max_kl}
        for name, value in limits.items():
            if not value >= 0:
                raise ConfigError(f"RewardWatch takes {name} >= 0, not {value}.")
        self.window, self.max_length_ratio = window, max_length_ratio
        self.max_repetition, self.max_kl = max_repetition, max_kl
        self._points: list[Point] = []
        self._first: list[Point] = []
        self._recent: list[Point] = []
        self._told: list[str] = []
        self._keep_one_in, self._offered = 1, 0
        self._not_before_s = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the points so far, and what was said."""
        return {
            "points": list(self._points),
            "first": list(self._first),
            "recent": list(self._recent),
            "told": list(self._told),
            "keep_one_in": self._keep_one_in,
            "offered": self._offered,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with those of a checkpoint."""
        kept = ([tuple(point) for point in state_dict[name]] for name in ("points", "first", "recent"))
        self._points, self._first, self._recent = kept
        self._told = list(state_dict["told"])
        self._keep_one_in, self._offered = state_dict["keep_one_in"], state_dict["offered"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the figures of a logged step."""
        found = trainer.callback_metrics
        if not pl_module.logging_step or REWARD not in found:
            return
        values = [float(found[name]) if name in found else float("nan") for name in FIGURES]
        self.add((trainer.global_step, *values))  # type: ignore[arg-type]
        began = monotonic()
        if began >= self._not_before_s:
            self._write(trainer)
            ended = monotonic()
            self._not_before_s = ended + (ended - began) / SHARE

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Draws the finished run."""
        self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Draws the points so far."""
        self._write(trainer)

    def add(self, point: Point) -> None:
        """Adds a point, and warns of each sign that shows for the first time."""
        if len(self._first) < self.window:
            self._first.append(point)
        self._recent = [*self._recent, point][-self.window :]
        self._offered += 1
        if self._offered % self._keep_one_in == 0:
            self._points.append(point)
        if len(self._points) >= MAX_POINTS:
            self._points = self._points[1::2]
            self._keep_one_in *= 2
        if self._offered >= 2 * self.window:
            self._warn()

    def _warn(self) -> None:
        before, now = (np.array(points)[:, 1:].mean(0) for points in (self._first, self._recent))
        (reward, _, length, repetition), (reward_now, kl, length_now, repetition_now) = before, now
        signs = {
            LENGTH: length_now > self.max_length_ratio * length,
            REPETITION: repetition_now > repetition + self.max_repetition,
            KL: kl > self.max_kl,
        }
        shown = {
            LENGTH: f"answers have {length_now:.0f} tokens instead of {length:.0f}",
            REPETITION: f"of their 4-grams {repetition_now:.0%} repeat others instead of {repetition:.0%}",
            KL: f"the KL divergence from the reference is {kl:.2f} nats per token",
        }
        for name, shows in signs.items():
            if shows and reward_now > reward and name not in self._told:
                self._told.append(name)
                _tell(
                    f"Step {self._recent[-1][0]}: the reward rose from {reward:.3g} to {reward_now:.3g}, and {shown[name]}. "
                    f"The reward may be gamed: read answers, see {PICTURE}; a KL penalty or LengthPenalty may help."
                )

    @rank_zero_only
    def _write(self, trainer: Trainer) -> None:
        if len(self._points) > 1:
            path = Path(trainer.default_root_dir) / PICTURE
            pictures.save(draw(self._points, path.parent.name), path)


@rank_zero_only
def _tell(text: str) -> None:
    log.warning(text)


def draw(points: list[Point], title: str) -> Figure:
    """Draws reward over KL, or over length where there is no KL, coloured by step, and each figure over steps.

    Args:
        points: Step and figures; at least two.
        title: The name of the run.
    """
    steps, *columns = np.array(points, dtype=float).T
    labels = ("reward", "KL (nats per token)", "length (tokens)", "repeated 4-grams")
    known = [
        (label, column) for label, column in zip(labels, columns, strict=True) if np.isfinite(column).any()
    ]
    figure = pictures.new_figure(10, 6)
    halves: Any = figure.subfigures(1, 2)
    left, right = halves
    against, values = known[2 if len(known) < 4 else 1]
    axes = left.subplots()
    axes.plot(values, columns[0], color="0.8", linewidth=0.8, zorder=1)
    dots = axes.scatter(values, columns[0], c=steps, s=14, cmap="viridis", zorder=2)
    axes.set_xlabel(against)
    axes.set_ylabel("mean reward")
    axes.set_title(f"{title}: reward over {against.partition(' ')[0]}", loc="left")
    pictures.tidy(axes)
    left.colorbar(dots, ax=axes, label="optimizer step", location="bottom", shrink=0.7)
    for part, (label, column) in zip(right.subplots(len(known), 1, sharex=True), known, strict=True):
        part.plot(steps, column, color="tab:blue", alpha=0.35, linewidth=0.8)
        part.plot(steps, pictures.running_mean(column), color="tab:blue", linewidth=1.8)
        part.set_ylabel(label, fontsize="small")
        part.ticklabel_format(useOffset=False)
        if column is columns[-1]:
            part.set_ylim(0, 1)
        pictures.tidy(part)
    part.set_xlabel("optimizer step")
    return figure
