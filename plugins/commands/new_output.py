"""Files and folders that a command writes: whether they can be written is known before the work."""

from __future__ import annotations

import tempfile
from pathlib import Path

from core.durable import write_error
from core.errors import ConfigError

LONGEST_SUFFIX = "." * 18
"""What a temporary name is longer by: see `core.durable.replacing`."""


def check_writable(name: str, option: str = "--output") -> None:
    """Raises a ConfigError if a file or folder of a name cannot be written; leaves nothing behind.

    Folders that are missing are no fault: they are made when it is written.
    """
    try:
        path = Path(name).absolute()
        path.with_name(path.name + LONGEST_SUFFIX).exists()
        folder = next(parent for parent in path.parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # a NUL in the name, or one that is too long
        reason = (write_error(error) if isinstance(error, OSError) else str(error)).rstrip(".")
        raise ConfigError(f"{option} {name[:200]} cannot be written: {reason}.") from error
