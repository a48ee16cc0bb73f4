"""The form of checkpoints on object storage, where nothing can be renamed.

    step-00000100.ckpt             a checkpoint of one file, as on a disk
    step-00000100.ckpt.complete    its size and SHA-256; written last
    step-00000200.ckpt/            a sharded one, with the files that it has on a disk
    step-00000200.ckpt/complete    SHA-256 of its manifest; written last
    step-00000300.ckpt.abandoned   beside one after a step that its run went back to
    step-00000400.ckpt.partial     beside one that is being uploaded or deleted; written first, deleted last

A checkpoint without `complete` does not exist. What is copied to a disk, such as by `aws s3 sync`, is a checkpoint there.
What is neither complete nor partial was copied there by somebody, and is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from toolkit.checkpoint_names import ABANDONED
from toolkit.object_storage import ObjectFolder, StoredObject

__all__ = [
    "COMPLETE",
    "Listing",
    "RemoteCheckpoint",
    "begin",
    "complete",
    "complete_name",
    "listed",
    "remove",
    "set_aside",
]

COMPLETE, PARTIAL = "complete", ".partial"
SUFFIX = ".ckpt"


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
