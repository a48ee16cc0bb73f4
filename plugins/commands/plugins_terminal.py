"""What the small commands share: tables, and files that they write where the user says.

rich 15.0 has tables, too. In a pipe it breaks rows after 80 columns, so that `grep` finds a part of one; its import takes
0.03 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core import durable
from core.errors import ConfigError


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Prints rows, the header first, in columns as wide as they need to be."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]))


def write(path: Path, content: bytes | str) -> None:
    """Writes a file completely or not at all.

    Raises:
        ConfigError: If it cannot be written.
    """
    try:
        durable.write(path, content)
    except (OSError, ValueError) as error:
        reason = durable.write_error(error) if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be written: {reason}. Choose another --output.") from error
