"""Folders of prepared tokens: recognised, and their manifest read, wherever somebody names one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import ConfigError

MANIFEST, PLAN, TOKENIZER = "manifest.json", "plan.json", "tokenizer.json"

SCHEMES = ("s3://", "gs://", "azure://", "hf://", "r2://", "local:")
"""What litdata downloads from; `local:/mnt/share/corpus` is a slow folder that is read through the cache."""


def is_remote(source: Any) -> bool:
    """Returns whether a `data.source` names a folder that has to be downloaded from; see `core.data.remote_folder`."""
    return isinstance(source, str) and source.startswith(SCHEMES)


def default_cache_dir() -> Path:
    """Returns where data goes that was prepared or downloaded without a place being named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "leyden").expanduser()


def whole_folder(name: str) -> Path:
    """Returns the folder that an argument of a command names.

    Raises:
        ConfigError: If it is none that `prepare` has written to its end, on this machine.
    """
    if is_remote(name):
        raise ConfigError(
            f"{name} is not on this machine: only runs read such folders. Copy it first, for example with\n"
            f"`aws s3 sync {name} DIR` or `rclone copy`."
        )
    if (folder := prepared_folder(name)) is None:
        raise ConfigError(f"{name} has no {MANIFEST}: it is no folder that prepare has written to its end.")
    return folder


def prepared_folder(source: Any) -> Path | None:
    """Returns the folder that a `data.source` names if it holds prepared tokens; None for text.

    Raises:
        ConfigError: If the folder is one that `prepare` has begun and not finished.
    """
    if not isinstance(source, str) or not source:
        return None
    folder = Path(source).expanduser()
    if (folder / MANIFEST).is_file():
        return folder
    if (folder / PLAN).is_file():
        raise ConfigError(
            f"{folder} is not finished: it has no {MANIFEST}.\nRun the same `python -m core prepare` again; it goes "
            "on where it was."
        )
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns a prepared folder's manifest.

    Raises:
        ConfigError: If it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or not isinstance(manifest["vocab_size"], int):
            raise ValueError("it is no manifest of prepared tokens")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is missing or damaged: {type(error).__name__}: {error}") from error
    return manifest


def read_tokenizer(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Returns a prepared folder's tokenizer.json.

    Raises:
        ConfigError: If it is missing, or not the one that the folder was written with.
    """
    path = folder / TOKENIZER
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    told = manifest.get("files", {}).get(TOKENIZER, {}).get("sha256")
    if told not in (None, hashlib.sha256(content).hexdigest()):
        raise ConfigError(
            f"{path} is damaged, or another tokenizer than the folder was written with: {MANIFEST} knows another "
            "SHA-256."
        )
    return content.decode()


def stored_vocab_size(source: Any) -> int | None:
    """Returns the number of token ids of the prepared folder that a `data.source` names; None for text."""
    folder = prepared_folder(source)
    return read_manifest(folder)["vocab_size"] if folder else None


def check_shares(validation_fraction: float, max_reject_fraction: float) -> None:
    """Raises a ConfigError where one of the shares that `data` takes is out of range."""
    if not 0 < validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction is {validation_fraction}; it lies between 0 and 1.")
    if not 0 <= max_reject_fraction < 1:
        raise ConfigError(f"data.max_reject_fraction is {max_reject_fraction}; it is at least 0 and below 1.")
