"""The files that a reader reads: finding them, telling them apart, cutting them into tasks."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow

from core.contracts import DocumentSource, Reader
from core.errors import ConfigError, nearest

LEAST, MOST, PARTS = 1 << 20, 1 << 30, 64
"""A task is a 64th of the source, but at least 1 MiB and at most 1 GiB of its files."""

BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 512

Piece = dict[str, Any]
Row = tuple[str, str, str]


class SourceFiles:
    """The files that a path or glob means, sorted by name.

    Args:
        source: A file, a folder (with its subfolders), or a glob.
        suffixes: What the names of the files end in.
        names: Other sources that the reader knows, for messages.

    Attributes:
        paths: The files.
        root: The folder that they are named from.

    Raises:
        ConfigError: If there is no such file.
    """

    def __init__(
        self, source: str, suffixes: tuple[str, ...], names: Mapping[str, str] | None = None
    ) -> None:
        self.paths = _find(source, suffixes, names or {})
        self.root = Path(os.path.commonpath([path.parent.absolute() for path in self.paths]))

    def name(self, path: Path) -> str:
        """Returns a file's name below the root, with forward slashes."""
        return path.absolute().relative_to(self.root).as_posix()

    def source_of(self, path: Path) -> str:
        """Returns the source that a file's documents are counted under.

        That is the first folder below the root; else, where a file holds many documents, its name without
        suffixes and shard number (wiki of wiki-00003-of-00128.parquet), or the name of the root.
        """
        first, _, rest = self.name(path).partition("/")
        if rest:
            return first
        if path.suffix.lower() in (".txt", ".md"):
            return self.root.name
        stem = first.partition(".")[0]
        return re.sub(r"[-_]?\d+([-_]of[-_]\d+)?$", "", stem) or self.root.name

    def fingerprint(self) -> dict[str, Any]:
        """Returns the files' names, sizes and digests."""
        described = []
        for path in self.paths:
            with opened(path) as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                described.append([self.name(path), stream.tell(), digest])
        return {"files": described}

    def tasks(self, cut: Callable[[Path, int, int], Iterable[Piece]]) -> list[dict[str, Any]]:
        """Returns tasks of about equal size, each a list of consecutive pieces of files.

        Args:
            cut: Returns the pieces of a file, given its path, its size and the size of a task, in bytes;
                each a mapping with its size in `bytes`.
        """
        stats = [_stat(path) for path in self.paths]
        size = min(max(sum(stat.st_size for stat in stats) // PARTS, LEAST), MOST)
        tasks: list[dict[str, Any]] = []
        room = 0
        for path, stat in zip(self.paths, stats, strict=True):
            for piece in cut(path, stat.st_size, size):
                if room <= 0:
                    tasks.append({"pieces": []})
                    room = size
                room -= piece["bytes"]
                described = {"path": str(path), "size": stat.st_size, "changed_ns": stat.st_mtime_ns}
                tasks[-1]["pieces"].append(described | piece)
        return tasks


def whole(path: Path, size: int, task_bytes: int) -> list[Piece]:
    """Cuts nothing: a file is one piece."""
    return [{"bytes": size}]


def batches(rows: Iterable[Row]) -> Iterator[pyarrow.RecordBatch]:
    """Packs (text, source, id) rows into record batches of about 1 MiB, 512 rows at most."""
    held: list[Row] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row[0])
        if size >= BATCH_BYTES or len(held) == BATCH_DOCUMENTS:
            yield _batch(held)
            held, size = [], 0
    if held:
        yield _batch(held)


def undivided(documents: DocumentSource) -> Reader:
    """Returns a reader of a single task: a document source that cannot be cut up."""
    return _Undivided(documents)


class _Undivided(Reader):
    def __init__(self, documents: DocumentSource) -> None:
        self.whole = documents

    def fingerprint(self) -> Mapping[str, Any]:
        return self.whole.fingerprint()

    def options(self) -> Mapping[str, Any]:
        return self.whole.fingerprint()

    def tasks(self) -> list[dict[str, Any]]:
        return [{"fingerprint": dict(self.whole.fingerprint())}]

    def read(self, task: Mapping[str, Any], reject: Any) -> Iterator[Any]:
        name = type(self.whole).__name__
        return batches((text, name, str(number)) for number, text in enumerate(self.whole.documents()))


def _batch(rows: list[Row]) -> pyarrow.RecordBatch:
    columns = [pyarrow.array(column, pyarrow.large_string()) for column in zip(*rows, strict=True)]
    return pyarrow.record_batch(columns, names=["text", "source", "id"])


def opened(path: Path) -> Any:
    """Opens a file for reading bytes.

    Raises:
        ConfigError: If it cannot be opened.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def unstorable(text: str) -> str:
    """Returns why a text cannot be stored as UTF-8; empty if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} of the text is half of a surrogate pair"
    return ""


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _find(source: str, suffixes: tuple[str, ...], names: Mapping[str, str]) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        found = [Path(folder, name) for folder, _, files in os.walk(path) for name in files]
    elif path.is_file():
        found = [path]
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
    files = sorted(
        (file for file in found if file.name.lower().endswith(suffixes)), key=lambda file: file.as_posix()
    )
    if files:
        return files
    kinds = ", ".join(suffixes)
    if found:
        raise ConfigError(
            f"data.source={source}: none of the {len(found)} file(s) found, such as {found[0]},\nis of a kind "
            f"that is read: {kinds}. Convert or rename them."
        )
    around = path.parent if path.parent.is_dir() else Path()
    hint = nearest(path.name, {*names, *(entry.name for entry in around.iterdir())})
    known = "".join(f"; {name} is {what}" for name, what in names.items())
    raise ConfigError(
        f"data.source={source}: no such file or folder, and no file matches it as a glob.{hint}\nLooked from "
        f"{Path.cwd()} for files of the kinds {kinds}{known}."
    )
