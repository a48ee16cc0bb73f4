"""A search over seeds: several initialisations are trained for a while, and the best is used."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from core import durable
from core.errors import ConfigError
from core.technique import technique
from toolkit import pictures
from toolkit.new_weights import begin
from toolkit.snapshots import HoldsWeights, tensors
from toolkit.trials import NOT_RESTORABLE, compatibility_errors, say, trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from toolkit.selection import Run, Selected


@technique(
    paper="the best of several seeds after a short training, as in Dodge et al., arXiv:2002.06305, section 4",
    conflicts=NOT_RESTORABLE
    | {"BitsandbytesWeights": "its weights are quantised and frozen: a new seed would change nothing"},
    before=("ExponentialMovingAverage", "LRFinder"),
    after=(
        "BatchSizeFinder",
        "BatchSizeRamp",
        "GradientClip",
        "OOMGuard",
        "SequenceLengthSchedule",
        "SkipStep",
    ),
)
class RandomRestart(Callback):
    """A search over seeds: trains a few steps from each of several seeds, then starts the run from the best.

    A seed determines the network's initial weights and its dropout; the data and its order are the same for all seeds,
    unless `shuffle_data` gives each its own order. The first seed is the run's own (`seed_everything`), the others are
    the next numbers. The best has the lowest mean loss over the last tenth of its steps. Then everything is restored: the run is
    bitwise the one with the best seed in `seed_everything` (and the matching `data.seed`), where nothing else draws
    from it. With `keep_weights` the run begins with the weights of the best after its steps; step, optimizer,
    schedule and data begin from zero. `random_restart.png` and `random_restart.csv` in the run folder show all
    losses.

    Args:
        seeds: How many to try, at least 2.
        num_steps: Optimizer steps of each.
        shuffle_data: Whether the data, too, come in another order for each: by `data.seed`, plus 0 for the first
            seed, 1 for the next. Losses are then of different batches: with few steps they say less.
        keep_weights: Whether the run begins with the trained weights of the best, in place of its initial ones.

    Raises:
        ConfigError: If a value is out of range, unshuffled data are to be shuffled, or the loss is finite for no seed.

    Example:
        trainer:
          callbacks+:
            - class_path: RandomRestart
              init_args: {seeds: 4, num_steps: 50}
    """

    def __init__(
        self, seeds: int = 4, num_steps: int = 50, shuffle_data: bool = False, keep_weights: bool = False
    ) -> None:
        if seeds < 2 or num_steps < 1:
            raise ConfigError(
                f"RandomRestart takes seeds from 2 and num_steps from 1 upwards, not {seeds} and {num_steps}."
            )
        self.seeds, self.num_steps = seeds, num_steps
        self.shuffle_data, self.keep_weights = shuffle_data, keep_weights
        self._kept: tuple[float, list[Tensor]] | None = (
            None  # the lowest score so far, and the weights after its steps
        )
        self._seed: int | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what trial steps do not work with, and that trials are longer than the run."""
        yield from compatibility_errors(run)
        if own.arguments.get("shuffle_data") and run.argument("data.shuffle") is False:
            yield "shuffle_data is true, and the data are read in order: set --data.shuffle=true or leave it out"
        steps, trials = run.argument("trainer.max_steps") or -1, own.arguments.get("num_steps") or 0
        if 0 < steps < trials:
            yield f"num_steps is {trials}, and the run has only {steps} steps: lower it"

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed that was chosen."""
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores that seed."""
        self._seed = state_dict["seed"]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Tries the seeds before the first step of a run; a resumed one continues with its seed's random numbers."""
        if trainer.ckpt_path:
            pl_module.seed = pl_module.seed if self._seed is None else self._seed
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        first, data_seed = pl_module.seed, data.seed  # of a TokenDataModule: trial steps need one
        self._orders = {seed: data_seed + seed - first for seed in range(first, first + self.seeds)}
        say(trainer, self, f"{self.seeds} seeds from {first} on, {self.num_steps} trial steps each ...")
        curves = {seed: self._curve(trainer, seed) for seed in self._orders}
        scores = {seed: _score(losses) for seed, losses in curves.items()}
        best = min(scores, key=scores.__getitem__)
        if trainer.is_global_zero:
            _write(Path(trainer.default_root_dir), curves, best, pl_module.objective.loss_unit)
        if not math.isfinite(scores[best]):
            raise ConfigError(
                "RandomRestart: from no seed the loss stayed finite; see random_restart.csv in the run folder.\n"
                "Lower the learning rate (LRFinder finds one), or look for the fault with NonFiniteGuard."
            )
        self._begin(trainer, best)
        if self._kept is not None:
            _put(trainer, self._kept[1])
        self._seed, self._kept = best, None
        scores_text = ", ".join(f"{seed}: {score:.4f}" for seed, score in scores.items())
        say(
            trainer,
            self,
            f"seed {best} is the best; loss of each in {pl_module.objective.loss_unit}: {scores_text}. The run begins with it.",
        )

    def _begin(self, trainer: Trainer, seed: int) -> None:
        begin(trainer, seed)
        if self.shuffle_data:
            trainer.datamodule.reshuffle(self._orders[seed])  # type: ignore[attr-defined]

    def _curve(self, trainer: Trainer, seed: int) -> list[float]:
        """Returns the losses from a seed on, the same on every rank."""
        self._begin(trainer, seed)
        with trial(trainer) as steps:
            losses = [float(next(steps)) for _ in range(self.num_steps)]
            losses = list(trainer.strategy.broadcast(losses))
            if self.keep_weights and (self._kept is None or _score(losses) < self._kept[0]):
                weights = [tensor.to("cpu", copy=True) for tensor in tensors(trainer)]
                self._kept = _score(losses), weights
        return losses


def _put(trainer: Trainer, weights: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors(trainer), weights, strict=True):
            tensor.copy_(value)
    if isinstance(trainer.strategy, HoldsWeights):
        trainer.strategy.weights_restored()


def _score(losses: list[float]) -> float:
    last = losses[-max(len(losses) // 10, 1) :]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else math.inf


def _write(folder: Path, curves: dict[int, list[float]], best: int, unit: str) -> None:
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["step", *(f"loss of seed {seed} ({unit})" for seed in curves)])
    rows.writerows(
        [step, *map(repr, losses)] for step, losses in enumerate(zip(*curves.values(), strict=True), 1)
    )
    durable.write(folder / "random_restart.csv", table.getvalue())
    figure = draw(curves, best, unit)
    pictures.save(figure, folder / "random_restart.png")


def draw(curves: dict[int, list[float]], best: int, unit: str = "nats/token") -> Figure:
    """Draws the losses from each seed on, by step, the best in colour."""
    from matplotlib.ticker import MaxNLocator

    figure = pictures.new_figure(8, 5)
    axes = figure.add_subplot()
    for seed, losses in sorted(curves.items(), key=lambda item: item[0] == best):
        style: dict[str, Any] = {"color": "0.6", "linewidth": 1.0}
        if seed == best:
            style = {"color": "tab:blue", "linewidth": 1.8}
        label = f"seed {seed}{' (best)' if seed == best else ''}: {losses[-1]:.3f}"
        axes.plot(range(1, len(losses) + 1), losses, label=label, **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(f"loss ({unit.replace('/', ' per ')})")
    axes.set_title("the same batches from several seeds", loc="left")
    pictures.tidy(axes)
    axes.legend(frameon=False)
    return figure
