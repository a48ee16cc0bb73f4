"""Several initialisations tried for a while, and the best of them trained on."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from callbacks.shared.trials import NOT_UNDONE, misfits, say, trial
from core.configuration.building import changed
from core.errors import ConfigError
from core.files import durable, pictures
from core.technique import technique
from core.training.shards import reshard, take

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from core.selection import Run, Selected


@technique(
    paper="the best of several seeds after a short training, as in Dodge et al., arXiv:2002.06305, section 4",
    conflicts=NOT_UNDONE
    | {"BitsandbytesWeights": "its weights are packed, and frozen: there is nothing to try"},
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
    """Trains from several seeds for a few steps each, and goes on from the beginning with the best.

    A seed decides the network's initial weights and what dropout draws; the data and its order are the same for all.
    The first is the run's own (`seed_everything`), the others follow it. The best has the least mean loss over the last
    tenth of its steps. All are put back: the run is bitwise that with the best in `seed_everything`, where nothing
    else draws from it. `random_restart.png` and `random_restart.csv` in the run folder show all losses.

    Args:
        seeds: How many to try, at least 2.
        num_steps: Optimizer steps of each.

    Raises:
        ConfigError: If a value is out of range, or the loss is finite from no seed.

    Example:
        trainer:
          callbacks+:
            - class_path: RandomRestart
              init_args: {seeds: 4, num_steps: 50}
    """

    def __init__(self, seeds: int = 4, num_steps: int = 50) -> None:
        if seeds < 2 or num_steps < 1:
            raise ConfigError(
                f"RandomRestart takes seeds from 2 and num_steps from 1 upwards, not {seeds} and {num_steps}."
            )
        self.seeds, self.num_steps = seeds, num_steps
        self._seed: int | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what trial steps do not work with, and trials that are longer than the run."""
        yield from misfits(run)
        steps, trials = run.argument("trainer.max_steps") or -1, own.arguments.get("num_steps") or 0
        if 0 < steps < trials:
            yield f"num_steps is {trials}, the whole run only {steps} steps long: lower it"

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed that was chosen."""
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it over."""
        self._seed = state_dict["seed"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tries the seeds before the first step of a run; a resumed one goes on with its seed's random numbers."""
        if trainer.ckpt_path:
            pl_module._seed = pl_module._seed if self._seed is None else self._seed
            return
        first = pl_module._seed
        say(trainer, self, f"{self.seeds} seeds from {first} on, {self.num_steps} trial steps each ...")
        curves = {seed: self._curve(trainer, seed) for seed in range(first, first + self.seeds)}
        scores = {seed: _score(losses) for seed, losses in curves.items()}
        best = min(scores, key=scores.__getitem__)
        if trainer.is_global_zero:
            _write(Path(trainer.default_root_dir), curves, best)
        if not math.isfinite(scores[best]):
            raise ConfigError(
                "RandomRestart: from no seed the loss stayed finite; see random_restart.csv in the run folder.\n"
                "Lower the learning rate (LRFinder finds one), or look for the fault with NonFiniteGuard."
            )
        begin(trainer, best)
        self._seed = best
        told = ", ".join(f"{seed}: {score:.4f}" for seed, score in scores.items())
        say(
            trainer,
            self,
            f"seed {best} is the best; loss of each in nats per token: {told}. The run begins with it.",
        )

    def _curve(self, trainer: Trainer, seed: int) -> list[float]:
        """Returns the losses from a seed on, the same on every rank."""
        begin(trainer, seed)
        with trial(trainer) as steps:
            losses = [float(next(steps)) for _ in range(self.num_steps)]
        return list(trainer.strategy.broadcast(losses))


def begin(trainer: Trainer, seed: int) -> None:
    """Gives the network the weights that it would have been initialised with from this seed; called on every rank.

    It is built once more, as the strategy has it built; its values go where the first one's are, from rank 0.
    """
    module: Any = trainer.lightning_module
    seed_everything(seed, verbose=False)
    module._seed = seed
    with (
        trainer.strategy.tensor_init_context(),
        trainer.strategy.model_sharded_context(),
        trainer.precision_plugin.module_init_context(),
    ):
        network = changed(module.build_network(), trainer)
    random = _collect_rng_states()
    reshard(module)
    own = {**dict(module.network.named_parameters()), **dict(module.network.named_buffers())}
    device, main = trainer.strategy.root_device, trainer.is_global_zero
    for name, value in [*network.named_parameters(), *network.named_buffers()]:
        value = value.detach().to(device) if main else torch.empty_like(value, device=device)
        if trainer.world_size > 1:
            dist.broadcast(value, 0)
        if name in own:  # of a pipeline's stages each has some
            take(own[name], value)
    _set_rng_states(random)


def _score(losses: list[float]) -> float:
    last = losses[-max(len(losses) // 10, 1) :]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else math.inf


def _write(folder: Path, curves: dict[int, list[float]], best: int) -> None:
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["step", *(f"loss of seed {seed} (nats/token)" for seed in curves)])
    rows.writerows(
        [step, *map(repr, losses)] for step, losses in enumerate(zip(*curves.values(), strict=True), 1)
    )
    durable.write(folder / "random_restart.csv", table.getvalue())
    figure = draw(curves, best)
    pictures.save(figure, folder / "random_restart.png")


def draw(curves: dict[int, list[float]], best: int) -> Figure:
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
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("the same batches from several seeds", loc="left")
    pictures.tidy(axes)
    axes.legend(frameon=False)
    return figure
