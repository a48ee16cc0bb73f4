"""Reads the records of web archives one by one; goes on behind broken ones, and stops at bombs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from core.contracts import Reject
from datamodules.preparation.readers.opened_files import LONGEST, UnreadableError, opened

BROKEN, CUT, DIGEST = (
    "broken WARC record",
    "truncated WARC record",
    "a WARC record that differs from its digest",
)
HUGE, BOMB = "a WARC record of more than 256 MiB", "a bomb"
_GZIP, _ZSTD = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]"), re.compile(rb"\x28\xb5\x2f\xfd")
_MAGIC = {b"\x1f\x8b": _GZIP, b"\x28\xb5": _ZSTD}
_BY_SUFFIX = {".gz": _GZIP, ".zst": _ZSTD}
_PLAIN = re.compile(rb"WARC/1\.[0-9]\r?\n")
_LONGEST_MAGIC = 10
_DIGESTS = ("sha1:", "sha256:", "md5:")
_BLOCK = 1 << 20

_SMALL, _RATIO = 1 << 26, 1000
"""An archive whose records take more than 64 MiB, and more than 1,000 times the bytes read so far, is a bomb."""

_FAILURES, _FOR_EACH = 1000, 1 << 16
"""Places after which nothing could be read: at most these in a file, or one for each 64 KiB if that is more."""


class Record(NamedTuple):
    """A record: the byte it begins at (its compressed member, in compressed files), headers, and its content.

    `content` is cut at the limit that was asked for; `size` is its full length in bytes.
    """

    at: int
    kind: str
    headers: Any
    content: bytes
    size: int


def records(path: Path, source: str, limit: int, reject: Reject) -> Iterator[Record]:
    """Yields the records of an archive, and rejects what is broken, up to the next record that can be read.

    Args:
        path: A .warc or .wet file, plain or compressed with gzip or zstd, one member per record.
        source: What rejects are counted under.
        limit: Bytes of a record's content that are returned.
        reject: Called with the place, the reason, and the bytes that are lost.
    """
    try:
        archive = _Archive(path, limit)
    except UnreadableError as error:
        reject(source, str(path), "cannot be read", error.reason)
        return
    with archive.file:
        yield from archive.records(source, reject)


class _Archive:
    """An open archive, and how far it was read."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self.file = opened(path)
        self.size = os.fstat(self.file.fileno()).st_size
        self.magic = _MAGIC.get(self.file.read(2)) or _BY_SUFFIX.get(path.suffix.lower(), _PLAIN)
        self.unpacked = 0

    def records(self, source: str, reject: Reject) -> Iterator[Record]:
        """Yields the records that can be read; rejects each gap between them, once it is known how long it is."""
        begin, gap, failures = 0, None, 0
        while begin < self.size and failures <= max(_FAILURES, self.size // _FOR_EACH):
            failures += 1
            try:
                for record in self._read_from(begin):
                    if gap:
                        self._reject(gap, record.at, source, reject)
                        gap, failures = None, failures - 1
                    yield record
                break
            except _GapError as error:
                gap = gap or error
                begin = self._next(error.resume)
        if gap:
            self._reject(gap, self.size, source, reject)

    def _reject(self, gap: _GapError, end: int, source: str, reject: Reject) -> None:
        place = f"byte {gap.begin:,}" if gap.begin < end else f"after byte {gap.last:,}"
        lost = end - (gap.begin if gap.begin < end else gap.last)
        reject(source, f"{self.path}, {place}", gap.reason, gap.details, lost)

    def _read_from(self, begin: int) -> Iterator[Record]:
        """Yields the records from a byte on.

        Raises:
            _GapError: At the first that cannot be read.
        """
        from fastwarc.warc import ArchiveIterator

        self.file.seek(begin)
        at, good = begin, False  # of the last record
        try:
            for found in ArchiveIterator(self.file, parse_http=False):
                at, size, good = found.stream_pos, found.content_length, False
                self._check_size(at, size)
                wrong = size <= self.limit and _has_wrong_digest(found)
                content = found.reader.read(min(size, self.limit))
                if len(content) < min(size, self.limit):
                    raise _GapError(at, at, CUT, f"{len(content):,} of {size:,} bytes", at + 1)
                if wrong:
                    raise _GapError(
                        at, at, DIGEST, (found.headers.get("WARC-Block-Digest") or "")[:80], at + 1
                    )
                yield Record(at, str(found.record_type).lower(), found.headers, content, size)
                good = True
        except (OSError, ValueError, RuntimeError) as error:
            details = str(error).splitlines()[0] if str(error) else type(error).__name__
            first = self._next(at + 1) if good else at
            raise _GapError(first, at, BROKEN, details, at + 1) from error
        if (resume := self._left_over(at + 1)) < self.size:
            raise _GapError(resume, at, BROKEN, "the records end before the file", resume)

    def _left_over(self, begin: int) -> int:
        """Returns where a record begins that was not reached, as after a damaged member; the size of the file if none does."""
        from fastwarc.warc import ArchiveIterator

        if self.magic is _PLAIN:  # lengths say where each record ends, and a document may hold another
            return self.size
        for _ in range(_FAILURES):
            begin = self._next(begin)
            if begin == self.size:
                break
            self.file.seek(begin)
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                if next(iter(ArchiveIterator(self.file, parse_http=False)), None) is not None:
                    return begin
            begin += 1
        return self.size

    def _check_size(self, at: int, size: int) -> None:
        if size > LONGEST:
            behind = at + size if self.magic is _PLAIN and at + size < self.size else at + 1
            raise _GapError(at, at, HUGE, f"{size:,} bytes", behind)
        if self.unpacked > max(_SMALL, _RATIO * self.file.tell()):
            sizes = f"{self.file.tell():,} bytes become more than {self.unpacked:,}"
            raise _GapError(at, at, BOMB, sizes, self.size)
        self.unpacked += size

    def _next(self, begin: int) -> int:
        """Returns where the next member or record may begin; the size of the file if there is none."""
        self.file.seek(begin)
        tail, at = b"", begin
        while block := self.file.read(_BLOCK):
            data = tail + block
            if found := self.magic.search(data):
                return at - len(tail) + found.start()
            tail = data[1 - _LONGEST_MAGIC :]
            at += len(block)
        return self.size


def _has_wrong_digest(record: Any) -> bool:
    digest = (record.headers.get("WARC-Block-Digest") or "").lower()
    return digest.startswith(_DIGESTS) and not record.verify_block_digest()


class _GapError(Exception):
    """Where an archive cannot be read from, or its record before that, why, and where the next one may begin."""

    def __init__(self, begin: int, last: int, reason: str, details: str, resume: int) -> None:
        super().__init__(reason)
        self.begin, self.last, self.reason, self.details, self.resume = begin, last, reason, details, resume
