"""What the readers of web pages have in common: encoding, main text, address and language of an HTML page."""

from __future__ import annotations

import codecs
import re
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from core.errors import ConfigError, nearest
from core.technique import Package
from datamodules.preparation.readers.opened_files import printable, unstorable

Extractor = Literal["resiliparse", "trafilatura"]
CountBy = Literal["file", "site", "language"]

PACKAGES = {
    "resiliparse": Package("resiliparse>=2", extra="web"),
    "trafilatura": Package("trafilatura>=2", extra="web"),
}
UNKNOWN = "unknown"
EMPTY, BINARY = "no main text", "binary data, not HTML"
NESTED, FLOOD = "markup nested too deeply", "a tag with too many attributes"

_DEEPEST, _FEW = 1000, 2000
"""Levels of elements that are accepted, where browsers have 512; and so many blocks cannot be slow, however nested."""

_SMALL, _ATTRIBUTES = 1 << 17, 5000
"""Characters of pages whose tags need no check, and attributes of a tag: parsers take a time of their square."""

_LONGEST_URL = 2048
_CODES = [
    "ara",
    "ar",
    "ben",
    "bn",
    "bul",
    "bg",
    "cat",
    "ca",
    "ces",
    "cs",
    "dan",
    "da",
    "deu",
    "de",
    "ell",
    "el",
    "eng",
    "en",
    "est",
    "et",
    "fas",
    "fa",
    "fin",
    "fi",
    "fra",
    "fr",
    "heb",
    "he",
    "hin",
    "hi",
    "hrv",
    "hr",
    "hun",
    "hu",
    "ind",
    "id",
    "isl",
    "is",
    "ita",
    "it",
    "jpn",
    "ja",
    "kat",
    "ka",
    "kor",
    "ko",
    "lav",
    "lv",
    "lit",
    "lt",
    "msa",
    "ms",
    "nld",
    "nl",
    "nno",
    "nn",
    "nob",
    "nb",
    "nor",
    "no",
    "pol",
    "pl",
    "por",
    "pt",
    "ron",
    "ro",
    "rus",
    "ru",
    "slk",
    "sk",
    "slv",
    "sl",
    "spa",
    "es",
    "sqi",
    "sq",
    "srp",
    "sr",
    "swe",
    "sv",
    "tam",
    "ta",
    "tel",
    "te",
    "tha",
    "th",
    "tur",
    "tr",
    "ukr",
    "uk",
    "urd",
    "ur",
    "vie",
    "vi",
    "zho",
    "zh",
]
_TWO_LETTERS = dict(zip(_CODES[::2], _CODES[1::2], strict=True))
"""ISO 639-3, as Common Crawl has it -> ISO 639-1."""

_BLOCKS = re.compile(r"<(?:div|article)", re.I)
_ATTRIBUTE = r"""=?[^\s/>=]++(?>\s*+=\s*+(?>"[^"]*+"?|'[^']*+'?|[^\s>"'][^\s>]*+)?+)?+|=|[\s/]++"""
_TAG = re.compile(rf"<!--|<([a-z][^\s/>]*+)((?>{_ATTRIBUTE})*+)", re.I)
_ONE = re.compile(_ATTRIBUTE)
_RAW = {
    name: re.compile(f"</{name}", re.I)
    for name in ("script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes")
}
_COMMENT_END = re.compile("-->")
_MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class Page(NamedTuple):
    """The main text of a page, its own address (empty if it names none), and the language that it declares."""

    text: str
    url: str
    language: str


class PageError(Exception):
    """A page that gives no document; `reason` is one of a few fixed texts, to count by."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.reason, self.details = reason, details


def check(owner: str, extractor: str, count_by: str, max_page_bytes: int) -> None:
    """Raises a ConfigError for an argument out of range or a package that is missing."""
    for name, value, known in (("extractor", extractor, Extractor), ("count_by", count_by, CountBy)):
        if value not in get_args(known):
            raise ConfigError(
                f"{owner}: {name}={value!r} is none of {', '.join(get_args(known))}.{nearest(value, set(get_args(known)))}"
            )
    if max_page_bytes < 1:
        raise ConfigError(f"{owner}: max_page_bytes is {max_page_bytes}; it is at least 1.")
    need(owner, *(PACKAGES[name] for name in dict.fromkeys(("resiliparse", extractor))))


def need(owner: str, *packages: Package) -> None:
    """Raises a ConfigError with the line that installs it if a package is missing."""
    if missing := [line for package in packages if (line := package.missing())]:
        raise ConfigError(f"{owner}: {missing[0]}")


def described(extractor: str) -> str:
    """Returns the extractor with its version, which decides the texts."""
    return " ".join(f"{name} {version(name)}" for name in dict.fromkeys(("resiliparse", extractor)))


def decoded(data: bytes, charset: str | None = None) -> str:
    """Returns a page as text: by its byte order mark, `charset` (of HTTP), its own declaration, or its bytes.

    Bytes that do not fit the encoding are read as Windows-1252 if all of them are valid there, else replaced.
    """
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), None)
    if encoding is None and charset:
        encoding = map_encoding_to_html5(charset, fallback_utf8=False)
    encoding = encoding or detect_encoding(data, from_html_meta=True) or "utf-8"
    return bytes_to_str(data, encoding, errors="replace")


def page_of(html: str, extractor: str, url: str = "") -> Page:
    """Returns the main text of a page.

    Raises:
        PageError: If there is none, or a parser would take minutes for this markup.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    if html.startswith("%PDF-") or html.count("\0") * 1000 > len(html):
        raise PageError(BINARY)
    _check_attributes(html)
    tree = HTMLTree.parse(html)
    _check_depth(html, tree)
    if extractor == "trafilatura":
        import trafilatura

        text = trafilatura.extract(html, url=url or None) or ""
    else:
        text = extract_plain_text(tree, main_content=True, alt_texts=False)
    if not text or text.isspace():
        raise PageError(EMPTY, f"{len(html):,} characters of HTML")
    if fault := unstorable(text):
        raise PageError("not UTF-8", fault)
    return Page(text, url or _own_url(tree), _language(tree))


