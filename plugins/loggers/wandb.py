"""Figures, configuration and files of a run in Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.technique import Package, technique
from plugins.loggers.tracker import Checkpoints, Tracker


@technique(
    paper="Weights & Biases, docs.wandb.ai: offline runs, resuming",
    needs=[Package("wandb>=0.22", "wandb")],
)
class Wandb(Tracker):
    """Writes a run for Weights & Biases: figures, configuration, techniques, pictures and, if asked, checkpoints.

    Offline: it is written to `wandb/` in the run folder, without an account, and `wandb sync RUN_FOLDER/wandb/offline-run-*`
    sends it. With the environment variable WANDB_MODE=online it is sent during the run; WANDB_ENTITY and the like work as
    always. No config can do that.

    W&B ignores steps that do not grow. Its step is the number of optimizer steps, and those that were discarded: after
    a rollback (`SpikeRollback`), or a resume from an earlier step, the next step follows the last one. Each row also has
    `optimizer_step`, and `attempt`, which begins at 1 and rises when training goes back. A resumed run continues the
    same W&B run; offline it is a second folder with the same id. All figures of a step are sent together when the next
    one begins: a process that is killed loses at most those of its last step.

    Args:
        save_dir: The run folder.
        project: The W&B project.
        checkpoints: What is sent of the run's checkpoints (`checkpoints/step-N.ckpt`), as artifacts: "reference", their
            paths; "copy", the files; None: nothing.

    Raises:
        ConfigError: If no run can be begun.

    Example:
        trainer:
          logger+:
            - class_path: Wandb
              init_args: {project: leyden}
    """

    def __init__(
        self, save_dir: str = "${run_folder}", project: str = "leyden", checkpoints: Checkpoints = None
    ) -> None:
        super().__init__(save_dir, checkpoints)
        self._project = project

    def _begin(self, run_id: str | None, name: str) -> tuple[str, Any]:
        os.environ.setdefault(
            "WANDB_ERROR_REPORTING", "false"
        )  # of crashes, to its makers; read when it is imported
        import wandb

        folder = self._folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        run_id = run_id or uuid.uuid4().hex[:12]
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        try:
            run = wandb.init(
                project=self._project,
                id=run_id,
                name=name,
                dir=str(folder),
                mode=mode,
                resume="allow",
                settings=wandb.Settings(silent=mode == "offline"),
            )
        except wandb.Error as error:
            raise OSError(str(error)) from error
        return run_id, run

    def _configure(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def _send_file(self, path: Path) -> None:
        import wandb

        if path.suffix == ".png":
            # with its step: otherwise each picture takes a step of its own, and W&B ignores the rows that come then
            self._run.log({self._picture_name(path): wandb.Image(str(path))}, step=self._newest_step)
        else:
            self._run.save(str(path), base_path=str(self._folder), policy="now")

    def _send_checkpoint(self, path: Path, step: int, copy: bool) -> None:
        import wandb

        artifact = self._artifact(wandb, f"checkpoint-{self._run.id}", path, step, copy)
        self._run.log_artifact(artifact, aliases=[f"step-{step}"])

    def _end(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
