"""Reads documents from JSON Lines files, plain or compressed."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow

from core.contracts import Reader, Reject
from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.source_files import Piece, Row, SourceFiles, batches, opened, unstorable

_PLAIN = (".jsonl", ".ndjson")
_CODECS = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES = tuple(name + codec for codec in ("", *_CODECS) for name in _PLAIN)
_BLOCK = 1 << 20


@technique(paper="JSON Lines, jsonlines.org; gzip, RFC 1952; zstd, RFC 8878")
class JSONLinesDocuments(Reader):
    """One document a line: .jsonl and .ndjson files, plain, gzip (.gz) or zstd (.zst).

    Files are taken in the order of their names; blank lines are passed over. Lines that are no JSON, no UTF-8
    or have no text are rejected alone; a compressed file that is broken, from about there to its end. Several
    workers share a large plain file; a compressed one, which can only be read from its begin, is one task: for one
    worker, and done anew from its begin after an interruption. Have more of them than workers.

    Args:
        source: A path, a folder, or a glob.
        text_field: Field of the text.
        source_field: Field of the source that the document is counted under; None: named after the file.

    Raises:
        ConfigError: If there is no such file, or `text_field` is empty.

    Example:
        data:
          init_args:
            reader: {class_path: JSONLinesDocuments, init_args: {text_field: text}}
    """

    def __init__(self, source: str, text_field: str = "text", source_field: str | None = None) -> None:
        if not text_field:
            raise ConfigError("JSONLinesDocuments: text_field is empty; name the field that holds the text.")
        self.text_field, self.source_field = text_field, source_field
        self._files = SourceFiles(source, SUFFIXES)

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the files' names, sizes and digests, and the fields."""
        return self._files.fingerprint() | self.options()

    def options(self) -> dict[str, Any]:
        """Returns the fields."""
        return {"text_field": self.text_field, "source_field": self.source_field}

    def tasks(self) -> list[dict[str, Any]]:
        """Returns pieces of files; see the class for what is cut."""
        return self._files.tasks(cut)

    def read(self, task: Mapping[str, Any], reject: Reject) -> Iterator[pyarrow.RecordBatch]:
        """Yields the documents of the lines that begin in the task's pieces."""
        return batches(row for piece in task["pieces"] for row in self._rows(piece, reject))

    def _rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        path = Path(piece["path"])
        return rows(self._files, path, piece, reject, self.text_field, self.source_field)


def cut(path: Path, size: int, task_bytes: int) -> list[Piece]:
    """Cuts a plain file into byte ranges; a line belongs to the one that it begins in."""
    if path.suffix.lower() in _CODECS or size <= task_bytes * 3 // 2:
        return [{"bytes": size}]
    begins = range(0, size, task_bytes)
    return [{"bytes": min(task_bytes, size - begin), "begin": begin} for begin in begins]


def rows(
    files: SourceFiles,
    path: Path,
    piece: Piece,
    reject: Reject,
    text_field: str = "text",
    source_field: str | None = None,
) -> Iterator[Row]:
    """Yields (text, source, id) of each line; the id is the file's name and the line's byte in it."""
    source, name = files.source_of(path), files.name(path)
    for number, offset, line in _lines(path, piece, source, reject):
        place = f"{path}:{number}" if not piece.get("begin") else f"{path}, byte {offset:,}"
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            at = offset + error.start
            reject(source, place, "not UTF-8", f"byte {at:,} of the file is 0x{line[error.start]:02x}")
            continue
        text = text if offset else text.removeprefix(codecs.BOM_UTF8.decode())
        if not text or text.isspace():
            continue
        record, reason, details = _parsed(text, text_field)
        if reason:
            reject(source, place, reason, details)
            continue
        own = record.get(source_field) if source_field else None
        yield (
            record[text_field],
            own if isinstance(own, str) and not unstorable(own) else source,
            f"{name}:{offset}",
        )


def _parsed(line: str, field: str) -> tuple[Any, str, str]:
    """Returns a line's object, or the reason why it cannot be used, with details."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, "this line is not JSON", str(error)
    if not isinstance(record, dict):
        kind = type(record).__name__
        return None, f'expected an object with the field "{field}"', f"found a {kind}"
    if field not in record:
        return (
            None,
            f'the object has no field "{field}"',
            f"its fields: {', '.join(map(repr, record)) or 'none'}",
        )
    if not isinstance(record[field], str):
        return None, f'the field "{field}" is not a string', f"it is a {type(record[field]).__name__}"
    if fault := unstorable(record[field]):
        return None, "not UTF-8", fault
    return record, "", ""


def _lines(path: Path, piece: Piece, source: str, reject: Reject) -> Iterator[tuple[int, int, bytes]]:
    """Yields (number counted from the piece's begin, byte in the text, line) of the lines that begin in a piece."""
    begin = piece.get("begin", 0)
    end = begin + piece["bytes"] if "begin" in piece else None
    codec = _CODECS.get(path.suffix.lower())
    with opened(path) as raw:
        if codec is None:
            raw.seek(max(begin - 1, 0))
            offset = begin and begin - 1 + len(raw.readline())  # to the first line that begins here
            for number, line in enumerate(raw, 1):
                if end is not None and offset >= end:
                    return
                yield number, offset, line
                offset += len(line)
            return
        number = offset = 0
        rest = b""
        try:
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), codec)
            while block := stream.read(_BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    number += 1
                    yield number, offset, line
                    offset += len(line) + 1
        except (OSError, pyarrow.ArrowException) as error:
            reject(source, str(path), f"broken {codec} file", str(error).splitlines()[0])
        else:
            if rest:
                yield number + 1, offset, rest
