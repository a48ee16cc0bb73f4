"""Which rank a launcher gave this process, known before anything is built or connected."""

from __future__ import annotations

import os

__all__ = ["launched_rank"]

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Variables of torchrun, Lightning's own launcher, SLURM and LSF; the first that is set counts."""


def launched_rank() -> int | None:
    """Returns the rank of this process by its environment; None without a launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), None)
