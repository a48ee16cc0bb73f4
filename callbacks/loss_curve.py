"""The picture of a run: training and validation loss over the tokens seen."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from core.contracts import HasUnigramLoss
from core.errors import ConfigError
from core.technique import technique
from toolkit import pictures

MAX_POINTS = 4000
"""When the training curve has as many points, every second one is dropped."""

SHARE = 0.05
"""The part of a run's time that pictures in between may take: one takes about a third of a second."""

Points = list[tuple[int, int, float]]
"""(optimizer steps, tokens, loss), in this order."""


@technique(
    paper="loss over tokens as in Kaplan et al., arXiv:2001.08361, figure 2; drawn with matplotlib's Agg",
    after=("Throughput",),
    maturity="stable",
    observer=True,
)
class LossCurve(Callback):
    """Draws training and validation loss over tokens: `loss_curve.png` in the run folder.

    Drawn at the end, when an error ends the run, and in between. Light: the training loss of each logged step; dark: its
    running mean; dots: validation; dashed:
    the entropy of the validation text under token frequencies alone (`unigram_loss` of the data module),
    which a model that uses no context cannot beat; red: steps that a rollback discarded. The curve is
    part of the checkpoint, so that a resumed run draws all of it.

    Args:
        every_n_validations: Draw after every so many validations, less often where that would take more than
            5% of the time from the first picture on; 0: only at the end.

    Raises:
        ConfigError: If `every_n_validations` is below 0.

    Example:
        trainer:
          callbacks+:
            - class_path: LossCurve
              init_args: {every_n_validations: 1}
    """

    def __init__(self, every_n_validations: int = 1) -> None:
        if every_n_validations < 0:
            raise ConfigError(f"LossCurve takes every_n_validations >= 0, not {every_n_validations}.")
        self._every_n_validations = every_n_validations
        self._training: Points = []
        self._validation: Points = []
        self._keep_one_in = 1
        self._offered = 0
        self._not_before_s = 0.0
        self._grown = False  # since the run began or was resumed

    def state_dict(self) -> dict[str, Any]:
        """Returns the curve so far."""
        return {
            "training": list(self._training),
            "validation": list(self._validation),
            "keep_one_in": self._keep_one_in,
            "offered": self._offered,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the curve of a checkpoint."""
        self._training = [tuple(point) for point in state_dict["training"]]
        self._validation = [tuple(point) for point in state_dict["validation"]]
        self._keep_one_in = state_dict["keep_one_in"]
        self._offered = state_dict["offered"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the loss of a logged step."""
        if not pl_module.logging_step:
            return
        self._grown = True
        self._offered += 1
        if self._offered % self._keep_one_in == 0:
            loss = float(trainer.callback_metrics["train/loss"])
            self._training.append((trainer.global_step, pl_module.tokens_seen, loss))
        if len(self._training) >= MAX_POINTS:
            self._training = self._training[1::2]
            self._keep_one_in *= 2

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Adds the validation loss."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or "val/loss" not in trainer.callback_metrics:
            return
        step = trainer.global_step
        if self._validation and self._validation[-1][0] == step:  # a resumed run validates again
            self._validation.pop()
        tokens = pl_module.tokens_seen
        if self._training:  # known at logged steps only
            logged_step, logged_tokens, _ = self._training[-1]
            tokens = round(logged_tokens * step / logged_step)
        self._validation.append((step, tokens, float(trainer.callback_metrics["val/loss"])))
        due = self._every_n_validations and len(self._validation) % self._every_n_validations == 0
        began = monotonic()
        if due and began >= self._not_before_s:
            self._write(trainer)
            ended = monotonic()
            self._not_before_s = ended + (ended - began) / SHARE

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Draws the finished run."""
        self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Draws the curve so far; a run that failed before its first new point leaves the picture as it is."""
        if self._grown:
            self._write(trainer)

    @rank_zero_only
    def _write(self, trainer: Trainer) -> None:
        if sum(np.isfinite(loss) for _, _, loss in self._training) < 2:
            return
        path = Path(trainer.default_root_dir) / "loss_curve.png"
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        unigram = data.unigram_loss if isinstance(data, HasUnigramLoss) else None
        module: Any = trainer.lightning_module
        unit = module.objective.loss_unit
        figure = draw(self._training, self._validation, unigram, path.parent.name, unit)
        pictures.save(figure, path)


def draw(
    training: Points, validation: Points, unigram: float | None, title: str, unit: str = "nats/token"
) -> Any:  # jsonargparse would import matplotlib for the name of a figure, in each run
    """Draws the curves; returns the figure.

    Args:
        training: The training loss.
        validation: The validation loss; may be empty.
        unigram: Entropy of the validation text under token frequencies, in nats per token, if known.
        title: The title, followed by the last losses.
        unit: That of the loss; with another one than nats per token neither perplexity nor `unigram` are drawn.
    """
    from matplotlib.ticker import EngFormatter, LogLocator

    figure = pictures.new_figure(8, 5)
    axes = figure.add_subplot()
    points = np.array([p for p in training if np.isfinite(p[2])], dtype=float)
    stays = counts(points[:, 0])
    lines = np.split(points, np.flatnonzero(np.diff(stays)) + 1)
    for number, line in enumerate(lines[int(stays[0]) :: 2]):
        label = None if number else "discarded by a rollback"
        axes.plot(*line[:, 1:].T, ".-", color="tab:red", alpha=0.7, linewidth=0.8, markersize=3, label=label)
    steps, tokens, losses = points[stays].T
    axes.plot(tokens, losses, color="tab:blue", alpha=0.35, linewidth=0.8)
    mean = pictures.running_mean(losses)
    axes.plot(tokens, mean, color="tab:blue", linewidth=1.8, label="training (running mean)")
    if validation:
        _, at, values = _that_count(validation).T
        perplexity = f", perplexity {np.exp(values[-1]):.1f}" if unit == "nats/token" else ""
        label = f"validation (last {values[-1]:.3f}{perplexity})"
        axes.plot(at, values, color="tab:orange", marker="o", markersize=4, linewidth=1.5, label=label)
    if unigram is not None and unit == "nats/token":
        label = f"token frequencies alone ({unigram:.3f})"
        axes.axhline(unigram, color="0.35", linestyle="--", linewidth=1.2, label=label)
    if tokens[-1] >= 100 * tokens[0] > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if points[:, 2].min() > 0 and points[:, 2].max() > 20 * points[:, 2].min():
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set_xlabel("label tokens seen")
    axes.set_ylabel(f"loss ({unit.replace('/', ' per ')})")
    axes.set_title(f"{title}: loss over tokens", loc="left")
    pictures.tidy(axes)
    axes.legend(frameon=False)
    _add_steps(axes, steps, tokens)
    return figure


def counts(steps: np.ndarray) -> np.ndarray:
    """Returns of each step whether it counts, (n,): it does not where a rollback discarded it."""
    earliest_after = np.minimum.accumulate(np.append(steps, np.inf)[::-1])[::-1][1:]
    return steps < earliest_after


def _that_count(points: Points) -> np.ndarray:
    """Returns the points that count, (n, 3)."""
    array = np.array(points, dtype=float)
    return array[counts(array[:, 0])]


def _add_steps(axes: Any, steps: np.ndarray, tokens: np.ndarray) -> None:
    """Adds an upper axis in optimizer steps where every step had about as many tokens."""
    from matplotlib.ticker import LogLocator

    per_step = tokens[-1] / steps[-1]
    if np.allclose(tokens, steps * per_step, rtol=0.02):
        upper = axes.secondary_xaxis("top", functions=(lambda x: x / per_step, lambda x: x * per_step))
        if axes.get_xscale() == "log":
            upper.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        upper.xaxis.set_major_formatter("{x:,.0f}")
        upper.set_xlabel("optimizer steps")
