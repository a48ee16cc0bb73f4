"""Notes which messages a step and a validation take, which schedules of a pipeline run, and their buffers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from plugins.strategies.lean_stage import LeanStage
from toolkit.collectives import WatchCollectives


class CountedSteps(Callback):
    """Writes what the second step and the second validation did to `counted.RANK.json`.

    Args:
        folder: Where to write.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.validations = Path(folder), 0
        self.watch: WatchCollectives | None = None
        self.found: dict[str, list[Any]] = {"schedules": [], "buffers": []}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for kind in (PipelineScheduleMulti, PipelineScheduleSingle):
            self._count(kind)
        make_room = LeanStage._make_room

        def counted(stage: Any, kind: str, infos: Any, chunk: int) -> None:
            make_room(stage, kind, infos, chunk)
            if self.watch is not None:
                self.found["buffers"].append(
                    sum(one.buffer is not None for of in infos.values() for one in of)
                )

        LeanStage._make_room = counted  # type: ignore[method-assign]

    def _count(self, kind: Any) -> None:
        plain = kind.step

        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if self.watch is not None:
                self.found["schedules"].append(schedule._n_microbatches)
            return plain(schedule, *args, **kwargs)

        kind.step = step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1 and self.watch is None:
            self.watch = WatchCollectives.start(time.perf_counter)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 2:
            self._stop("step")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validations += 1
        if self.validations == 2:
            self.watch = WatchCollectives.start(time.perf_counter)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop("validation")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (self.folder / f"counted.{trainer.global_rank}.json").write_text(json.dumps(self.found))

    def _stop(self, name: str) -> None:
        if self.watch is not None:
            self.watch.stop()
            self.found[name] = [(one.name, one.bytes) for one in self.watch.collectives]
            self.watch = None
