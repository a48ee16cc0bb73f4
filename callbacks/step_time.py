"""How long steps take, and which part of them waits for data, computes, communicates, or does something else."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.optim import Optimizer

from core.errors import ConfigError
from core.lightning_compat import unwrapped
from core.technique import technique
from core.training.figures import log_figures
from toolkit.collectives import WatchCollectives
from toolkit.intervals import common, length, union
from toolkit.phase_clock import Phase, PhaseClock, is_over, seconds_between

PHASES = ("data", "forward", "backward", "optimizer", "other")
PAUSE = "pause"
PERCENTILES = (50, 90, 99)


@technique(
    paper="percentiles and phases of a step: MegaScale, arXiv:2402.15627, section 5.1; communication that is not hidden "
    "behind computation: PyTorch FSDP, arXiv:2304.11277, section 3.3",
    after=("Throughput", "ProgressBar", "LossCurve", "TextSamples", "MemoryMonitor", "RewardWatch"),
    observer=True,
)
class StepTime(Callback):
    """Percentiles of the time of a step, the shares of its phases, and how far the slowest rank is behind.

    Logged are, in each logged step:

    - `time/step_p50_ms`, `time/step_p90_ms`, `time/step_p99_ms`: of the last `window` optimizer steps, mean over ranks.
    - `time/data_share` (waiting for the next batch), `time/forward_share`, `time/backward_share`, `time/optimizer_share` and
      `time/other_share` (gradient weighing, callbacks, loggers): shares of the steps since the last logged one, mean over
      ranks; together with `time/communication_share` they are 1.
    - `time/communication_share`, with several ranks: the time in which a collective was under way and this rank computed
      nothing, waiting for slower ranks included. It is measured in every `every_n_steps`-th step, which takes longer and is
      left out of the other figures, and taken off the phases that it is in. Without a measurement so far it is missing.
    - `time/slowest_rank_ratio`, with several ranks: data and forward time of the slowest rank over the median, both without
      what follows, in which ranks wait for each other. Strategies that shard weights also wait in the forward pass: there,
      only slow data is seen. `Heartbeat` names the rank.

    The steps up to the first logged one after a start are left out, and so are validation, checkpoints and sampling. On CUDA
    phases are those of the device, measured with events that are read later; nothing waits. What callbacks do behind this one
    at the end of a batch counts as waiting for data, and where a pipeline goes through both passes at once, all of it as forward.

    Args:
        window: Optimizer steps of the percentiles.
        every_n_steps: Optimizer steps between two measurements of communication, at least 2; 0: none.

    Raises:
        ConfigError: If an argument is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: StepTime
              init_args: {window: 100, every_n_steps: 100}
    """

    def __init__(self, window: int = 100, every_n_steps: int = 100) -> None:
        if window < 1 or every_n_steps < 0 or every_n_steps == 1:
            raise ConfigError(
                f"StepTime takes window >= 1, and every_n_steps >= 2 or 0, not {window} and {every_n_steps}."
            )
        self.window, self.every_n_steps = window, every_n_steps
        self._clock = PhaseClock(torch.device("cpu"))
        self._handles: list[Any] = []
        self._forget(0)

    def _forget(self, step: int) -> None:
        self._step, self._tried = step, -1  # optimizer steps of the run so far; when a sample was last begun
        self._paused = self._stepping = self._ends_step = self._warm = False
        self._watch: WatchCollectives | None = None
        # step -> its collectives and when it began, not read yet
        self._watched: dict[int, tuple[WatchCollectives, Any]] = {}
        self._read = step
        self._steps: deque[float] = deque(maxlen=self.window)
        self._exposed: dict[str, float] | None = None  # seconds of communication in each phase of a step

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Starts the clock."""
        self._clock = PhaseClock(pl_module.device)
        self._forget(trainer.global_step)
        self._samples = self.every_n_steps if trainer.world_size > 1 else 0
        optimizers = [unwrapped(optimizer) for optimizer in trainer.optimizers]
        self._handles = [
            optimizer.register_step_post_hook(self._stepped)
            for optimizer in optimizers
            if isinstance(optimizer, Optimizer)
        ]
        self._clock.begin()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Ends the wait for data."""
        self._clock.mark(PAUSE if self._paused else "data")
        self._paused = False
        if self._samples and not (self._step + 1) % self._samples and self._tried != self._step:
            self._tried = self._step
            self._watch = WatchCollectives.start(self._clock.now)

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        """Ends the forward pass."""
        self._clock.mark("forward")

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """Ends the backward pass."""
        self._clock.mark("backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        """Begins the optimizer's step."""
        self._clock.mark("other")
        self._stepping = self._ends_step = True

    def _stepped(self, *_: Any) -> None:
        if self._stepping:
            self._clock.mark("optimizer")
            self._stepping = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the step with its last micro-batch; logs the figures where it is the turn."""
        self._clock.mark("optimizer" if self._stepping else "other")
        if not self._ends_step:
            return
        self._stepping = self._ends_step = False
        began = self._clock.end_step()
        self._step += 1
        if (watch := self._stop_watching()) is not None:
            self._watched[self._step] = watch, began
        if pl_module.logging_step:
            self._log(trainer, pl_module)

    def pause_clock(self) -> None:
        """Leaves out the time until the next training batch starts."""
        self._paused = True

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Stops the clock."""
        self.pause_clock()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Stops the clock."""
        self.pause_clock()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Stops watching where a step breaks off."""
        self._stop_watching()

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Takes its hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _stop_watching(self) -> WatchCollectives | None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        return watch

    def _log(self, trainer: Trainer, pl_module: Any) -> None:
        """Logs what the device has finished, but for the steps up to the first logged one after a start."""
        seconds, counted = dict.fromkeys((*PHASES, PAUSE), 0.0), 0
        for phases in self._clock.read():
            self._read += 1
            if (watched := self._watched.pop(self._read, None)) is not None:
                self._exposed = exposed_seconds(*watched, phases)
            elif self._warm:
                self._steps.append(sum(end - begin for name, begin, end in phases if name != PAUSE))
                for name, begin, end in phases:
                    seconds[name] += end - begin
                counted += 1
        if self._warm:
            self._share(trainer, pl_module, self._row(seconds, counted))
        self._warm = True

    def _row(self, seconds: dict[str, float], counted: int) -> list[float]:
        """Returns this rank's percentiles, shares of phases and of communication, and seconds before the backward pass."""
        if not counted:  # the device is behind, or the only step was a sample
            return [float("nan")] * (len(PERCENTILES) + len(PHASES) + 2)
        phases = {name: seconds[name] for name in PHASES}
        alone, whole = phases["data"] + phases["forward"], sum(phases.values())
        communication = float("nan") if self._exposed is None else 0.0
        for name, exposed in (self._exposed or {}).items():
            moved = min(exposed * counted, phases[name])
            phases[name] -= moved
            communication += moved
        times = np.percentile(list(self._steps), PERCENTILES).tolist()
        return [*times, *(phases[name] / whole for name in PHASES), communication / whole, alone]

    def _share(self, trainer: Trainer, pl_module: Any, own: list[float]) -> None:
        rows = torch.tensor([own], dtype=torch.float64)
        if trainer.world_size > 1:
            gathered = pl_module.all_gather(rows[0].to(pl_module.device))
            rows = gathered.view(trainer.world_size, -1).cpu()
        names = [f"step_p{p}_ms" for p in PERCENTILES]
        names += [f"{name}_share" for name in (*PHASES, "communication")]
        figures = {f"time/{name}": mean for name, mean in zip(names, rows.nanmean(0).tolist(), strict=False)}
        for p in PERCENTILES:
            figures[f"time/step_p{p}_ms"] *= 1e3
        if trainer.world_size > 1:
            before = rows[:, -1]
            figures["time/slowest_rank_ratio"] = float(before.max() / before.median().clamp(min=1e-9))
        log_figures(trainer, {name: value for name, value in figures.items() if math.isfinite(value)})


def exposed_seconds(watch: WatchCollectives, began: Any, phases: list[Phase]) -> dict[str, float]:
    """Returns the seconds of each phase in which collectives were under way and nothing was computed.

    Args:
        watch: What was seen in the step.
        began: The moment in which the step began.
        phases: Its phases.
    """

    def since(spans: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        return union([(seconds_between(began, begin), seconds_between(began, end)) for begin, end in spans])

    under_way = since([(each.begin, each.end) for each in watch.collectives if is_over(each.end)])
    hidden = common(under_way, since(watch.computing))
    found = dict.fromkeys(PHASES, 0.0)
    for name, begin, end in phases:
        if name in found:
            within = [(begin, end)]
            found[name] += length(common(under_way, within)) - length(common(hidden, within))
    return found
