"""Reads documents from JSON Lines files, plain or compressed."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from core.contracts import Reject
from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.readers.compressed_files import (
    codec_of,
    decompressed,
    rejecting_broken,
    with_codecs,
)
from datamodules.preparation.readers.file_reader import FileReader, Row, as_metadata, checked_metadata
from datamodules.preparation.readers.opened_files import LONGEST, opened, unstorable
from datamodules.preparation.readers.source_files import Piece, SourceFiles

SUFFIXES = with_codecs(".jsonl", ".ndjson")
TOO_LONG = f"a line of more than {LONGEST >> 20} MiB"
_BLOCK = 1 << 20


@technique(paper="JSON Lines, jsonlines.org; gzip, RFC 1952; zstd, RFC 8878")
class JSONLinesDocuments(FileReader):
    """Reads .jsonl and .ndjson files, plain, gzip (.gz) or zstd (.zst): one document per line.

    Files are read in the order of their names; blank lines are skipped. Lines that are not JSON, not UTF-8 or have
    no text are rejected one by one. Of a broken compressed file, the lines before the damage are kept; the rest is
    rejected and counted by its bytes. A truncated file counts with all of its bytes, since it is unknown how much
    is missing. Several workers share a large plain file. A compressed file can only be read from its start: it is
    one task for one worker, and starts over after an interruption. Use more such files than workers.

    Args:
        source: A path, a folder, or a glob.
        text_field: Field of the text.
        source_field: Field of the source that the document is counted under; None: named after the file.
        metadata: Fields that are kept beside the tokens, in documents.parquet: strings, and numbers as text. meta.url is the
            field url of the object in the field meta.

    Raises:
        ConfigError: If there is no such file, `text_field` is empty, or `metadata` names a field that every document has.

    Example:
        data:
          init_args:
            reader: {class_path: JSONLinesDocuments, init_args: {text_field: text}}
    """

    def __init__(
        self,
        source: str,
        text_field: str = "text",
        source_field: str | None = None,
        metadata: Sequence[str] = (),
    ) -> None:
        if not text_field:
            raise ConfigError("JSONLinesDocuments: text_field is empty; name the field that holds the text.")
        self.text_field, self.source_field = text_field, source_field
        self.metadata = checked_metadata("JSONLinesDocuments", metadata)
        self.files = SourceFiles(source, SUFFIXES)

    def options(self) -> dict[str, Any]:
        """Returns the fields."""
        kept = {"metadata": self.metadata} if self.metadata else {}
        return {"text_field": self.text_field, "source_field": self.source_field} | kept

    def tasks(self) -> list[dict[str, Any]]:
        """Returns files and byte ranges of large plain files."""
        return self.files.tasks(cut)

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the documents of the lines that begin in a piece."""
        path = Path(piece["path"])
        return rows(self.files, path, piece, reject, self.text_field, self.source_field, self.metadata)


def cut(path: Path, size: int, task_bytes: int) -> list[Piece]:
    """Cuts a plain file into byte ranges; a line belongs to the range that it begins in."""
    if codec_of(path) or size <= task_bytes * 3 // 2:
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
    metadata: Sequence[str] = (),
) -> Iterator[Row]:
    """Yields (text, source, id) of each line, and its metadata; the id is the file's name and the line's byte offset."""
    source, name = files.source_of(path), files.name(path)
    for place, offset, text in texts(path, piece, source, reject):
        record, reason, details = _parsed(text, text_field)
        if reason:
            reject(source, place, reason, details)
            continue
        own = record.get(source_field) if source_field else None
        yield (
            record[text_field],
            own if isinstance(own, str) and not unstorable(own) else source,
            f"{name}:{offset}",
            {field: as_metadata(_value(record, field)) for field in metadata},
        )


def _value(record: Any, field: str) -> Any:
    """Returns a field of an object, or a.b where it holds an object in its field a."""
    if field in record:
        return record[field]
    outer, _, inner = field.partition(".")
    return _value(record[outer], inner) if isinstance(record.get(outer), dict) else None


def texts(path: Path, piece: Piece, source: str, reject: Reject) -> Iterator[tuple[str, int, str]]:
    """Yields (place for messages, byte offset, text) of the lines that begin in a piece, without blank ones."""
    for number, offset, line in lines(path, piece, source, reject):
        place = f"{path}:{number}" if not piece.get("begin") else f"{path}, byte {offset:,}"
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            at = offset + error.start
            reject(source, place, "not UTF-8", f"byte {at:,} of the file is 0x{line[error.start]:02x}")
            continue
        text = text if offset else text.removeprefix(codecs.BOM_UTF8.decode())
        if text and not text.isspace():
            yield place, offset, text


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


def lines(path: Path, piece: Piece, source: str, reject: Reject) -> Iterator[tuple[int, int, bytes]]:
    """Yields (number within the piece, byte offset in the text, line) of the lines that begin in a piece."""
    codec = codec_of(path)
    found = _plain_lines(path, piece) if codec is None else _unpacked_lines(path, codec)
    with rejecting_broken(path, source, reject):
        for number, (offset, line) in enumerate(found, 1):
            if len(line) <= LONGEST:
                yield number, offset, line
            else:
                reject(source, f"{path}, byte {offset:,}", TOO_LONG, "cut it into several")


def _plain_lines(path: Path, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yields (byte offset, line) of the lines that begin in a piece; only the start of a line that is too long."""
    begin = piece.get("begin", 0)
    end = begin + piece["bytes"] if "begin" in piece else None
    with opened(path) as raw:
        raw.seek(max(begin - 1, 0))
        offset = begin and begin - 1 + _skip_line(raw)  # to the first line that begins here
        while line := raw.readline(LONGEST + 1):
            if end is not None and offset >= end:
                return
            yield offset, line
            offset += len(line)
            if len(line) > LONGEST and not line.endswith(b"\n"):
                offset += _skip_line(raw)


def _skip_line(raw: Any) -> int:
    """Skips to the next line; returns the number of bytes skipped."""
    size = 0
    while part := raw.readline(_BLOCK):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _unpacked_lines(path: Path, codec: str) -> Iterator[tuple[int, bytes]]:
    """Yields (byte offset, line) of a compressed file; only the start of a line that is too long."""
    offset, size, parts = 0, 0, list[bytes]()  # of the line that has begun
    for block in decompressed(path, codec):
        first, newline, rest = block.partition(b"\n")
        if size <= LONGEST:
            parts.append(first)
        size += len(first)
        if not newline:
            continue
        *whole, rest = rest.split(b"\n")
        yield offset, b"".join(parts)
        offset += size + 1
        for line in whole:
            yield offset, line
            offset += len(line) + 1
        parts, size = [rest], len(rest)
    if size:
        yield offset, b"".join(parts)
