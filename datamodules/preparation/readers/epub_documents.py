"""Reads documents from EPUB books: the text of their chapters in reading order."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from core.contracts import Reject
from core.errors import ConfigError, nearest
from core.technique import technique
from datamodules.preparation.readers import web_pages
from datamodules.preparation.readers.archived_files import archived_files
from datamodules.preparation.readers.compressed_files import rejecting_broken
from datamodules.preparation.readers.file_reader import FileReader, Row
from datamodules.preparation.readers.opened_files import unstorable
from datamodules.preparation.readers.source_files import Piece, SourceFiles, whole_files
from datamodules.preparation.readers.web_pages import PageError

Unit = Literal["book", "chapter"]

NO_BOOK, ENCRYPTED, EMPTY = "not an EPUB book", "an encrypted book (DRM)", "a book without text"
TOO_LONG = "a book of more than max_book_bytes"

_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_LONGEST_FIELD = 1000
_XHTML = {"application/xhtml+xml", "text/html", "text/x-oeb1-document"}
_DECLARED = re.compile(rb"""\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([\w.:-]{1,40})""")

_EMPTY_TAG = re.compile(r"""<([a-z][\w:.-]*+)((?:[^<>"'/]|"[^"<]*+"|'[^'<]*+'|/(?!>))*+)/>""", re.I)
"""In XHTML any element may end like this; HTML knows that of a few, and takes what follows `<title/>` for a title."""

_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class _Book(NamedTuple):
    """The paths of a book's chapters in reading order, and what is known of it."""

    chapters: list[str]
    known: dict[str, str | None]


@technique(
    paper="EPUB 3.3, w3.org/TR/epub-33: container, package document and spine; also EPUB 2",
    needs=[web_pages.PACKAGES["resiliparse"]],
)
class EPUBDocuments(FileReader):
    """Reads EPUB books: the text of the chapters in the order of the spine.

    The table of contents (EPUB 3's `nav`) is left out. Title, author, language, date and identifier of the book are kept
    beside the tokens, in documents.parquet. Nothing is unpacked to disk, and no entity of XML is expanded. Books that are
    encrypted (DRM), lack a chapter, have no text or are too long are rejected as a whole with the reason, and so are
    files that are broken. Encrypted fonts do not matter.

    Args:
        source: A path, a folder, or a glob.
        unit: What a document is: "book", or "chapter", an entry of the spine, whose number follows the file in its id.
        max_book_bytes: Longest book, in bytes of its chapters with markup; longer ones are rejected.

    Raises:
        ConfigError: If there is no such file, an argument is out of range, or the package is missing.

    Example:
        data:
          init_args:
            reader: {class_path: EPUBDocuments, init_args: {unit: book}}
    """

    metadata = ("title", "author", "language", "date", "identifier")

    def __init__(self, source: str, unit: Unit = "book", max_book_bytes: int = 1 << 26) -> None:
        if unit not in (units := get_args(Unit)):
            raise ConfigError(
                f"EPUBDocuments: unit={unit!r} is none of {', '.join(units)}.{nearest(unit, set(units))}"
            )
        if max_book_bytes < 1:
            raise ConfigError(f"EPUBDocuments: max_book_bytes is {max_book_bytes}; it is at least 1.")
        web_pages.need("EPUBDocuments", web_pages.PACKAGES["resiliparse"])
        self.unit, self.max_book_bytes = unit, max_book_bytes
        self.files = SourceFiles(source, (".epub",))

    def options(self) -> dict[str, Any]:
        """Returns the arguments, and the version of the package."""
        html = web_pages.described("resiliparse")
        return {"unit": self.unit, "max_book_bytes": self.max_book_bytes, "html": html}

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of files."""
        return self.files.tasks(whole_files)

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the book of a file, or its chapters."""
        path = Path(piece["path"])
        source, name = self.files.source_of(path), self.files.name(path)
        chapters: list[tuple[int, str]] = []
        with rejecting_broken(path, source, reject):
            try:
                book = self._book(path)
                chapters = self._chapters(path, book)
            except PageError as error:
                reject(source, str(path), error.reason, error.details)
        if not chapters:
            return
        if self.unit == "book":
            yield "\n\n".join(text for _, text in chapters), source, name, book.known
            return
        for number, text in chapters:
            yield text, source, f"{name}:{number}", book.known

    def _book(self, path: Path) -> _Book:
        """Returns what a book's package document says.

        Raises:
            PageError: If there is none, or chapters are encrypted.
        """
        found = self._read(path, lambda name: name in (_CONTAINER, _ENCRYPTION) or name.endswith(".opf"))
        if _CONTAINER not in found:
            raise PageError(NO_BOOK, f"without {_CONTAINER}")
        roots = _all(_parsed(found[_CONTAINER], _CONTAINER), "rootfile")
        package = next((file for root in roots if (file := root.get("full-path", "")) in found), None)
        if package is None:
            raise PageError(NO_BOOK, "without a package document (.opf)")
        book = _described(_parsed(found[package], package), posixpath.dirname(package))
        if _ENCRYPTION in found:
            tree = _parsed(found[_ENCRYPTION], _ENCRYPTION)
            hidden = {unquote(node.get("URI", "")) for node in _all(tree, "CipherReference")}
            if hidden & set(book.chapters):
                raise PageError(ENCRYPTED)
        return book

    def _chapters(self, path: Path, book: _Book) -> list[tuple[int, str]]:
        """Returns number and text of each chapter that has text."""
        wanted = set(book.chapters)
        found = self._read(path, wanted.__contains__)
        if missing := [name for name in book.chapters if name not in found]:
            raise PageError("a book that lacks a chapter", missing[0][:200])
        chapters = []
        for number, name in enumerate(book.chapters, 1):
            text = web_pages.fragment_text(_as_html(found[name]))
            if fault := unstorable(text):
                raise PageError("not UTF-8", fault)
            if text.strip():
                chapters.append((number, text))
        if not chapters:
            raise PageError(EMPTY, f"{len(book.chapters):,} chapters")
        return chapters

    def _read(self, path: Path, wanted: Any) -> dict[str, bytes]:
        """Returns the files of a book that are wanted, by their paths in it."""
        found, size = {}, 0
        for name, content in archived_files(path, self.max_book_bytes, wanted):
            size += len(content)
            if size > self.max_book_bytes:
                raise PageError(TOO_LONG, f"{self.max_book_bytes:,} bytes")
            found[name] = content
        return found


def _described(package: Element, folder: str) -> _Book:
    """Returns the chapters that a package document lists, each once, and the book's title and so on."""
    items = {item.get("id"): item for item in _all(package, "item")}
    spine = [items[ref.get("idref")] for ref in _all(package, "itemref") if ref.get("idref") in items]
    kept = [
        posixpath.normpath(posixpath.join(folder, unquote(urlsplit(item.get("href", "")).path)))
        for item in spine
        if item.get("media-type", "").strip().lower() in _XHTML
        and "nav" not in item.get("properties", "").split()
    ]
    if not kept:
        raise PageError(NO_BOOK, "without chapters in XHTML")
    dates = [
        match[0] for text in _texts(package, "date") if (match := re.match(r"\d{4}(-\d\d(-\d\d)?)?", text))
    ]
    code = web_pages.language_code("".join(_texts(package, "language")[:1]))
    return _Book(
        list(dict.fromkeys(kept)),
        {
            "title": "".join(_texts(package, "title")[:1]) or None,
            "author": ", ".join(_texts(package, "creator"))[:_LONGEST_FIELD] or None,
            "language": None if code == web_pages.UNKNOWN else code,
            "date": dates[0] if dates else None,
            "identifier": "".join(_texts(package, "identifier")[:1]) or None,
        },
    )


def _all(tree: Element, name: str) -> list[Element]:
    return list(tree.iter(name))


def _texts(tree: Element, name: str) -> list[str]:
    """Returns the texts of the first elements of a name that are not blank."""
    texts = (" ".join((node.text or "").split())[:_LONGEST_FIELD] for node in _all(tree, name)[:20])
    return [text for text in texts if text]


def _parsed(data: bytes, name: str) -> Element:
    """Returns the tree of an XML file, names without their namespaces.

    Raises:
        PageError: If it is no XML, or declares entities.
    """
    tree = TreeBuilder()
    parser = expat.ParserCreate(namespace_separator="}")
    parser.StartElementHandler = lambda tag, attributes: tree.start(tag.rpartition("}")[2], attributes)
    parser.EndElementHandler = lambda tag: tree.end(tag.rpartition("}")[2])
    parser.CharacterDataHandler, parser.buffer_text = tree.data, True
    parser.EntityDeclHandler = _refused
    try:
        parser.Parse(data, True)
        return tree.close()
    except (expat.ExpatError, AssertionError, LookupError, ValueError) as error:
        raise PageError(NO_BOOK, f"{name[:200]}: {error}") from error


def _refused(*_: Any) -> None:
    raise expat.ExpatError("an entity is declared, which no book needs")


def _as_html(data: bytes) -> str:
    """Returns XHTML so that a parser of HTML understands it."""
    declared = _DECLARED.match(data)
    html = web_pages.decoded(data, declared[1].decode() if declared else "utf-8")
    return _EMPTY_TAG.sub(
        lambda tag: tag[0] if tag[1].lower() in _VOID else f"<{tag[1]}{tag[2]}></{tag[1]}>", html
    )
