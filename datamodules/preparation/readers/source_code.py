"""Reads documents from repositories of source code: files in programming languages, by their license."""

from __future__ import annotations

import codecs
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from core.contracts import Reject
from core.errors import ConfigError, nearest
from core.technique import technique
from datamodules.preparation.readers import archived_files
from datamodules.preparation.readers import licenses as _license
from datamodules.preparation.readers.compressed_files import rejecting_broken
from datamodules.preparation.readers.file_reader import FileReader, Row
from datamodules.preparation.readers.opened_files import UnreadableError, opened, printable
from datamodules.preparation.readers.programming_languages import LANGUAGES, SUFFIXES, language_of
from datamodules.preparation.readers.source_files import Piece, SourceFiles, whole_files
from datamodules.preparation.readers.web_pages import need

CountBy = Literal["language", "license", "repository"]
NO_LICENSE, NOT_ALLOWED, NOT_KNOWN = (
    "no license found",
    "a license that is not allowed",
    "a license that is not recognised",
)
TOO_LONG, BINARY, LINK = "a file of more than max_file_bytes", "binary data", "a symbolic link"

OTHERS = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        ".tox",
        ".venv",
        "bower_components",
        "carthage",
        "extern",
        "external",
        "externals",
    }
    | {
        "node_modules",
        "pods",
        "site-packages",
        "third-party",
        "third_party",
        "thirdparty",
        "vendor",
        "vendors",
    }
)
"""Folders of code that is from elsewhere, in lower case; most of them as in GitHub's linguist (vendor.yml)."""

_MINIFIED = (".min.js", "-min.js", ".min.css", "-min.css")
_LONGEST_LICENSE = 1 << 19
_MOST_FOLDERS = 1 << 16


