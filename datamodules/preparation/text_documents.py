"""Reads documents from text, Markdown and JSON Lines files."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow

from core.contracts import Reader, Reject
from core.technique import technique
from datamodules.preparation import json_lines_documents, python_docs
from datamodules.preparation.source_files import Piece, Row, SourceFiles, batches, opened, whole

SUFFIXES = (".txt", ".md", *json_lines_documents.SUFFIXES)


@technique(
    paper="JSON Lines, jsonlines.org; the built-in text is pydoc's topics and the library's docstrings",
    maturity="stable",
)
class TextDocuments(Reader):
    """The documents of a file, of a folder and its subfolders, or of the files that a glob matches.

    A .txt or .md file is one document; so is every line of a .jsonl file, plain, .gz or .zst, which holds an
    object with the field "text". Files are taken in the order of their names. Blank documents are left out. UTF-8 only.

    Args:
        source: A path, a glob (`corpus/**/*.md`), or "python-docs": about 2 MB of English that every
            Python installation carries, its language reference and the docstrings of its library.

    Raises:
        ConfigError: If nothing readable is found. While reading: at the file and byte or line at fault.

    Example:
        data:
          init_args:
            source: ~/corpus
            reader: TextDocuments
    """

    def __init__(self, source: str) -> None:
        builtin = source == python_docs.NAME
        self._files = (
            None if builtin else SourceFiles(source, SUFFIXES, {python_docs.NAME: "the built-in text"})
        )

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the files' names, sizes and digests; for the built-in text, what decides it."""
        return self._files.fingerprint() if self._files else python_docs.fingerprint()

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of files, and pieces of large .jsonl files; the built-in text is one."""
        return self._files.tasks(_cut) if self._files else [dict(python_docs.fingerprint())]

    def read(self, task: Mapping[str, Any], reject: Reject) -> Iterator[pyarrow.RecordBatch]:
        """Yields the documents of a task; see the class for what a document is."""
        if self._files is None:
            texts = enumerate(python_docs.python_documents())
            return batches((text, python_docs.NAME, str(number)) for number, text in texts)
        files = self._files
        return batches(row for piece in task["pieces"] for row in _rows(files, piece, reject))


def _cut(path: Path, size: int, task_bytes: int) -> list[Piece]:
    cut = json_lines_documents.cut if path.name.lower().endswith(json_lines_documents.SUFFIXES) else whole
    return cut(path, size, task_bytes)


def _rows(files: SourceFiles, piece: Piece, reject: Reject) -> Iterator[Row]:
    path = Path(piece["path"])
    if path.name.lower().endswith(json_lines_documents.SUFFIXES):
        yield from json_lines_documents.rows(files, path, piece, reject)
        return
    with opened(path) as stream:
        data = stream.read()
    try:
        text = data.decode("utf-8").removeprefix(codecs.BOM_UTF8.decode())
    except UnicodeDecodeError as error:
        details = f"byte {error.start:,} is 0x{data[error.start]:02x}; convert it: iconv -f latin1 -t utf-8"
        reject(files.source_of(path), str(path), "not UTF-8", details)
        return
    yield text, files.source_of(path), files.name(path)