def fragment_text(html: str) -> str:
    """Returns all text of a part of a page; paragraphs, lists and the lines of code stay apart.

    Raises:
        PageError: If a parser would take minutes for this markup.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    _check_attributes(html)
    tree = HTMLTree.parse(html)
    _check_depth(html, tree)
    return extract_plain_text(tree, main_content=False, alt_texts=False).strip("\n")


def counted_under(source: str, page: Page, count_by: str) -> str:
    """Returns the source that a page is counted under: `source` itself, its site or its language."""
    if count_by == "site":
        return site(page.url)
    return page.language if count_by == "language" else source


def known_of(page: Page, date: str = "") -> dict[str, str | None]:
    """Returns the metadata of a page: its address, its date, and the language that it declares, as ISO 639-1 has it."""
    code = _TWO_LETTERS.get(page.language, page.language)
    return {"url": page.url or None, "date": date or None, "language": code if code != UNKNOWN else None}


def site(url: str) -> str:
    """Returns the host name of an address, in lower case."""
    try:
        return printable(urlsplit(url).hostname or UNKNOWN)[:255]
    except ValueError:
        return UNKNOWN


def language_code(value: str | None) -> str:
    """Returns the language of a tag such as "en-GB": its first part, in lower case."""
    code = re.split(r"[-_,;\s]", (value or "").strip(), maxsplit=1)[0].lower()
    return code if re.fullmatch(r"[a-z]{2,8}", code) else UNKNOWN


def cleaned_url(url: str | None) -> str:
    """Returns an address without spaces and control characters; empty if it is none, or too long."""
    url = re.sub(r"[\x00-\x20\x7f-\xa0]+", "", url or "")
    return url if len(url) <= _LONGEST_URL and not unstorable(url) else ""


def _language(tree: Any) -> str:
    root = tree.document.query_selector("html")
    return language_code(root.getattr("lang") or root.getattr("xml:lang")) if root is not None else UNKNOWN


def _own_url(tree: Any) -> str:
    """Returns the address that a page declares as its own."""
    for selector, attribute in (('link[rel="canonical"]', "href"), ('meta[property="og:url"]', "content")):
        node = tree.document.query_selector(selector)
        if node is not None and (url := cleaned_url(node.getattr(attribute))).startswith(("http:", "https:")):
            return url
    return ""


def _check_depth(html: str, tree: Any) -> None:
    """Raises a PageError for elements in too many levels: the time of a text grows with the square of the depth."""
    if sum(1 for _ in _BLOCKS.finditer(html)) <= _FEW:
        return
    node, depth = tree.document.first_element_child, 1
    while node is not None:
        if (below := node.first_element_child) is not None:
            node, depth = below, depth + 1
            if depth > _DEEPEST:
                raise PageError(NESTED, f"more than {_DEEPEST:,} levels")
            continue
        while node is not None and (beside := node.next_element) is None:
            node, depth = node.parent, depth - 1
        node = beside if node is not None else None


def _check_attributes(html: str) -> None:
    """Raises a PageError for a tag with thousands of attributes."""
    if len(html) <= _SMALL:
        return
    at = 0
    while found := _TAG.search(html, at):
        at, name, attributes = found.end(), found[1], found[2] or ""
        if len(attributes) > 2 * _ATTRIBUTES and sum(1 for _ in _ONE.finditer(attributes)) > _ATTRIBUTES:
            raise PageError(FLOOD, f"more than {_ATTRIBUTES:,}")
        if close := _COMMENT_END if name is None else _RAW.get(name.lower()):
            end = close.search(html, at)
            at = end.start() if end else len(html)
