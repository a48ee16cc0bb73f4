"""Reads a checkpoint, a file or a folder, safely: whether it is complete, its content, the record of its run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from core.errors import ConfigError
from plugins.checkpoints import remote_copies, schema, sharded
from plugins.checkpoints.shared_check import noted
from plugins.cli.configuration.class_paths import qualify
from plugins.cli.configuration.yaml_texts import parse_yaml
from toolkit.ranks import launched_rank

RECORD = "leyden"
"""Key of what :class:`plugins.cli.runs.run_record.RunRecord` writes into every checkpoint."""


def defect(path: Path, resumes: bool = False) -> str | None:
    """Returns why a file or folder is not a complete, undamaged checkpoint, or None.

    Ranks that a launcher has started read no tensors of a folder here, which they do in shares when they load it. See
    :func:`plugins.checkpoints.schema.file_defect` and :func:`plugins.checkpoints.sharded.defect`.

    Args:
        path: The checkpoint.
        resumes: Whether a run resumes it: such ranks leave the tensors of a file to :mod:`plugins.checkpoints.shared_check`
            too.

    Raises:
        ConfigError: If it is on object storage and cannot be read or copied.
    """
    if damage := remote_copies.provide(path):
        return damage
    alone = launched_rank() is None
    if sharded.is_sharded(path):
        return sharded.defect(path, sharded.ALL if alone else sharded.NONE)
    if alone or not resumes:
        return schema.file_defect(path)
    return noted(path) or schema.file_defect(path, tensors=False)


class Summary(NamedTuple):
    """What a checkpoint says of itself, without its tensors.

    Attributes:
        error: Why its content is not valid, or None.
        step: The number of optimizer steps; None if it is not known.
        record: What the run wrote into it; empty for a foreign checkpoint.
    """

    error: str | None
    step: int | None = None
    record: Mapping[str, Any] = MappingProxyType({})


def summary(path: Path) -> Summary:
    """Returns what a complete checkpoint says of itself; a file that has not changed is read once."""
    stat = (path / sharded.STATE if sharded.is_sharded(path) else path).stat()
    return _summary(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _summary(path: Path, *_: int) -> Summary:
    try:
        content = checked(sharded.state(path), path) if sharded.is_sharded(path) else read_checkpoint(path)
    except ConfigError as error:
        return Summary(str(error))
    step = content.get("global_step")
    return Summary(None, step if isinstance(step, int) else None, content.get(RECORD, {}))


def invalid_content(path: Path) -> str | None:
    """Returns which content of a complete checkpoint is invalid, or None."""
    error = summary(path).error
    return error.splitlines()[0].removeprefix(f"{path}: ").removesuffix(".") if error else None


def step_recorded(path: Path) -> int | None:
    """Returns the number of optimizer steps recorded in a checkpoint; None if it cannot be read."""
    try:
        return summary(path).step
    except Exception:  # loading it reports the reason
        return None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Loads a checkpoint onto the CPU, tensors and plain values only; a single file is memory-mapped.

    Raises:
        ConfigError: If it is not a Lightning checkpoint, or not valid.
    """
    if sharded.is_sharded(path):
        return sharded.read_sharded(path)
    checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if (
        not isinstance(checkpoint, dict)
        or not {"state_dict", "pytorch-lightning_version"} <= checkpoint.keys()
    ):
        raise ConfigError(f"{path} is not a checkpoint of `python -m core fit`: it has no Lightning state.")
    return checked(checkpoint, path)


def checked(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint if all of its fields have the right types.

    Raises:
        ConfigError: If one has not; names the field.
    """
    if wrong := schema.fault(content):
        raise ConfigError(
            f"{path}: {wrong}: it is damaged or was not written by `python -m core fit`.\n"
            "Take another checkpoint of the run: --ckpt_path CHECKPOINT."
        )
    return content


def record(path: Path) -> dict[str, Any]:
    """Returns the record that a run wrote into its checkpoint; empty for a foreign checkpoint.

    Raises:
        ConfigError: If the checkpoint's content is not valid.
    """
    found = summary(path)
    if found.error is not None:
        raise ConfigError(found.error)
    return dict(found.record)


def stored_config(path: Path) -> dict[str, Any]:
    """Returns the configuration of the run that wrote a checkpoint; empty for a foreign checkpoint."""
    text = record(path).get("config")
    return parse_config(text, path) if text else {}


def parse_config(text: str, path: Path) -> dict[str, Any]:
    """Returns the configuration whose text is in a checkpoint's record; class paths of earlier versions as of today."""
    config: dict[str, Any] = parse_yaml(text, f"{path} (stored config)")[0]
    qualify(config)
    return config
