"""Records of the user: JSON Lines files, read line by line within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from toolkit.bounded import parse_json, read_error

__all__ = ["MOST_LINE", "records"]

MOST_LINE = 1 << 26
"""Bytes of the longest line that is read."""


def records(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields place ("file:line") and fields of each line that is not empty.

    Raises:
        ConfigError: If the file cannot be read, or a line is no JSON object.
    """
    try:
        if Path(name).exists() and not Path(name).is_file():
            raise ConfigError(f"{name}: it is no file.")
        with open(name, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), 1):
                if len(line) > MOST_LINE:
                    raise ConfigError(f"{name}:{number}: the line has more than {MOST_LINE >> 20} MiB.")
                if not line.strip():
                    continue
                try:
                    record = parse_json(line)
                except ValueError as error:
                    raise ConfigError(f"{name}:{number}: it is no JSON: {str(error)[:200]}") from error
                if not isinstance(record, dict):
                    raise ConfigError(f"{name}:{number}: it is no object with the fields of a record.")
                yield f"{name}:{number}", record
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {read_error(error)}") from error
