"""Reads documents from text, Markdown and JSON Lines files."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow

from core.contracts import Reject
from core.technique import technique
from datamodules.preparation.readers import json_lines_documents, python_docs
from datamodules.preparation.readers.compressed_files import (
    codec_of,
    decompressed,
    rejecting_broken,
    with_codecs,
)
from datamodules.preparation.readers.file_reader import FileReader, Row, batches
from datamodules.preparation.readers.opened_files import LONGEST, opened
from datamodules.preparation.readers.source_files import Piece, SourceFiles, whole_files

SUFFIXES = tuple(
    sorted((*with_codecs(".txt", ".md"), *json_lines_documents.SUFFIXES), key=lambda name: name.count("."))
)
TOO_LONG = f"a document of more than {LONGEST >> 20} MiB"
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


@technique(
    paper="JSON Lines, jsonlines.org; the built-in text is pydoc's topics and the library's docstrings",
    maturity="stable",
)
class TextDocuments(FileReader):
    """Reads text, Markdown and JSON Lines files: one file, a folder with its subfolders, or a glob.

    A .txt or .md file is one document. Each line of a .jsonl file is one: an object with the field "text". All may
    be compressed (.gz, .zst). Files are read in the order of their names. Files of other kinds and symbolic links
    to folders are not read; the report counts them. Blank documents are skipped. A compressed .txt or .md file that
    is broken is rejected completely. UTF-8 only.

    Args:
        source: A path, a glob (`corpus/**/*.md`), or "python-docs": about 2 MB of English that every
            Python installation carries, its language reference and the docstrings of its library.

    Raises:
        ConfigError: If nothing readable is found. While reading: names the file and the byte or line.

    Example:
        data:
          init_args:
            source: ~/corpus
            reader: TextDocuments
    """

    def __init__(self, source: str) -> None:
        self._builtin = source == python_docs.NAME
        if not self._builtin:
            self.files = SourceFiles(source, SUFFIXES, {python_docs.NAME: "the built-in text"})

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the files' names, sizes and digests; for the built-in text, its version."""
        return python_docs.fingerprint() if self._builtin else super().fingerprint()

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of files, and pieces of large .jsonl files; the built-in text is one."""
        return [dict(python_docs.fingerprint())] if self._builtin else self.files.tasks(_cut)

    def read(self, task: Mapping[str, Any], reject: Reject) -> Iterator[pyarrow.RecordBatch]:
        """Yields the documents of a task; see the class for what a document is."""
        if not self._builtin:
            return super().read(task, reject)
        texts = enumerate(python_docs.python_documents())
        return batches((text, python_docs.NAME, str(number)) for number, text in texts)

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the lines of a JSON Lines file, or the one document of another file."""
        path = Path(piece["path"])
        if _is_json_lines(path):
            yield from json_lines_documents.rows(self.files, path, piece, reject)
            return
        source, data = self.files.source_of(path), None
        with rejecting_broken(path, source, reject):
            data = _content(path)
        if data is None:
            return
        if len(data) > LONGEST:
            reject(source, str(path), TOO_LONG, "cut it into several")
            return
        try:
            text = data.decode("utf-8").removeprefix(codecs.BOM_UTF8.decode())
        except UnicodeDecodeError as error:
            place = f"byte {error.start:,} is 0x{data[error.start]:02x}"
            reject(source, str(path), "not UTF-8", f"{place}; convert it: iconv -f {encoding(data)} -t utf-8")
        else:
            yield text, source, self.files.name(path)


def _cut(path: Path, size: int, task_bytes: int) -> list[Piece]:
    cut = json_lines_documents.cut if _is_json_lines(path) else whole_files
    return cut(path, size, task_bytes)


def _is_json_lines(path: Path) -> bool:
    return path.name.lower().endswith(json_lines_documents.SUFFIXES)


def _content(path: Path) -> bytes:
    """Returns the content of a file, or its first LONGEST + 1 bytes."""
    codec = codec_of(path)
    if codec is None:
        with opened(path) as stream:
            return stream.read(LONGEST + 1)  # type: ignore[no-any-return]
    blocks, size = [], 0
    for block in decompressed(path, codec):
        blocks.append(block)
        size += len(block)
        if size > LONGEST:
            break
    return b"".join(blocks)


def encoding(data: bytes) -> str:
    """Returns the likely encoding of a text that is not UTF-8, by its name in iconv."""
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return name
    begin = data[:4096]
    # In UTF-16, letters of European languages have a zero byte.
    if begin and begin.count(0) > len(begin) // 8:
        return "utf-16le" if begin[1::2].count(0) >= begin[::2].count(0) else "utf-16be"
    return "latin1"
