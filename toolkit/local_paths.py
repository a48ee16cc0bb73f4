"""Options that name a folder to write to, which has to be on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from core.errors import ConfigError

__all__ = ["in_url", "is_url", "require_local_path"]


def is_url(path: str) -> bool:
    """Returns whether a path names a file of another machine, such as s3://bucket/run, which is no folder `s3:`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(path)) is not None


def in_url(folder: Path) -> str:
    """Returns how a run folder is written in a URL: the same for `runs/first` and its absolute path."""
    relative = os.path.relpath(folder)
    return os.path.abspath(folder) if relative.startswith("..") else relative


def require_local_path(path: str, option: str) -> str:
    """Returns the path of an option that something is written to.

    Raises:
        ConfigError: If it is a URL.
    """
    if is_url(path):
        raise ConfigError(
            f"{option} is {path}: runs write to folders of this machine, not to URLs yet; checkpoints alone may go there "
            "(dirpath of\nPeriodicCheckpoint). Give a local folder and copy it (such as `aws s3 sync`), or one where the "
            "bucket is mounted."
        )
    return path
