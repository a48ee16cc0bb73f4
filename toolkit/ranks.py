"""Which rank a launcher gave this process, known before anything is connected; groups of ranks for messages from the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

__all__ = ["launched_rank", "lazy_group"]

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Variables of torchrun, Lightning's own launcher, SLURM and LSF; the first that is set counts."""


def launched_rank() -> int | None:
    """Returns the rank of this process by its environment; None without a launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), None)


def lazy_group(exchange: Callable[[Any], object]) -> Any:
    """Makes a process group of all ranks for messages from the CPU, in which two connect when they first exchange something.

    Otherwise gloo connects every rank with all others. Called on every rank.

    Args:
        exchange: Is called with the group, and exchanges something between all pairs of ranks that later will: a rank
            that dies is noticed by those that are connected with it; others wait for its connection, by default for 30
            minutes.
    """
    import torch.distributed as dist

    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        group = dist.new_group(backend="gloo")
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
    exchange(group)
    return group
