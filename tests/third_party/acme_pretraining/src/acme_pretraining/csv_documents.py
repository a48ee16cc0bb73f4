"""Reads documents from a table."""

from __future__ import annotations

import csv
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.contracts import DocumentSource
from core.errors import ConfigError, nearest
from core.technique import technique


@technique(paper="RFC 4180, with a header line", api=">=1,<2")
class CsvDocuments(DocumentSource):
    """The cells of one column of a .csv file in UTF-8; blank ones are left out.

    Args:
        source: The file.
        column: The column's name in the header line.

    Raises:
        ConfigError: If there is no such file or column. While reading: at the line at fault.

    Example:
        data:
          init_args:
            source: articles.csv
            reader:
              class_path: CsvDocuments
              init_args: {column: body}
    """

    def __init__(self, source: str, column: str = "text") -> None:
        self.path, self.column = Path(source).expanduser(), column
        if not self.path.is_file():
            raise ConfigError(
                f"data.source={source}: there is no such file; CsvDocuments reads one .csv file."
            )

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns what decides the text: a digest of the file, and the column."""
        with open(self.path, "rb") as file:
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "column": self.column}

    def documents(self) -> Iterator[str]:
        """Yields each cell, from top to bottom."""
        csv.field_size_limit(sys.maxsize)  # else a document of more than 131,072 characters is an error
        with open(self.path, encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, strict=True)
            try:
                self._check_header(table.fieldnames or [])
                for row in table:
                    if (text := row[self.column]) and not text.isspace():
                        yield text
            except (csv.Error, UnicodeDecodeError) as error:
                place = f"{self.path}, near line {table.line_num + 1}"
                raise ConfigError(f"{place}: this is not CSV in UTF-8: {error}. Convert it.") from error

    def _check_header(self, columns: list[str]) -> None:
        if self.column not in columns:
            raise ConfigError(
                f"{self.path} has no column {self.column!r}.{nearest(self.column, columns)} Its columns: "
                f"{', '.join(columns) or 'none'}.\nSet --data.reader.column."
            )