@technique(
    paper="The Stack, arXiv:2211.15533, section 2 (permissive licenses, files up to 1 MB, languages by extension); licenses found "
    "with licenseclassifier, a port of Google's licensecheck",
    needs=_license.PACKAGES,
)
class SourceCode(FileReader):
    """Reads checked-out repositories, in folders or in archives as GitHub gives them (.zip, .tar, .tar.gz): a file is a document.

    The language is that of the file's name. The license is that of the file's own SPDX header, otherwise that of the
    license files (LICENSE, COPYING, LICENSE-MIT...) in its folder or the nearest folder above, up to the source or
    the root of the archive: of several licenses, each has to be allowed. Files without license, of another one,
    binary, not in UTF-8, or too long are rejected with the reason. Minified files, links, and folders of others' code
    (vendor, node_modules, third_party) are not read. Language, license and repository are its metadata. Archives are
    read in memory, twice; paths that lead out of them are left out, and bombs stopped. An archive is one task. Put
    CodeQuality behind it.

    Args:
        source: A path, a folder, or a glob.
        languages: Names as in GitHub's linguist, such as Python or C++; None: all 90 that are known.
        licenses: SPDX identifiers that are allowed; None: any file is read, whatever its license.
        count_by: What the report counts a document under: its "language", "license", or "repository".
        max_file_bytes: Longest file.

    Raises:
        ConfigError: If there is no such file, language or license, or a package is missing.

    Example:
        data:
          init_args:
            reader: {class_path: SourceCode, init_args: {languages: [Python], licenses: [MIT, Apache-2.0]}}
            max_reject_fraction: 0.9
    """

    metadata = ("language", "license", "repository")

    def __init__(
        self,
        source: str,
        languages: Collection[str] | None = None,
        licenses: Collection[str] | None = _license.PERMISSIVE,
        count_by: CountBy = "language",
        max_file_bytes: int = 1 << 20,
    ) -> None:
        _check(languages, count_by, max_file_bytes)
        self.languages = tuple(sorted(languages or LANGUAGES))
        self.licenses = None if licenses is None else _license.checked("SourceCode", licenses)
        self.count_by, self.max_file_bytes = count_by, max_file_bytes
        suffixes = (*SUFFIXES, *archived_files.SUFFIXES, *_license.SUFFIXES)
        self.files = SourceFiles(source, suffixes, without=OTHERS)
        folder = Path(source).expanduser()
        self._top = folder.absolute() if folder.is_dir() else self.files.root
        self.files.root = self._top
        self._is_checkout = (self._top / ".git").exists() or bool(_licenses_of_folder(self._top))
        self._found: dict[Path, tuple[str, ...]] = {}

    def options(self) -> dict[str, Any]:
        """Returns the arguments, and the version of the package."""
        return {
            "languages": list(self.languages),
            "licenses": None if self.licenses is None else list(self.licenses),
            "count_by": self.count_by,
            "max_file_bytes": self.max_file_bytes,
            "classifier": version("licenseclassifier"),
        }

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of files."""
        return self.files.tasks(whole_files)

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields a file, or the files of an archive."""
        path = Path(piece["path"])
        if archived_files.is_archive(path):
            yield from self._archive(path, reject)
        elif self._is_wanted(self.files.name(path)):
            yield from self._file(path, reject)

    def _is_wanted(self, name: str) -> bool:
        """Returns whether a path, relative to the source or an archive's root, is of a language, and no other's code."""
        path = PurePosixPath(name)
        if any(part.lower() in OTHERS for part in path.parts[:-1]) or _license.is_license_file(path.name):
            return False
        return language_of(path.name) in self.languages and not path.name.lower().endswith(_MINIFIED)

    def _file(self, path: Path, reject: Reject) -> Iterator[Row]:
        name, repository = self.files.name(path), self._repository(self.files.name(path))
        if path.is_symlink():
            reject(repository, str(path), LINK, "")
            return
        with rejecting_broken(path, repository, reject):
            with opened(path) as file:
                data = file.read(self.max_file_bytes + 1)
            yield from self._document(
                data, self._near(path.absolute().parent), str(path), name, repository, reject
            )

    def _repository(self, name: str) -> str:
        """Returns the repository of a file in a folder: the first folder of its path, or the source if that is a checkout."""
        first, slash, _ = name.partition("/")
        return first if slash and not self._is_checkout else printable(self._top.name)

    def _near(self, folder: Path) -> tuple[str, ...]:
        """Returns the licenses of the nearest folder that has some, from one of the source upwards."""
        if folder not in self._found:
            found = _licenses_of_folder(folder)
            if not found and folder != self._top and self._top in folder.parents:
                found = self._near(folder.parent)
            if len(self._found) > _MOST_FOLDERS:
                self._found.clear()
            self._found[folder] = found
        return self._found[folder]

    def _archive(self, path: Path, reject: Reject) -> Iterator[Row]:
        name, source = self.files.name(path), self.files.source_of(path)
        with rejecting_broken(path, source, reject):
            found: dict[PurePosixPath, list[str]] = defaultdict(list)
            for member, data in archived_files.archived_files(path, _LONGEST_LICENSE, _is_license):
                found[PurePosixPath(member).parent] += _license.licenses_in(data)
            for member, data in archived_files.archived_files(path, self.max_file_bytes, self._is_wanted):
                place = PurePosixPath(member)
                near = next((found[folder] for folder in place.parents if folder in found), ())
                repository = place.parts[0] if len(place.parts) > 1 else source
                yield from self._document(
                    data, near, f"{path}, {member}", f"{name}:{member}", repository, reject
                )

    def _document(
        self, data: bytes, near: Collection[str], place: str, name: str, repository: str, reject: Reject
    ) -> Iterator[Row]:
        """Yields the document of a file, or rejects it."""
        if len(data) > self.max_file_bytes:
            reject(repository, place, TOO_LONG, f"{self.max_file_bytes:,} bytes")
            return
        if b"\0" in data:
            reject(repository, place, BINARY, "")
            return
        try:
            text = data.decode("utf-8").removeprefix(codecs.BOM_UTF8.decode())
        except UnicodeDecodeError as error:
            reject(repository, place, "not UTF-8", f"byte {error.start:,} is 0x{data[error.start]:02x}")
            return
        if not text or text.isspace():
            return
        expression = _license.header_of(text) or _license.joined(near)
        if reason := self._fault(expression):
            reject(repository, place, reason, expression)
            return
        language = language_of(PurePosixPath(name).name) or ""
        counted = {"language": language, "license": expression or "none", "repository": repository}
        known = {"language": language, "license": expression or None, "repository": repository}
        yield text, counted[self.count_by], name, known

    def _fault(self, expression: str) -> str:
        """Returns why a file of this license is not read; empty if it is."""
        if self.licenses is None:
            return ""
        if not expression:
            return NO_LICENSE
        if _license.is_allowed(expression, self.licenses):
            return ""
        return NOT_KNOWN if _license.UNKNOWN in expression.split() else NOT_ALLOWED


def _is_license(name: str) -> bool:
    return _license.is_license_file(PurePosixPath(name).name)


def _licenses_of_folder(folder: Path) -> tuple[str, ...]:
    """Returns the licenses of the license files of a folder."""
    found: list[str] = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ()
    for name in filter(_license.is_license_file, names):
        if (folder / name).is_file() and not (folder / name).is_symlink():
            try:
                with opened(folder / name) as file:
                    found += _license.licenses_in(file.read(_LONGEST_LICENSE))
            except UnreadableError:
                found.append(_license.UNKNOWN)
    return tuple(found)


def _check(languages: Collection[str] | None, count_by: str, max_file_bytes: int) -> None:
    for one in languages or ():
        if one not in LANGUAGES:
            raise ConfigError(
                f"SourceCode: there is no language {one!r}.{nearest(one, set(LANGUAGES))}\nNames are those of GitHub's linguist."
            )
    if count_by not in get_args(CountBy) or max_file_bytes < 1:
        raise ConfigError(
            f"SourceCode: count_by is {count_by!r} and max_file_bytes {max_file_bytes}.\nThe first is one of "
            f"{', '.join(get_args(CountBy))}, the second at least 1."
        )
    need("SourceCode", *_license.PACKAGES)
