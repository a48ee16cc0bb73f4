"""Finds the files that a reader reads, names them, and groups them into tasks."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from core.contracts import Reject
from core.errors import ConfigError, nearest
from datamodules.preparation.readers.opened_files import UnreadableError, kind_of, opened, printable
from toolkit.local_paths import is_url

LEAST, MOST, PARTS = 1 << 20, 1 << 30, 64
"""A task is a 64th of the source, but at least 1 MiB and at most 1 GiB of its files."""

Piece = dict[str, Any]
"""A file or a part of one: `path`, `bytes` and what the reader adds; JSON values."""


class SourceFiles:
    """The files that a path or glob names, sorted by name.

    Args:
        source: A file, a folder (with its subfolders), or a glob.
        suffixes: Endings of the names of the files to read.
        names: Other sources that the reader accepts, with a description; for messages.
        without: Names of folders, in lower case, whose files are not read.

    Attributes:
        paths: The files. Symbolic links to folders are not followed.
        root: The folder that their names are relative to.

    Raises:
        ConfigError: If there is no such file, or the path is a URL.
    """

    def __init__(
        self,
        source: str,
        suffixes: tuple[str, ...],
        names: Mapping[str, str] | None = None,
        without: Collection[str] = (),
    ) -> None:
        require_files_here(source)
        found = _find(source, suffixes, names or {}, without)
        self.paths = sorted(found.paths, key=Path.as_posix)
        self._faults, self._left_out = found.faults, +found.left_out
        folders = [path.parent.absolute() for path in (*self.paths, *found.faults)]
        self.root = Path(os.path.commonpath(folders))

    def restrict(self, paths: list[Path]) -> None:
        """Reads these files in this order, and does not report other files in the folder."""
        self.paths, self._faults, self._left_out = paths, {}, Counter()

    def name(self, path: Path) -> str:
        """Returns a file's path relative to the root, with forward slashes."""
        return printable(self._name(path))

    def _name(self, path: Path) -> str:
        return path.absolute().relative_to(self.root).as_posix()

    def source_of(self, path: Path) -> str:
        """Returns the source that a file's documents are counted under.

        That is the first folder below the root. For a file in the root itself: its name without suffixes
        and shard number if it holds many documents (wiki for wiki-00003-of-00128.parquet), else the root's name.
        """
        first, _, rest = self._name(path).partition("/")
        if rest:
            return printable(first)
        if re.search(r"\.(txt|md|html?|epub|pdf)(\.gz|\.zst)?$", path.name.lower()):
            return printable(self.root.name)
        stem = first.partition(".")[0]
        return printable(re.sub(r"[-_]?\d+([-_]of[-_]\d+)?$", "", stem) or self.root.name)

    def fingerprint(self) -> dict[str, Any]:
        """Returns the files' names, sizes and digests."""
        described = []
        for path in self.paths:
            try:
                with opened(path) as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                    described.append([self.name(path), stream.tell(), digest])
            except UnreadableError as error:  # it is rejected when it is read
                described.append([self.name(path), 0, error.reason])
        return {"files": described}

    def tasks(self, cut: Callable[[Path, int, int], Iterable[Piece]]) -> list[dict[str, Any]]:
        """Returns tasks of about equal size, each a list of consecutive pieces of files.

        Args:
            cut: Returns the pieces of a file, each with its size under `bytes`. Called with the file's path, its
                size in bytes, and the size of a task in bytes.
        """
        stats = [_stat(path) for path in self.paths]
        size = min(max(sum(of_file.st_size for of_file in stats) // PARTS, LEAST), MOST)
        tasks: list[dict[str, Any]] = []
        room = 0
        for path, of_file in zip(self.paths, stats, strict=True):
            for piece in cut(path, of_file.st_size, size):
                if room <= 0:
                    tasks.append({"pieces": []})
                    room = size
                room -= piece["bytes"]
                described = {"path": str(path), "size": of_file.st_size, "changed_ns": of_file.st_mtime_ns}
                tasks[-1]["pieces"].append(described | piece)
        if self._faults:
            faults = sorted(self._faults.items(), key=lambda item: item[0].as_posix())
            tasks.append({"pieces": [{"path": str(path), "bytes": 0, "fault": why} for path, why in faults]})
        if self._left_out:
            tasks[0]["left_out"] = dict(sorted(self._left_out.items()))
        return tasks

    def pieces(self, task: Mapping[str, Any], reject: Reject) -> Iterator[Piece]:
        """Yields a task's pieces; rejects those that were not readable files when the tasks were made."""
        for piece in task["pieces"]:
            if "fault" in piece:
                reject(self.source_of(Path(piece["path"])), piece["path"], "cannot be read", piece["fault"])
            else:
                yield piece

    def readable(self, path: Path, reject: Reject) -> bool:
        """Returns whether a file can be opened; rejects it if not."""
        try:
            opened(path).close()
        except UnreadableError as error:
            reject(self.source_of(path), str(path), "cannot be read", error.reason)
            return False
        return True


def whole_files(path: Path, size: int, task_bytes: int) -> list[Piece]:
    """Returns the file as one piece: for formats that cannot be cut."""
    return [{"bytes": size}]


def require_files_here(source: str) -> None:
    """Raises a ConfigError if a source is a URL: the files that readers read are on this machine."""
    if is_url(source):
        raise ConfigError(
            f"data.source={source} is a URL: text and records are read from files of this machine. Download or mount them.\nOnly "
            "folders of tokens, of `prepare` or litdata, may lie on object storage."
        )


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ConfigError(f"{printable(str(path))} cannot be read: {error.strerror}.") from error


def _find(
    source: str, suffixes: tuple[str, ...], names: Mapping[str, str], without: Collection[str]
) -> _Found:
    path = Path(source).expanduser()
    found = _Found(without)
    if path.is_dir():
        found.walk(path, suffixes)
    elif path.is_file():
        found.add(path, suffixes)
    elif path.exists():
        raise ConfigError(f"data.source={source} is {kind_of(path.stat().st_mode)}, not a file or a folder.")
    else:
        leads_back = cache(_leads_back)
        for name in glob.glob(str(path), recursive=True):
            if not os.path.isdir(name) and not leads_back(os.path.dirname(name)):
                found.add(Path(name), suffixes)
    if found.paths or found.faults:
        return found
    kinds = ", ".join(suffixes)
    if found.example:
        number = sum(found.left_out.values())
        raise ConfigError(
            f"data.source={source}: none of the {number} file(s) found, such as {found.example},\nis of a kind "
            f"that is read: {kinds}. Convert or rename them."
        )
    if path.is_dir():
        raise ConfigError(
            f"data.source={source}: the folder is empty. Files of these kinds are read: {kinds}."
        )
    around = path.parent if path.parent.is_dir() else Path()
    hint = nearest(path.name, {*names, *(entry.name for entry in around.iterdir())})
    known = "".join(f"; {name} is {what}" for name, what in names.items())
    raise ConfigError(
        f"data.source={source}: no such file or folder, and no file matches it as a glob.{hint}\nLooked from "
        f"{Path.cwd()} for files of the kinds {kinds}{known}."
    )


def _leads_back(folder: str) -> bool:
    """Returns whether a path runs through a symbolic link to a folder above it: its files are found without the link."""
    place = Path(os.path.abspath(folder))
    above = [os.path.realpath(part) for part in (place, *place.parents)]
    return len(set(above)) < len(above)


class _Found:
    """The files found at the source, and what was not taken.

    Attributes:
        stats: Path -> status of each file to read.
        faults: Path -> reason, for paths that have the right suffix but cannot be read.
        left_out: Reason -> number of files or folders that are not read for it.
        example: Path of one file of another kind.

    Args:
        without: Names of folders, in lower case, that are not walked.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        self.without = without
        self.stats: dict[Path, os.stat_result] = {}
        self.faults: dict[Path, str] = {}
        self.left_out: Counter[str] = Counter()
        self.example: str = ""

    @property
    def paths(self) -> list[Path]:
        return list(self.stats)

    def walk(self, folder: Path, suffixes: tuple[str, ...]) -> None:
        """Adds the files of a folder and its subfolders; symbolic links to folders are not followed."""
        for place, folders, files in os.walk(folder, onerror=self._closed):
            for name in files:
                self.add(Path(place, name), suffixes)
            self.left_out["a symbolic link to a folder"] += sum(
                os.path.islink(os.path.join(place, f)) for f in folders
            )
            if left := [name for name in folders if name.lower() in self.without]:
                self.left_out["a folder of others' code"] += len(left)
                folders[:] = [name for name in folders if name not in left]

    def add(self, path: Path, suffixes: tuple[str, ...]) -> None:
        """Adds a file, or notes why it is not read."""
        if not path.name.lower().endswith(suffixes):
            self.left_out[f"a file of the kind {printable(path.suffix.lower()) or 'without a suffix'}"] += 1
            self.example = self.example or str(path)
            return
        try:
            described = path.stat()
        except OSError as error:
            what = "a broken symbolic link" if error.errno == errno.ENOENT else str(error.strerror)
            self.faults[path] = "a symbolic link to itself" if error.errno == errno.ELOOP else what
            return
        if kind := kind_of(described.st_mode):
            self.faults[path] = kind
        else:
            self.stats[path] = described

    def _closed(self, error: OSError) -> None:
        self.left_out[f"a folder that cannot be read: {error.strerror}"] += 1
