"""The command `plot-schedule`: learning rate, batch size and sequence length of a run that was not started."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from core.contracts import HasRows
from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.run_commands import build
from plugins.commands.plugins_terminal import write
from toolkit import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS = 5000
"""Longer runs are drawn with every n-th step, the first and the last included."""
MAX_STEPS = 10_000_000
"""Optimizer steps that are gone through: some minutes."""


class Step(NamedTuple):
    """What one optimizer step is made with.

    Attributes:
        step: Counted from 1.
        tokens: Positions of all ranks up to its end, padding included.
        learning_rate: Of the first parameter group.
        tokens_per_step: Positions of its global batch.
        sequence_length: Tokens in a row.
    """

    step: int
    tokens: int
    learning_rate: float
    tokens_per_step: int
    sequence_length: int


@technique(paper="own work: what a run would do, seen before it costs anything")
def plot_schedule(arguments: list[str]) -> int:
    """Draws learning rate, batch size and sequence length over tokens, before anything runs: --config X.

    Takes what `fit` takes. Writes schedule.png and schedule.csv: optimizer step, tokens up to its end (positions,
    padding included), learning rate, tokens per optimizer step and tokens per row.

    Example:
        python -m core plot-schedule --config quickstart --output runs/plot-schedule
    """
    parser = Parser(
        prog="python -m core plot-schedule", description=plot_schedule.__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--output", metavar="DIR", default="runs/plot-schedule", help="where to write: %(default)s"
    )
    options, rest = parser.parse_known_args(arguments)
    steps = simulate(build("fit", rest))
    folder, last = Path(options.output), steps[-1]
    picture = pictures.as_png(draw(steps))
    write(folder / "schedule.csv", as_csv(steps))
    write(folder / "schedule.png", picture)
    rates = [step.learning_rate for step in steps]
    print(f"\n{last.step:,} optimizer steps, {last.tokens:,} tokens. Nothing was started.")
    print(f"Learning rate: first {rates[0]:g}, highest {max(rates):g}, last {rates[-1]:g}.")
    print(f"Written: {folder}/schedule.png and schedule.csv")
    return 0


def simulate(cli: Any) -> list[Step]:
    """Goes through the optimizer steps of a run that is built and not started.

    Raises:
        ConfigError: If its length or the shape of its batches is not known.
    """
    total, tokens = cli.trainer.max_steps, 0
    if total < 1:
        raise ConfigError("The run has no length in steps: set --trainer.max_steps.")
    if total > MAX_STEPS:
        raise ConfigError(
            f"trainer.max_steps is {total:,}; plot-schedule goes through each step, {MAX_STEPS:,} at most."
        )
    from core.contracts import Schedule

    optimizer, schedule, warms_up = _on_one_weight(cli.model, total)
    group = optimizer.param_groups[0]
    steps, every = [], -(-total // MAX_ROWS)
    counts = isinstance(schedule, Schedule)
    for number in range(1, total + 1):
        rows, length, factor = shape(cli, number - 1, tokens)
        if counts:
            schedule.begin_step(rows * length)
        tokens += rows * length
        if warms_up:
            optimizer.step()
        if number % every == 0 or number in (1, total):
            rate = float(group["scheduled_lr" if warms_up else "lr"]) * factor
            steps.append(Step(number, tokens, rate, rows * length, length))
        if schedule is not None:
            schedule.step()
    return steps


def _on_one_weight(model: Any, total: int) -> tuple[Any, Any, bool]:
    """Returns the optimizer and schedule of a run, for one weight, and whether the optimizer sets the rate by itself."""
    import torch

    from core.contracts import Schedule

    weight = torch.nn.Parameter(torch.zeros(1, 1))
    weight.grad = torch.zeros_like(weight)
    optimizer = model.build_optimizer([weight])
    warms_up = "scheduled_lr" in optimizer.param_groups[0]  # schedule-free ones
    if not warms_up:
        optimizer = torch.optim.SGD([weight], lr=float(optimizer.param_groups[0]["lr"]))
    schedule: Any = model.build_lr_scheduler(optimizer) if model.build_lr_scheduler else None
    if isinstance(schedule, Schedule):
        schedule.bind(total)
    if not warms_up:
        optimizer.step()  # torch's schedules warn if no step was made before theirs
    return optimizer, schedule, warms_up


def shape(cli: Any, step: int, tokens: int) -> tuple[int, int, float]:
    """Returns the rows of a step's global batch, the tokens of a row, and what the rate is multiplied by."""
    from toolkit.batch_shapes import Shape, ShapeSchedule

    data, trainer = cli.datamodule, cli.trainer
    rows, length = (
        getattr(data, "batch_size", None),
        data.sequence_length if isinstance(data, HasRows) else None,
    )
    if not rows or not length:
        raise ConfigError(
            f"{type(data).__name__} does not say how large its batches are: it has no batch_size and sequence_length."
        )
    dp_size = int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
    full = found = Shape(length, rows, trainer.accumulate_grad_batches)
    factor = 1.0
    for schedule in (callback for callback in trainer.callbacks if isinstance(callback, ShapeSchedule)):
        found = schedule.shape(step, tokens, trainer.max_steps, full)
        factor *= schedule.lr_factor(tokens)
    return found.batch_size * found.accumulated * dp_size, found.sequence_length, factor


def as_csv(steps: list[Step]) -> str:
    """Returns one row a step."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Step._fields)
    writer.writerows(steps)
    return text.getvalue()


def draw(steps: list[Step]) -> Figure:
    """Draws three curves over the tokens, one above the other."""
    from matplotlib.ticker import EngFormatter

    figure = pictures.new_figure(8, 7)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    curves = {
        "learning_rate": ("learning rate", "tab:blue"),
        "tokens_per_step": ("batch size\n(tokens per step)", "tab:orange"),
        "sequence_length": ("row length\n(tokens)", "tab:green"),
    }
    # A step has its values from its beginning to its end.
    ends = [0, *(step.tokens for step in steps)]
    for axes, (name, (label, color)) in zip(panels, curves.items(), strict=True):
        axes.stairs([getattr(step, name) for step in steps], ends, baseline=None, color=color, linewidth=1.8)
        axes.set_ylim(bottom=0, top=1.1 * max(getattr(step, name) for step in steps) or 1)
        axes.set_ylabel(label)
        pictures.tidy(axes)
        if name != "learning_rate":
            axes.yaxis.set_major_formatter(EngFormatter())
    panels[-1].xaxis.set_major_formatter(EngFormatter())
    panels[-1].set_xlabel("tokens (positions of all ranks)")
    panels[0].set_title(f"{steps[-1].step:,} optimizer steps, {steps[-1].tokens:,} tokens", loc="left")
    return figure
