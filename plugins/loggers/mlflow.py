"""Figures, configuration and files of a run in MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.technique import Package, technique
from plugins.loggers.tracker import Checkpoints, Tracker

MOST_PER_CALL = 100
"""Limit of parameters, and of tags, of one call of MLflow."""

LONGEST = 500
"""Limit of a parameter's text in all stores of MLflow."""


@technique(
    paper="MLflow 3, mlflow.org; a store of it: SQLAlchemy",
    needs=[
        Package("mlflow-skinny>=3", "mlflow"),
        Package("sqlalchemy>=2", "mlflow"),
        Package("alembic>=1.10", "mlflow"),
    ],
)
class Mlflow(Tracker):
    """Sends a run to MLflow: figures, configuration, techniques with versions, pictures and, if asked, checkpoints.

    Without a server: the store is the file `mlflow.db` beside the run folder, which all runs there share. To look at it:
    `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`. With the environment variable MLFLOW_TRACKING_URI the
    run is sent there; no config can do that.

    MLflow needs steps that grow. Its step is the number of optimizer steps, and those that were discarded: after
    a rollback (`SpikeRollback`), or a resume from an earlier step, the next step follows the last one. Each row also has
    `optimizer_step`, and `attempt`, which begins at 1 and rises when training goes back. A resumed run continues the same
    MLflow run. All figures of a step are sent together when the next one begins: a process that is killed loses at most
    those of its last step. What cannot be sent is kept, with a warning, and sent with the next.

    MLflow's parameters cannot change: where a resumed run has another value, it is the tag `changed.KEY`.

    Args:
        save_dir: The run folder.
        experiment: The MLflow experiment, made if missing.
        checkpoints: What is sent of the run's checkpoints (`checkpoints/step-N.ckpt`): "reference", their paths as tags;
            "copy", the files; None: nothing.

    Raises:
        ConfigError: If the store cannot be reached, or holds no such run any more.

    Example:
        trainer:
          logger+:
            - class_path: Mlflow
              init_args: {experiment: leyden}
    """

    def __init__(
        self, save_dir: str = "${run_folder}", experiment: str = "leyden", checkpoints: Checkpoints = None
    ) -> None:
        super().__init__(save_dir, checkpoints)
        self._experiment = experiment
        self._id = ""

    def _begin(self, run_id: str | None, name: str) -> tuple[str, Any]:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
        from mlflow import MlflowClient

        beside = self._folder.resolve().parent
        with _as_os_error():
            client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{beside}/mlflow.db")
            if run_id is None:
                found = client.get_experiment_by_name(self._experiment)
                own = None if "MLFLOW_TRACKING_URI" in os.environ else (beside / "mlflow-artifacts").as_uri()
                experiment = found.experiment_id if found else client.create_experiment(self._experiment, own)
                run_id = client.create_run(experiment, run_name=name).info.run_id
            else:
                client.update_run(run_id, status="RUNNING")
        self._id = run_id
        return run_id, client

    def _configure(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        values = {re.sub(r"[^\w./ -]", "_", key)[:250]: str(value)[:LONGEST] for key, value in config.items()}
        with _as_os_error():
            known = self._run.get_run(self._id).data.params
            new = [Param(key, value) for key, value in values.items() if key not in known]
            changed = [
                RunTag(f"changed.{key}", value)
                for key, value in values.items()
                if known.get(key, value) != value
            ]
            for start in range(0, len(new), MOST_PER_CALL):
                self._run.log_batch(self._id, params=new[start : start + MOST_PER_CALL])
            for start in range(0, len(changed), MOST_PER_CALL):
                self._run.log_batch(self._id, tags=changed[start : start + MOST_PER_CALL])

    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(re.sub(r"[^\w./ -]", "_", name), value, now, step) for name, value in figures.items()]
        with _as_os_error():
            for start in range(0, len(rows), 1000):
                self._run.log_batch(self._id, metrics=rows[start : start + 1000])

    def _send_file(self, path: Path) -> None:
        parent = path.relative_to(self._folder).parent.as_posix()
        with _as_os_error():
            self._run.log_artifact(self._id, str(path), None if parent == "." else parent)

    def _send_checkpoint(self, path: Path, step: int, copy: bool) -> None:
        with _as_os_error():
            self._run.set_tag(self._id, f"checkpoint.{step}", str(path.resolve()))
            if copy and path.is_dir():
                self._run.log_artifacts(self._id, str(path), f"checkpoints/{path.name}")
            elif copy:
                self._run.log_artifact(self._id, str(path), "checkpoints")

    def _end(self, failed: bool) -> None:
        with _as_os_error():
            self._run.set_terminated(self._id, "FAILED" if failed else "FINISHED")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raises what MLflow cannot do at the moment as an OSError."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise OSError(str(error).partition("\n")[0]) from error
