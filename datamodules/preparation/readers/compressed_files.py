"""Decompresses .gz, .zst and .bz2 files block by block; yields what can be read of broken ones, stops at bombs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow

from core.contracts import Reject
from datamodules.preparation.readers.opened_files import UnreadableError, opened

CODECS = {".gz": "gzip", ".zst": "zstd"}
DUMP_CODECS = CODECS | {".bz2": "bz2"}
"""Those of the dumps that large sites publish."""

_BLOCK = 1 << 20
_AHEAD = 1 << 16
"""Bytes that pyarrow may have read from the file but not yet decompressed."""

_SMALL, _RATIO = 1 << 26, 1000
"""A file that expands to more than 64 MiB and to more than 1,000 times its size is a bomb; text expands 3 to 100 times."""


class BrokenFileError(Exception):
    """A file that cannot be read to its end.

    Args:
        reason: One of a few fixed texts, to count by.
        details: The library's message.
        lost: Bytes of the file that were not read; an upper bound if the exact number is unknown.
    """

    def __init__(self, reason: str, details: str, lost: int) -> None:
        super().__init__(reason)
        self.reason, self.details, self.lost = reason, details, lost


def with_codecs(*suffixes: str) -> tuple[str, ...]:
    """Returns suffixes of plain files and of the same files compressed: .txt, .txt.gz, .txt.zst."""
    return tuple(suffix + codec for codec in ("", *CODECS) for suffix in suffixes)


@contextmanager
def rejecting_broken(path: Path, source: str, reject: Reject) -> Iterator[None]:
    """Rejects a file that cannot be opened or read to its end, in place of raising."""
    try:
        yield
    except UnreadableError as error:
        reject(source, str(path), "cannot be read", error.reason)
    except BrokenFileError as error:
        reject(source, str(path), error.reason, error.details, error.lost)


def codec_of(path: Path) -> str | None:
    """Returns "gzip", "zstd", "bz2", or None for a plain file."""
    return DUMP_CODECS.get(path.suffix.lower())


def decompressed(path: Path, codec: str) -> Iterator[bytes]:
    """Yields a file's content in blocks.

    Raises:
        BrokenFileError: After the last byte that can be read. All of a truncated file counts as lost, since
            it is unknown how much is missing.
        ConfigError: If it cannot be opened.
    """
    done = 0
    with opened(path) as raw:
        size = os.fstat(raw.fileno()).st_size
        try:
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), codec)
            while block := stream.read(_BLOCK):
                done += len(block)
                yield block
                if done > max(_SMALL, _RATIO * raw.tell()):
                    more = f"{raw.tell():,} bytes become more than {done:,}"
                    raise BrokenFileError(f"a {codec} bomb", more, size)
            return
        except (OSError, pyarrow.ArrowException) as error:
            message, at = str(error).splitlines()[0], raw.tell()
    yield _rest_of_failed_block(path, codec, done)
    lost = size if "runcated" in message else min(size, size - at + _AHEAD)
    raise BrokenFileError(f"broken {codec} file", message, lost)


def _rest_of_failed_block(path: Path, codec: str, done: int) -> bytes:
    """Returns the readable begin of the block that failed: read byte by byte, as a failing read returns nothing."""
    found = bytearray()
    with opened(path) as raw:
        try:
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), codec)
            while done > 0:
                done -= len(stream.read(min(done, _BLOCK)))
            while byte := stream.read(1):
                found += byte
        except (OSError, pyarrow.ArrowException):
            pass
    return bytes(found)
