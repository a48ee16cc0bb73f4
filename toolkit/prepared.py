"""Recognises folders of prepared tokens, and reads their manifest."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from toolkit import manifest_schema
from toolkit.bounded import parse_json, read_error, read_inside, require_inside

__all__ = [
    "MANIFEST",
    "PLAN",
    "SCHEMES",
    "is_edited",
    "is_remote",
    "prepared_folder",
    "read_manifest",
    "read_tokenizer",
    "split_folder",
    "splits_of",
    "stored_vocab_size",
]

MANIFEST, PLAN, TOKENIZER = "manifest.json", "plan.json", "tokenizer.json"

SCHEMES = ("s3://", "gs://", "azure://", "hf://", "r2://", "local:")
"""What litdata downloads from; `local:/mnt/share/corpus` is a slow folder that is read through the cache."""


def is_remote(source: Any) -> bool:
    """Returns whether a `data.source` names a folder that has to be downloaded from; see `datamodules.remote.remote_folder`."""
    return isinstance(source, str) and source.startswith(SCHEMES)


def finished_folder(name: str) -> Path:
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
        raise ConfigError(
            f"{name if name.isprintable() else ascii(name)} has no {MANIFEST}: it is no folder that prepare has written to its end."
        )
    return folder


def prepared_folder(source: Any) -> Path | None:
    """Returns the folder that a `data.source` names if it holds prepared tokens; None for text.

    Raises:
        ConfigError: If the folder is one that `prepare` has begun and not finished.
    """
    if not isinstance(source, str) or not source:
        return None
    folder = Path(os.path.expanduser(source))
    if _is_file(folder / MANIFEST):
        return folder
    if _is_file(folder / PLAN):
        raise ConfigError(
            f"{folder} is not finished: it has no {MANIFEST}.\nRun the same `python -m core prepare` again; it "
            "continues where it stopped."
        )
    return None


def _is_file(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except PermissionError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return False
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is not a regular file: it is nothing that prepare wrote.")
    return True


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns a prepared folder's manifest, its types and ranges checked; see `toolkit.manifest_schema`.

    Raises:
        ConfigError: If it is missing, damaged, or was changed after prepare had written it.
    """
    manifest = unverified_manifest(folder)
    if is_edited(manifest):
        raise ConfigError(
            f"{folder / MANIFEST} is not as prepare wrote it: its figures have another SHA-256. Take the original, or\n"
            "prepare the text again."
        )
    return manifest


def unverified_manifest(folder: Path) -> dict[str, Any]:
    """Returns a prepared folder's manifest as :func:`read_manifest` does, also where it was edited.

    Raises:
        ConfigError: If it is missing or damaged.
    """
    try:
        return manifest_schema.parsed(read_inside(folder, MANIFEST))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / MANIFEST} is missing or damaged: {read_error(error)}") from error


def is_edited(manifest: Mapping[str, Any]) -> bool:
    """Returns whether a manifest says something else than when it was written; False where it has no checksum."""
    recorded = manifest.get(manifest_schema.CHECKSUM)
    return recorded is not None and recorded != manifest_schema.checksum(manifest)


def split_folder(folder: Path, split: str) -> Path:
    """Returns the folder of a split's tokens.

    Raises:
        ConfigError: If it is a symbolic link that leads out of the prepared folder.
    """
    try:
        require_inside(folder, split)
    except ValueError as error:
        raise ConfigError(f"{folder / split}: {error}") from error
    return folder / split


def splits_of(manifest: Mapping[str, Any]) -> list[str]:
    """Returns the splits of a prepared folder: "train", "validation" and, where some text was held out for it, "test"."""
    return ["train", "validation"] + (["test"] if "test_tokens" in manifest else [])


def read_tokenizer(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Returns a prepared folder's tokenizer.json.

    Raises:
        ConfigError: If it is missing, no JSON object, or not the one that the folder was written with.
    """
    path = folder / TOKENIZER
    try:
        content = read_inside(folder, TOKENIZER)
        recorded = manifest.get("files", {}).get(TOKENIZER, {}).get("sha256")
        if recorded not in (None, hashlib.sha256(content).hexdigest()):
            raise ConfigError(
                f"{path} is damaged, or another tokenizer than the folder was written with: {MANIFEST} knows another "
                "SHA-256."
            )
        if not isinstance(parse_json(content, unique=False), dict):
            raise ValueError("it is no tokenizer of the `tokenizers` library")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is missing or damaged: {read_error(error)}") from error
    return content.decode()


def load_tokenizer(content: str, path: Path) -> Any:
    """Returns the tokenizer that a tokenizer.json describes.

    Args:
        content: The JSON.
        path: Named in the message.

    Raises:
        ConfigError: If the library cannot load it.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} is missing or damaged: the library cannot load it: {said}") from error


def stored_vocab_size(source: Any) -> int | None:
    """Returns the number of token ids of the prepared folder that a `data.source` names; None for text."""
    folder = prepared_folder(source)
    return read_manifest(folder)["vocab_size"] if folder else None
