"""torch.profiler for chosen steps: a trace, a table of operators, and the time in which nothing ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from core import durable
from core.contracts import PausesClock
from core.errors import ConfigError
from core.lightning_compat import is_accumulating
from core.technique import technique
from core.training.figures import log_figures
from toolkit.traces import EVERYWHERE, STEPS, as_text, read_trace
from toolkit.trials import say


@technique(
    paper="torch.profiler (Kineto); idle time as in Holistic Trace Analysis",
    after=("Throughput", "StepTime"),
    observer=True,
)
class Profile(Callback):
    """Profiles chosen steps: a Chrome trace, a table of operators, and how long nothing ran on each thread and stream.

    Writes, for `at_step` 10, `profile_step_10.rank0.json.gz` into the run folder, which https://ui.perfetto.dev and chrome://tracing show,
    and `profile_step_10.rank0.txt` with the table and the longest gaps of each thread and stream, with what ran before and after. Logs `profile/idle_share`, the share of these steps in which nothing ran
    on any thread or stream of rank 0. `python -m core compare-profiles A.json.gz B.json.gz` compares two.

    Validation and the like between these steps are in the profile. Profiled steps take longer; all others cost nothing. A run that is resumed behind the first of these steps does not profile
    them.

    Args:
        at_step: The first optimizer step to profile; the first ones hold warm-up and compilation.
        steps: Optimizer steps that are profiled together.
        every_n_steps: Steps until the next profile begins; 0: there is one.
        ranks: Ranks that profile; each writes a file of its own.
        shapes: Whether the trace has the shapes of inputs.

    Raises:
        ConfigError: If a number is out of range, or profiles would overlap.

    Example:
        trainer:
          callbacks+:
            - class_path: Profile
              init_args: {at_step: 10, steps: 2}
    """

    def __init__(
        self,
        at_step: int = 10,
        steps: int = 2,
        every_n_steps: int = 0,
        ranks: tuple[int, ...] = (0,),
        shapes: bool = False,
    ) -> None:
        if (
            at_step < 1
            or steps < 1
            or 0 < every_n_steps <= steps
            or every_n_steps < 0
            or min(ranks, default=0) < 0
        ):
            raise ConfigError(
                f"Profile takes at_step >= 1, steps >= 1, every_n_steps of 0 or more than steps, and ranks >= 0, not {at_step}, "
                f"{steps}, {every_n_steps} and {ranks}."
            )
        self.at_step, self.steps, self.every_n_steps = at_step, steps, every_n_steps
        self.ranks, self.shapes = ranks, shapes
        self._profiler: Any = None
        self._first = 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins with the first micro-batch of a step that is due."""
        late = trainer.global_step + 1 - self.at_step
        due = late == 0 or (late > 0 and self.every_n_steps and late % self.every_n_steps == 0)
        if due and self._profiler is None and trainer.global_rank in self.ranks:
            self._first = trainer.global_step + 1
            self._profiler = torch.profiler.profile(record_shapes=self.shapes, acc_events=True)
            self._profiler.start()
            self._profiler.add_metadata_json(STEPS, str(self.steps))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends with the last step, writes and logs."""
        if (
            self._profiler is None
            or trainer.global_step < self._first + self.steps - 1
            or is_accumulating(trainer)
        ):
            return
        profiler = self._stop()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PausesClock):
                callback.pause_clock()
        name = f"profile_step_{self._first}.rank{trainer.global_rank}"
        path = Path(trainer.default_root_dir) / f"{name}.json.gz"
        with durable.replacing(path) as temporary:
            whole = temporary.with_name(f"{temporary.name}.json.gz")  # torch packs what is called so
            try:
                profiler.export_chrome_trace(str(whole))
                whole.rename(temporary)
            finally:
                whole.unlink(missing_ok=True)
        say(trainer, self, f"steps {self._first} to {trainer.global_step}: {path}")
        self._summarise(trainer, path)

    def _summarise(self, trainer: Trainer, path: Path) -> None:
        try:
            trace = read_trace(path)
        except ConfigError as error:  # above the limit of files: no reason to end the run
            rank_zero_warn(f"Profile: the trace is written, without a table. {error}")
            return
        durable.write(path.with_name(path.name.replace(".json.gz", ".txt")), as_text(trace))
        if idle := trace.idle():
            log_figures(trainer, {"profile/idle_share": idle[EVERYWHERE]})

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops where a step breaks off; what was seen is not written."""
        if self._profiler is not None:
            self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops where training ends between the steps."""
        if self._profiler is not None:
            self._stop()

    def _stop(self) -> Any:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        return profiler
