"""The form of checkpoints on object storage, where nothing can be renamed.

    step-00000100.ckpt             a checkpoint of one file, as on a disk
    step-00000100.ckpt.complete    its size and SHA-256; written last
    step-00000200.ckpt/            a sharded one, with the files that it has on a disk
    step-00000200.ckpt/complete    SHA-256 of its manifest; written last
    step-00000300.ckpt.abandoned   beside one after a step that its run went back to
    step-00000400.ckpt.partial     beside one that is being uploaded or deleted; written first, deleted last

A checkpoint without `complete` does not exist. What is copied to a disk, such as by `aws s3 sync`, is a checkpoint there.
What is neither complete nor partial was copied there by somebody, and is left alone.

Before a run marks abandoned ones it notes in its run folder from which step on: where the storage does not answer and the run
ends, `last` knows it from there.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from core import durable
from core.errors import ConfigError
from toolkit.bounded import open_inside, parse_json
from toolkit.checkpoint_names import ABANDONED
from toolkit.object_storage import ObjectFolder, StoredObject

__all__ = [
    "COMPLETE",
    "Listing",
    "RemoteCheckpoint",
    "begin",
    "complete",
    "complete_name",
    "forget_return",
    "listed",
    "note_return",
    "noted_return",
    "remove",
    "set_aside",
]

COMPLETE, PARTIAL = "complete", ".partial"
SUFFIX = ".ckpt"
RETURN, MOST_BYTES = ".went-back", 2**16
"""Name of the note in a run folder, and how long it may be."""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A complete checkpoint on object storage.

    Attributes:
        folder: Where it is.
        key: Its name there.
        sharded: Whether it is a folder.
        abandoned: Whether its run went back to an earlier step.
        marker: The object that was written last.
    """

    folder: ObjectFolder
    key: str
    sharded: bool
    abandoned: bool
    marker: StoredObject

    @property
    def name(self) -> str:
        """Its name as on a disk, where an abandoned one is renamed."""
        return f"{self.key.removesuffix(SUFFIX)}{ABANDONED}{SUFFIX}" if self.abandoned else self.key

    @property
    def url(self) -> str:
        """Its URL, with the name that it has on a disk: `--ckpt_path` takes it."""
        return f"{self.folder.url}/{self.name}"


class Listing(NamedTuple):
    """The checkpoints in a folder.

    Attributes:
        complete: Those that can be read.
        partial: Names of those whose upload or removal was interrupted, or goes on.
        others: Names of what nobody here has uploaded, such as copies by hand.
    """

    complete: list[RemoteCheckpoint]
    partial: list[str]
    others: list[str]


def complete_name(key: str, sharded: bool) -> str:
    """Returns the name of the object that makes a checkpoint complete."""
    return f"{key}/{COMPLETE}" if sharded else f"{key}.{COMPLETE}"


def listed(folder: ObjectFolder) -> Listing:
    """Returns which checkpoints are in a folder."""
    objects, folders = folder.level()
    begun = {name.removesuffix(PARTIAL) for name in objects if name.endswith(PARTIAL)}
    found = Listing([], [], [])
    for key in sorted({*objects, *folders, *begun}):
        if not key.endswith(SUFFIX):
            continue
        sharded = key in folders
        marker = (
            folder.look_up(complete_name(key, True)) if sharded else objects.get(complete_name(key, False))
        )
        if marker is None:
            (found.partial if key in begun else found.others).append(key)
        else:
            abandoned = f"{key}{ABANDONED}" in objects
            found.complete.append(RemoteCheckpoint(folder, key, sharded, abandoned, marker))
    return found


def begin(folder: ObjectFolder, key: str) -> None:
    """Makes room for a checkpoint in place of an earlier one, which is partial from now on."""
    folder.put(f"{key}{PARTIAL}", b"")
    folder.remove([complete_name(key, True), complete_name(key, False)])
    folder.remove([key, f"{key}{ABANDONED}", *(f"{key}/{part}" for part in folder.below(key))])


def complete(folder: ObjectFolder, key: str, sharded: bool, content: bytes) -> None:
    """Makes a checkpoint complete that has been uploaded."""
    folder.put(complete_name(key, sharded), content)
    folder.remove([f"{key}{PARTIAL}"])


def remove(folder: ObjectFolder, name: str) -> None:
    """Deletes a checkpoint, complete or not, under the name that it has on a disk."""
    key = name.replace(ABANDONED, "")
    if key != name and folder.look_up(f"{key}{ABANDONED}") is None:
        return  # the step was saved again, in its place
    begin(folder, key)
    folder.remove([f"{key}{PARTIAL}"])


def set_aside(checkpoint: RemoteCheckpoint) -> str:
    """Marks a checkpoint as abandoned; returns the name that it has then. It is replaced when its step is saved again."""
    checkpoint.folder.put(f"{checkpoint.key}{ABANDONED}", b"")
    return f"{checkpoint.key.removesuffix(SUFFIX)}{ABANDONED}{SUFFIX}"


def note_return(run_folder: Path, url: str, step: int) -> None:
    """Notes in a run folder that checkpoints after a step are abandoned, before they are marked at a URL.

    Raises:
        ConfigError: If that cannot be written.
    """
    try:
        durable.write(run_folder / RETURN, json.dumps({"url": url, "step": step}))
    except OSError as error:
        raise ConfigError(
            f"{run_folder / RETURN} cannot be written: {durable.write_error(error)}."
        ) from error


def noted_return(run_folder: Path, url: str | None = None) -> int | None:
    """Returns the step after which checkpoints at a URL, or at any, are abandoned and may not be marked; None: all are."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        with open_inside(run_folder, RETURN) as file:
            found = parse_json(file.read(MOST_BYTES))
        if url in (None, found["url"]):
            return int(found["step"])
    return None


def forget_return(run_folder: Path) -> None:
    """Deletes the note: the checkpoints are marked."""
    (run_folder / RETURN).unlink(missing_ok=True)
