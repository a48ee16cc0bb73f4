"""Whether a checkpoint that is a folder is whole, found out by all ranks together: none reads all of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from core.checkpoints import sharded
from core.errors import ConfigError
from core.files import durable


def check(folder: Path) -> None:
    """Reads this rank's share of the files; called on every rank.

    What is wrong is noted in the folder: a job that its launcher starts again goes on from the one before.

    Raises:
        ConfigError: On every rank, if one of them found a file damaged.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: list[str | None] = [None] * ranks
    dist.all_gather_object(found, sharded.defect(folder, slice(rank, None, ranks)))
    if reason := next(filter(None, found), None):
        if rank == 0:
            with suppress(OSError):  # it may be a folder of somebody else's
                durable.write(folder / sharded.DAMAGED, reason)
        ages = {path.stat().st_mtime_ns: path for path in folder.parent.glob("*.ckpt")}
        written = (folder / sharded.MANIFEST).stat().st_mtime_ns  # not the folder's, which the note changes
        before = [age for age in sorted(ages) if age < written and ages[age] != folder]
        advice = (
            f"Go on from the one before: --ckpt_path {ages[before[-1]]}"
            if before
            else "There is none before it."
        )
        raise ConfigError(f"{folder}: {reason}.\n{advice}")
