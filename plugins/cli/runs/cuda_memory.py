"""The memory of CUDA devices: a setting of torch's allocator, which it reads when it is first used."""

from __future__ import annotations

import os
import sys

import torch

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of the allocator; torch reads the first, and then the second, its former name."""


def let_segments_grow() -> None:
    """Lets blocks of memory grow, so that rows of other lengths find room in them; nothing where the user has set something.

    With blocks of fixed sizes, which is torch's default, memory is left over in pieces: schedules of lengths, packed documents, and
    experts ask for another size in each step. torch has growing blocks on Linux with CUDA.
    """
    if (
        sys.platform == "linux"
        and torch.version.hip is None
        and not any(name in os.environ for name in SETTINGS)
    ):
        os.environ[SETTINGS[0]] = "expandable_segments:True"
