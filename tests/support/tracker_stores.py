"""What trackers hold of the runs that were logged, read with their own packages."""

import json
import struct
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = {"Mlflow": ("mlflow", "sqlalchemy"), "Wandb": ("wandb",), "Trackio": ("trackio",)}


def needs(name):
    """Skips a test where the packages of a tracker are not installed."""
    if missing := [package for package in PACKAGES[name] if find_spec(package) is None]:
        pytest.skip(f"needs {' and '.join(missing)}")


@dataclass
class Held:
    """What a tracker holds: figures by its step, configuration, names of pictures, steps of checkpoints."""

    runs: int
    rows: dict
    config: dict
    pictures: set
    checkpoints: set


def mlflow_runs(folder):
    """Returns the client and the runs of a folder."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")
    return client, client.search_runs([client.get_experiment_by_name("leyden").experiment_id])


def mlflow_rows(folder):
    client, (run, *_) = mlflow_runs(folder)
    rows = {}
    for name in run.data.metrics:
        for one in client.get_metric_history(run.info.run_id, name):
            rows.setdefault(one.step, {})[name] = one.value
    return dict(sorted(rows.items()))


def of_mlflow(folder):
    client, runs = mlflow_runs(folder)
    data, id = runs[0].data, runs[0].info.run_id
    pictures = {Path(one.path).stem for one in client.list_artifacts(id) if one.path.endswith(".png")}
    checkpoints = {int(key.partition(".")[2]) for key in data.tags if key.startswith("checkpoint.")}
    assert runs[0].info.status == "FINISHED"
    assert data.tags["changed.trainer.max_steps"] == "10"
    assert runs[0].info.run_name == folder.name
    return Held(len(runs), mlflow_rows(folder), data.params, pictures, checkpoints)


def of_trackio(folder, project="tracker-stores"):
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_runs(project)
    rows, pictures = {}, set()
    for row in SQLiteStorage.get_logs(project, runs[0]):
        images = {key for key, value in row.items() if isinstance(value, dict)}
        pictures |= images
        rows.setdefault(row["step"], {}).update({key: row[key] for key in row.keys() - images})
    config = SQLiteStorage.get_run_config(project, runs[0])
    name = f"{runs[0]}-checkpoint"
    steps = {
        step for step in (4, 10) if SQLiteStorage.resolve_artifact_version(project, name, f"step-{step}")
    }
    return Held(len(runs), rows, config, pictures, steps)


def records(data):
    """Yields the records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    at, parts = 7, []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield b"".join(parts)
            parts = []


def of_wandb(folder):
    from wandb.proto import wandb_internal_pb2

    rows, config, pictures, checkpoints, ids = {}, {}, set(), set(), set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            if record.HasField("config"):
                config |= {
                    one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.config.update
                }
            if record.HasField("artifact") and record.artifact.type == "model":
                checkpoints.add(json.loads(record.artifact.metadata)["step"])
            if record.HasField("history"):
                # a picture is several items, in any order: its path, its size...
                parts = {tuple(one.nested_key) or (one.key,): one.value_json for one in record.history.item}
                pictures |= {key[0] for key in parts if len(key) > 1}
                items = {key[0]: json.loads(value) for key, value in parts.items() if len(key) == 1}
                rows.setdefault(record.history.step.num, {}).update(items)
    return Held(len(ids), rows, config, pictures, checkpoints)


def copies_in_mlflow(folder, step):
    client, (run,) = mlflow_runs(folder)
    return Path(client.download_artifacts(run.info.run_id, f"checkpoints/step-{step:08d}.ckpt")).read_bytes()


def copies_in_trackio(folder, step):
    from trackio import cas
    from trackio.sqlite_storage import SQLiteStorage

    project = "tracker-copies"
    (name,) = SQLiteStorage.get_runs(project)
    found = SQLiteStorage.get_artifact_manifest(project, f"{name}-checkpoint", f"step-{step}")
    (entry,) = found["manifest"]
    return cas.blob_path(project, entry["digest"]).read_bytes()


def copies_in_wandb(folder, step):
    from wandb.proto import wandb_internal_pb2

    for path in folder.glob("wandb/offline-run-*/*.wandb"):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            artifact = record.artifact
            if artifact.type == "model" and json.loads(artifact.metadata)["step"] == step:
                (entry,) = artifact.manifest.contents
                return Path(entry.local_path).read_bytes()
    return None


COPIES = {"Mlflow": copies_in_mlflow, "Trackio": copies_in_trackio, "Wandb": copies_in_wandb}
"""Tracker -> what reads the copy of a checkpoint, by its step."""

READERS = {"Mlflow": of_mlflow, "Trackio": of_trackio, "Wandb": of_wandb}
"""Tracker -> what reads its store."""

ROWS = {
    "Mlflow": mlflow_rows,
    "Trackio": lambda folder: of_trackio(folder, "tracker-copies").rows,
    "Wandb": lambda folder: of_wandb(folder).rows,
}
"""Tracker -> what reads figures by its step."""
