"""Reads the plain text files of Project Gutenberg: the books without the project's header, footer and license."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from core.contracts import Reject
from core.technique import technique
from datamodules.preparation.readers.archived_files import archived_files
from datamodules.preparation.readers.compressed_files import rejecting_broken
from datamodules.preparation.readers.file_reader import FileReader, Row
from datamodules.preparation.readers.opened_files import LONGEST, opened
from datamodules.preparation.readers.source_files import Piece, SourceFiles, whole_files

TOO_LONG, UNMARKED = f"a book of more than {LONGEST >> 20} MiB", "without the marks of Project Gutenberg"
EMPTY = "a book without text"

_NAME = re.compile(r"(?:pg)?(\d+)(?:-(0|8))?(?:\.txt)?(?:\.utf-?8)?\.(?:txt|zip)", re.I)
_RANKS = {"0": 0, None: 1, "8": 2}
_HEADER, _FOOTER = 1 << 16, 1 << 16
_START = re.compile(
    r"^[ \t]*(?:\*{3} ?START OF (?:THE|THIS) PROJECT GUTENBERG[^*]{0,400}\*{3}"
    r"|\*END[* ]{1,4}THE SMALL PRINT![^\n]{0,200}"
    r"|\*{3} ?START\*{2} ?THE SMALL PRINT![^*]{0,400}\*{3}START\*{2}[^\n]{0,99})[ \t]*$",
    re.M | re.I,
)
_END = re.compile(
    r"^[ \t]*(?:\*{3} ?END OF (?:THE|THIS) PROJECT GUTENBERG"
    r"|\*{0,3} ?End of (?:the |this )?Project Gutenberg(?:'s|\u2019s|['\u2019]? Etext| Ebook)"
    r"|\*{3} ?END: FULL LICENSE)",
    re.M | re.I,
)
_LICENSE = re.compile(r"^[ \t]*\*{3} ?START: FULL LICENSE", re.M | re.I)
_PRODUCED = re.compile(
    r"\s*(?:E-?text prepared by|(?:This e-?(?:text|book) was )?(?:Produced|transcribed|created) by)(?:[^\n]+\n){1,8}\s*\n",
    re.I,
)
_FIELD = re.compile(
    r"^(Title|Author|Language|Release Date|Posting Date):[ \t]*(\S[^\n]*(?:\n[ \t]+\S[^\n]*)*)", re.M
)
_DATE = re.compile(r"([A-Z][a-z]+ \d{1,2}, \d{4})|([A-Z][a-z]+,? \d{4})")
_LANGUAGES = {
    "english": "en", "french": "fr", "german": "de", "finnish": "fi", "dutch": "nl", "italian": "it", "spanish": "es",
    "portuguese": "pt", "chinese": "zh", "greek": "el", "swedish": "sv", "hungarian": "hu", "esperanto": "eo",
    "latin": "la", "danish": "da", "tagalog": "tl", "catalan": "ca", "polish": "pl", "japanese": "ja", "norwegian": "no",
    "welsh": "cy", "czech": "cs", "russian": "ru", "icelandic": "is",
}  # fmt: skip


@technique(paper="Project Gutenberg's files and their names, gutenberg.org/help/file_formats.html")
class GutenbergTexts(FileReader):
    """Reads Project Gutenberg's text files, .txt or .zip, as its mirrors have them: a book is a document.

    The header up to "*** START OF THE PROJECT GUTENBERG EBOOK" and the footer with the license are left out, also the
    "small print" of the 1990s. Of the files of one book (84-0.txt is UTF-8, 84.txt ASCII, 84-8.txt Latin-1; 84-0.zip
    the same) in a folder one is read, in this order. Files are read as UTF-8, or else as Windows-1252. Title, author,
    language and date of release are those of the header, and go to documents.parquet. Files without these marks are
    rejected.

    Args:
        source: A path, a folder, or a glob.

    Raises:
        ConfigError: If there is no such file.

    Example:
        data:
          init_args:
            reader: GutenbergTexts
    """

    metadata = ("title", "author", "language", "date")

    def __init__(self, source: str) -> None:
        self.files = SourceFiles(source, (".txt", ".zip"))
        self.files.paths = _without_copies(self.files.paths)

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of files."""
        return self.files.tasks(whole_files)

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the book of a file, or those of an archive."""
        path = Path(piece["path"])
        source, name = self.files.root.name, self.files.name(path)
        with rejecting_broken(path, source, reject):
            for inner, data in _contents(path):
                place = f"{path}, {inner}" if inner else str(path)
                if len(data) > LONGEST:
                    reject(source, place, TOO_LONG, "")
                    continue
                header, text = body(decoded(data))
                if not header:
                    reject(source, place, UNMARKED, "")
                elif not text:
                    reject(source, place, EMPTY, "")
                else:
                    yield text, source, f"{name}:{inner}" if inner else name, described(header)


def body(text: str) -> tuple[str, str]:
    """Returns the header of a file and the text of its book; an empty header if it has none.

    Marks count in the first and last 64 Ki characters alone, where the project has them.
    """
    starts = list(_START.finditer(text, 0, _HEADER))
    if not starts:
        return "", ""
    begin = starts[-1].end()
    ends = [
        found
        for pattern in (_END, _LICENSE)
        if (found := pattern.search(text, max(begin, len(text) - _FOOTER)))
    ]
    end = min((found.start() for found in ends), default=len(text))
    inner = text[begin:end].strip("\n")
    credit = _PRODUCED.match(inner + "\n\n")
    inner = inner[credit.end() :] if credit else inner
    return text[:begin], "\n".join(line.rstrip() for line in inner.split("\n")).strip("\n")


def described(header: str) -> dict[str, str | None]:
    """Returns title, author, language and date that a header names."""
    fields: dict[str, str] = {}
    for found in _FIELD.finditer(header):
        fields.setdefault(found[1], " ".join(found[2].split())[:1000])
    language = re.split(r"[ ,(]", fields.get("Language", ""), maxsplit=1)[0].lower()
    return {
        "title": fields.get("Title"),
        "author": fields.get("Author"),
        "language": _LANGUAGES.get(language),
        "date": _iso(fields.get("Release Date") or fields.get("Posting Date") or ""),
    }


def decoded(data: bytes) -> str:
    """Returns a file as text with Unix line ends: UTF-8, or else Windows-1252."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _iso(date: str) -> str | None:
    """Returns "January 5, 2004" as 2004-01-05 and "May, 1997" as 1997-05; None for anything else."""
    found = _DATE.search(date)
    if found is None:
        return None
    day, month = found.groups()
    try:
        if day:
            return datetime.strptime(day, "%B %d, %Y").date().isoformat()
        return datetime.strptime(month.replace(",", ""), "%B %Y").date().isoformat()[:7]
    except ValueError:
        return None


def _without_copies(paths: list[Path]) -> list[Path]:
    """Returns one file for each book of a folder, and all files that are not named as books are."""
    best: dict[Any, tuple[tuple[int, bool, str], Path]] = {}
    for path in paths:
        name = _NAME.fullmatch(path.name)
        key = (path.parent, name[1]) if name else path
        rank = (_RANKS[name[2]] if name else 0, path.suffix.lower() == ".zip", path.name)
        if key not in best or rank < best[key][0]:
            best[key] = rank, path
    kept = {path for _, path in best.values()}
    return [path for path in paths if path in kept]


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the text of a file under an empty name, or those of an archive under theirs."""
    if path.suffix.lower() == ".zip":
        yield from archived_files(path, LONGEST, lambda name: PurePosixPath(name).suffix.lower() == ".txt")
        return
    with opened(path) as stream:
        yield "", stream.read(LONGEST + 1)
