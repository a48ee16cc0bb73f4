"""Reads documents from dumps of Wikipedia and other MediaWiki sites: the plain text of each article."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.parsers import expat

from core.contracts import Reject
from core.errors import ConfigError
from core.technique import Package, technique
from datamodules.preparation.readers.compressed_files import (
    DUMP_CODECS,
    BrokenFileError,
    codec_of,
    decompressed,
    rejecting_broken,
)
from datamodules.preparation.readers.file_reader import FileReader, Row
from datamodules.preparation.readers.opened_files import opened
from datamodules.preparation.readers.source_files import Piece, SourceFiles, whole_files
from datamodules.preparation.readers.web_pages import EMPTY, UNKNOWN, cleaned_url, language_code, need

MWPARSERFROMHELL = Package("mwparserfromhell>=0.7", extra="web")
BROKEN, REDIRECT, MODEL = "broken XML", "a redirect", "not wikitext"
TOO_LONG, UNCLOSED = (
    "an article of more than max_page_bytes",
    "too many tags, tables or links that do not end",
)

_BLOCK, _MOST_AHEAD, _DEEPEST = 1 << 20, 1 << 24, 20
_MOST_UNCLOSED = 500
_FIELDS = {"title", "ns", "id", "redirect", "text", "model", "timestamp", "namespace", "base"}
_OPEN = re.compile(r"<[a-z][^<>]*(?<!/)>", re.I)
_LEFT_OUT = {
    "ref",
    "table",
    "gallery",
    "math",
    "timeline",
    "syntaxhighlight",
    "source",
    "score",
    "references",
}


@technique(
    paper="MediaWiki's export format, mediawiki.org/xml/export-0.11; wikitext read with mwparserfromhell",
    needs=[MWPARSERFROMHELL],
)
class WikipediaDump(FileReader):
    """Reads pages-articles dumps of MediaWiki, .xml, plain or .bz2, .gz, .zst: an article is a document.

    Wikitext becomes plain text: templates, tables, references, formulas, files and categories are left out, links and
    headings keep their words. A document's id is the file, the page's number, the time of its revision and its title.
    Its title, date, address and language are its metadata. Redirects and pages of other namespaces (talk, templates,
    users) are skipped. Articles without text, longer ones, and those with over 500 tags, tables or links that do not
    end, which would take minutes, are rejected. Entities and document types are refused, as dumps have none. A broken
    file is kept up to the damage. A file is one task: use the dump in its parts (pages-articles1.xml-p1p41242.bz2).

    Args:
        source: A path, a folder, or a glob.
        namespaces: Numbers of the namespaces that are read; 0: articles.
        max_page_bytes: Longest wikitext, in bytes; Wikipedia's own limit is 2 MiB.

    Raises:
        ConfigError: If there is no such file, an argument is out of range, or a package is missing.

    Example:
        data:
          init_args:
            reader: {class_path: WikipediaDump, init_args: {namespaces: [0]}}
    """

    metadata = ("title", "url", "date", "language")

    def __init__(
        self, source: str, namespaces: tuple[int, ...] = (0,), max_page_bytes: int = 1 << 21
    ) -> None:
        need("WikipediaDump", MWPARSERFROMHELL)
        if max_page_bytes < 1 or not namespaces:
            raise ConfigError(
                "WikipediaDump: max_page_bytes is at least 1, and namespaces names at least one."
            )
        self.namespaces, self.max_page_bytes = tuple(namespaces), max_page_bytes
        self.files = SourceFiles(source, (".xml", *(f".xml{codec}" for codec in DUMP_CODECS), ".bz2"))

    def options(self) -> dict[str, Any]:
        """Returns the arguments, and the version of the package."""
        return {
            "namespaces": list(self.namespaces),
            "max_page_bytes": self.max_page_bytes,
            "wikitext": version("mwparserfromhell"),
        }

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of files."""
        return self.files.tasks(whole_files)

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the articles of a dump."""
        path = Path(piece["path"])
        name, source = self.files.name(path), self.files.source_of(path)
        dump = _Dump(self.max_page_bytes)
        with rejecting_broken(path, source, reject):
            for page in dump.pages(_blocks(path), piece["bytes"]):
                if "redirect" in page or page.get("ns", "").strip() not in map(str, self.namespaces):
                    continue
                reason, text = self._text(page, dump.left_out)
                title = page.get("title", "").strip()
                if reason:
                    reject(source, f"{path}, page {page.get('id', '')[:20]}", reason, title[:200])
                else:
                    time = page.get("timestamp", "")[:40]
                    row_id = f"{name}:{page.get('id', '')[:20]} {time} {title[:300]}"
                    known = {"title": title[:300], "url": dump.url(title), "date": time or None}
                    yield text, source, row_id, known | {"language": dump.language}

    def _text(self, page: dict[str, str], left_out: tuple[str, ...]) -> tuple[str, str]:
        """Returns the reason why a page is left out, or an empty one and its text."""
        wikitext = page.get("text", "")
        if page.get("model", "wikitext") != "wikitext":
            return MODEL, ""
        if len(wikitext) > self.max_page_bytes or len(wikitext.encode()) > self.max_page_bytes:
            return TOO_LONG, ""
        if _unclosed(wikitext) > _MOST_UNCLOSED:
            return UNCLOSED, ""
        text = plain_text(wikitext, left_out)
        return ("", text) if text else (EMPTY, "")


def plain_text(wikitext: str, left_out: tuple[str, ...] = ("file:", "image:", "category:")) -> str:
    """Returns the words of a wikitext.

    Args:
        wikitext: The text of a page.
        left_out: Begins of links, in lower case, that are left out with their words.
    """
    import mwparserfromhell

    code = mwparserfromhell.parse(wikitext, skip_style_tags=True)
    _clean(code, left_out)
    text = code.strip_code(normalize=True, collapse=True)
    text = re.sub(r"'{2,}", "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _clean(code: Any, left_out: tuple[str, ...]) -> None:
    """Takes out what has no words of the article, in one pass: `Wikicode.remove` would search the page each time."""
    from mwparserfromhell.nodes import Heading, Tag, Wikilink

    kept = []
    for node in code.nodes:
        if isinstance(node, Tag):
            if str(node.tag).strip().lower() in _LEFT_OUT:
                continue
            if node.contents is not None:
                _clean(node.contents, left_out)
        elif isinstance(node, Wikilink):
            if str(node.title).strip().lower().startswith(left_out):
                continue
            if node.text is not None:
                _clean(node.text, left_out)
        elif isinstance(node, Heading):
            node.title = str(node.title).strip()
        kept.append(node)
    code.nodes = kept


def _unclosed(wikitext: str) -> int:
    tables = wikitext.count("{|") - wikitext.count("|}")
    links = wikitext.count("[http") - wikitext.count("]")
    tags = sum(1 for _ in _OPEN.finditer(wikitext)) - wikitext.count("</")
    return max(tables, links, tags)


class _Dump:
    """A dump that is parsed as it is read.

    Args:
        limit: Characters of a field that are kept, and one more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left_out: tuple[str, ...] = ("file:", "image:", "category:")
        self.language: str | None = None
        self._base = ""
        self._path: list[str] = []
        self._found: list[dict[str, str]] = []
        self._page: dict[str, str] = {}
        self._key = ""
        self._parts: dict[str, list[str]] = defaultdict(list)
        self._size = 0

    def pages(self, blocks: Iterator[bytes], size: int) -> Iterator[dict[str, str]]:
        """Yields the fields of each page.

        Raises:
            BrokenFileError: If it is no XML, or XML that no dump has.
        """
        parser = expat.ParserCreate()
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler, parser.buffer_text = self._text, True
        parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = _refused
        fed = 0
        try:
            for block in blocks:
                parser.Parse(block, False)
                fed += len(block)
                yield from self._taken()
                if fed - parser.CurrentByteIndex > _MOST_AHEAD:
                    raise expat.ExpatError("a tag of more than 16 MiB")
            parser.Parse(b"", True)
        except expat.ExpatError as error:
            yield from self._taken()
            raise BrokenFileError(BROKEN, str(error), size) from error
        yield from self._taken()

    def url(self, title: str) -> str | None:
        """Returns the address of a page; None if the dump does not say where its main page is."""
        return f"{self._base}{quote(title.replace(' ', '_'), safe='/:,()!*@$;')}" if self._base else None

    def _taken(self) -> list[dict[str, str]]:
        found, self._found = self._found, []
        return found

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._path.append(name)
        if len(self._path) > _DEEPEST:
            raise expat.ExpatError("elements in more than 20 levels")
        self._key, self._size = name, 0
        if name == "page":
            self._parts.clear()
        elif name == "mediawiki":
            code = language_code(attributes.get("xml:lang"))
            self.language = code if code != UNKNOWN else None
        elif name == "redirect":
            self._parts[name].append("")
        elif name == "namespace":
            self._parts[name].clear()
            self._key = name if attributes.get("key") in ("6", "14") else ""

    def _text(self, data: str) -> None:
        # the first id is the page's, those of its revision and its author are below that
        if self._key not in _FIELDS or (self._key == "id" and self._path[-2:-1] != ["page"]):
            return
        if self._size <= self.limit:
            self._parts[self._key].append(data)
            self._size += len(data)

    def _end(self, name: str) -> None:
        self._path.pop()
        if name == "namespace" and self._key and (words := "".join(self._parts[name]).strip()):
            self.left_out = (*self.left_out, f"{words.lower()}:")[:16]
        elif name == "base" and len(self._path) == 2:
            self._base = cleaned_url("".join(self._parts.pop(name, []))).rpartition("/")[0]
            self._base += "/" if self._base else ""
        elif name == "page":
            self._found.append({key: "".join(parts) for key, parts in self._parts.items()})
            self._parts.clear()
        self._key = ""


def _refused(*_: Any) -> None:
    raise expat.ExpatError("a document type or entity, which dumps do not have")


def _blocks(path: Path) -> Iterator[bytes]:
    if codec := codec_of(path):
        yield from decompressed(path, codec)
        return
    with opened(path) as stream:
        while block := stream.read(_BLOCK):
            yield block
