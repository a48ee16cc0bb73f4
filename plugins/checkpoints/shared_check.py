"""Checks whether a sharded checkpoint is complete; each rank reads a share of the files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from core import durable
from core.errors import ConfigError
from plugins.checkpoints import sharded


def check(folder: Path) -> None:
    """Reads this rank's share of the files; called on every rank.

    The reason of a failure is saved in the folder: if the launcher restarts the job, it resumes from the checkpoint
    before.

    Raises:
        ConfigError: On every rank, if one of them found a file damaged.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: list[str | None] = [None] * ranks
    dist.all_gather_object(found, sharded.defect(folder, slice(rank, None, ranks)))
    if reason := next(filter(None, found), None):
        if rank == 0:
            with suppress(OSError):  # the folder may belong to another user
                durable.write(folder / sharded.DAMAGED, reason)
        ages = {path.stat().st_mtime_ns: path for path in folder.parent.glob("*.ckpt")}
        # Not the time of the folder, which has changed with the reason that was saved there.
        written = (folder / sharded.MANIFEST).stat().st_mtime_ns
        before = [age for age in sorted(ages) if age < written and ages[age] != folder]
        advice = (
            f"Resume from the one before: --ckpt_path {ages[before[-1]]}"
            if before
            else "There is none before it."
        )
        raise ConfigError(f"{folder}: {reason}.\n{advice}")
