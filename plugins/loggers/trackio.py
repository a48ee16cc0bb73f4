"""Figures, configuration and files of a run in Trackio."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.technique import Package, technique
from plugins.loggers.tracker import Checkpoints, Tracker


@technique(
    paper="Trackio, github.com/gradio-app/trackio",
    needs=[Package("trackio>=0.43", "trackio")],
)
class Trackio(Tracker):
    """Writes a run for Trackio: figures, configuration, techniques, pictures and, if asked, checkpoints.

    Without a server or an account: it is written to Trackio's folder (the environment variable TRACKIO_DIR, or Hugging Face's
    cache), and `trackio show` shows it. With TRACKIO_SPACE_ID or TRACKIO_SERVER_URL it is sent there; no config can do that.

    Trackio's step grows. It is the number of optimizer steps, and those that were discarded: after a rollback
    (`SpikeRollback`), or a resume from an earlier step, the next step follows the last one. Each row also has
    `optimizer_step`, and `attempt`, which begins at 1 and rises when training goes back. A resumed run continues the
    same run in Trackio. All figures of a step are one row, sent when the next one begins: a process that is killed loses
    at most those of its last step.

    Args:
        save_dir: The run folder.
        project: Trackio's project.
        checkpoints: What is sent of the run's checkpoints (`checkpoints/step-N.ckpt`), as artifacts: "reference", their
            paths; "copy", the files; None: nothing.

    Raises:
        ConfigError: If no run can be begun, or Trackio holds no such run any more.

    Example:
        trainer:
          logger+:
            - class_path: Trackio
              init_args: {project: leyden}
    """

    def __init__(
        self, save_dir: str = "${run_folder}", project: str = "leyden", checkpoints: Checkpoints = None
    ) -> None:
        super().__init__(save_dir, checkpoints)
        self._project = project

    def _begin(self, run_id: str | None, name: str) -> tuple[str, Any]:
        import trackio

        # Trackio finds a run to continue by its name alone.
        name = run_id or f"{name}-{uuid.uuid4().hex[:6]}"
        options: dict[str, Any] = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        try:
            run = trackio.init(self._project, name, resume="must" if run_id else "never", **options)
        except ValueError as error:
            raise OSError(str(error)) from error
        return name, run

    def _configure(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(config)

    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def _send_file(self, path: Path) -> None:
        import trackio

        if path.suffix == ".png":
            self._run.log({self._picture_name(path): trackio.Image(str(path))}, step=self._newest_step)
        else:
            name = path.relative_to(self._folder).as_posix()
            self._run.log_artifact(str(path), name=f"{self._run.name}-{name}", type="text")

    def _send_checkpoint(self, path: Path, step: int, copy: bool) -> None:
        import trackio

        artifact = self._artifact(trackio, f"{self._run.name}-checkpoint", path, step, copy)
        self._run.log_artifact(artifact, aliases=[f"step-{step}"])

    def _end(self, failed: bool) -> None:
        self._run.finish()
