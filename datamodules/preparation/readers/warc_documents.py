"""Reads documents from web archives: the main text of the pages, or the text of WET files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.contracts import Reject
from core.technique import Package, technique
from datamodules.preparation.readers import web_pages
from datamodules.preparation.readers.compressed_files import with_codecs
from datamodules.preparation.readers.file_reader import FileReader, Row
from datamodules.preparation.readers.html_documents import TOO_LONG
from datamodules.preparation.readers.source_files import Piece, SourceFiles, whole_files
from datamodules.preparation.readers.warc_records import Record, records
from datamodules.preparation.readers.web_pages import CountBy, Extractor, Page, PageError

FASTWARC = Package("fastwarc>=2", extra="web")
NO_HTTP, REDIRECT, STATUS, OTHER = (
    "no HTTP response",
    "a redirect",
    "an HTTP status other than 200",
    "not HTML",
)
BODY, REVISIT = "broken HTTP body", "a page stored elsewhere (revisit)"
OTHER_PROTOCOL = "no HTTP, such as DNS"

_MOST_HEADERS = 1 << 15
_HEADERS_END = re.compile(rb"\r?\n\r?\n")
_HTML = {"text/html", "application/xhtml+xml"}
_CODINGS = {
    "gzip": "gzip",
    "x-gzip": "gzip",
    "deflate": "deflate",
    "br": "br",
    "zstd": "zstd",
    "chunked": "chunked",
}


@technique(
    paper="WARC 1.1, ISO 28500:2017, iipc.github.io/warc-specifications; read with FastWARC, arXiv:2112.03103",
    needs=[web_pages.PACKAGES["resiliparse"], FASTWARC],
)
class WARCDocuments(FileReader):
    """Reads web archives, .warc and .wet, plain, gzip (.gz) or zstd (.zst), such as those of Common Crawl.

    A document is the main text of a response record with HTTP status 200 and HTML, or the text of a conversion record
    (WET). Its id is the file, the byte where its record begins (its compressed member), its date and its address.
    Address, date and language are its metadata. Redirects, other statuses, revisits and what is no HTML are skipped, and
    counted by reason. Pages without main text and longer ones are rejected with the reason; so are broken and truncated
    records, with their byte and all bytes up to the next record that can be read, where reading goes on. Headers over
    32 KiB, of a record or of HTTP, records over 256 MiB and files that expand to more than 1,000 times their size are
    rejected before they take memory. A file is one task: use more files than workers.

    Args:
        source: A path, a folder, or a glob.
        extractor: What finds the main text: "resiliparse", or "trafilatura", which is slower and leaves out more.
        count_by: What the report counts a document under: "file", the folder of its file or the begin of its name;
            "site", the host name of its address; "language", which the page or the WET record declares.
        max_page_bytes: Longest page, in bytes without compression; longer ones are rejected.

    Raises:
        ConfigError: If there is no such file, an argument is out of range, or a package is missing.

    Example:
        data:
          init_args:
            reader: {class_path: WARCDocuments, init_args: {count_by: language}}
            max_reject_fraction: 0.5
    """

    skipped = (REDIRECT, STATUS, OTHER, REVISIT, OTHER_PROTOCOL)
    metadata = ("url", "date", "language")

    def __init__(
        self,
        source: str,
        extractor: Extractor = "resiliparse",
        count_by: CountBy = "file",
        max_page_bytes: int = 1 << 22,
    ) -> None:
        web_pages.check("WARCDocuments", extractor, count_by, max_page_bytes)
        web_pages.need("WARCDocuments", FASTWARC)
        self.extractor, self.count_by, self.max_page_bytes = extractor, count_by, max_page_bytes
        self.files = SourceFiles(source, with_codecs(".warc", ".wet"))

    def options(self) -> dict[str, Any]:
        """Returns the arguments, and the versions of the packages."""
        return {
            "extractor": web_pages.described(self.extractor),
            "count_by": self.count_by,
            "max_page_bytes": self.max_page_bytes,
        }

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of files."""
        return self.files.tasks(whole_files)

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the pages of an archive."""
        path = Path(piece["path"])
        name = self.files.name(path)
        source = re.sub(
            r"([-_]\d+)+$", "", self.files.source_of(path)
        )  # CC-MAIN-20240220211055-20240221001055
        for record in records(path, source, self.max_page_bytes + _MOST_HEADERS, reject):
            url = web_pages.cleaned_url(record.headers.get("WARC-Target-URI"))
            try:
                page = self._page(record, url)
            except PageError as error:
                details = " ".join(filter(None, (error.details, url)))
                reject(source, f"{path}, byte {record.at:,}", error.reason, details)
                continue
            if page is not None:
                date = web_pages.cleaned_url(record.headers.get("WARC-Date"))
                row_id = " ".join(filter(None, (f"{name}:{record.at}", date, url)))
                counted = web_pages.counted_under(source, page, self.count_by)
                yield page.text, counted, row_id, web_pages.known_of(page, date)

    def _page(self, record: Record, url: str) -> Page | None:
        """Returns the page of a record; None if it is of a kind that has none.

        Raises:
            PageError: If it is left out.
        """
        if record.kind == "conversion":
            return self._text(record, url)
        if record.kind == "revisit":
            raise PageError(REVISIT)
        if record.kind != "response":
            return None
        kind = record.headers.get("Content-Type") or ""
        if not kind.strip().lower().startswith("application/http"):
            raise PageError(OTHER_PROTOCOL, kind[:80])
        body, headers = _http(record.content)
        charset = _wanted(headers)
        if record.size > len(record.content):
            raise PageError(TOO_LONG, f"{record.size:,} bytes")
        data = self._limited(_body(body, headers, self.max_page_bytes + 1))
        return web_pages.page_of(web_pages.decoded(data, charset), self.extractor, url)

    def _text(self, record: Record, url: str) -> Page:
        """Returns the text of a conversion record, which is UTF-8."""
        try:
            text = self._limited(record.content).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise PageError("not UTF-8", f"byte {error.start:,} of the text") from error
        if not text or text.isspace():
            raise PageError(web_pages.EMPTY)
        code = web_pages.language_code(record.headers.get("WARC-Identified-Content-Language"))
        return Page(text, url, code)

    def _limited(self, data: bytes) -> bytes:
        if len(data) > self.max_page_bytes:
            raise PageError(TOO_LONG, f"{self.max_page_bytes:,} bytes")
        return data


def _http(content: bytes) -> tuple[bytes, Any]:
    """Returns the body and the headers of an HTTP response."""
    from fastwarc.warc import HeaderMap

    headers, end = HeaderMap(), _HEADERS_END.search(content, 0, _MOST_HEADERS)
    if end is None or not content.startswith(b"HTTP/"):
        raise PageError(NO_HTTP, "without headers, or with more than 32 KiB of them")
    head = re.sub(rb"\r?\n", b"\r\n", content[: end.start()])
    try:
        headers.parse(io.BytesIO(head + b"\r\n\r\n"))
    except OSError as error:
        raise PageError(NO_HTTP, str(error)) from error
    return content[end.end() :], headers


def _wanted(headers: Any) -> str | None:
    """Returns the encoding that HTTP declares.

    Raises:
        PageError: If the response is no page.
    """
    status = headers.status_code
    if status is None:
        raise PageError(NO_HTTP, "without a status")
    if status != 200:
        raise PageError(REDIRECT if 300 <= status < 400 else STATUS, str(status))
    kind, _, parameters = (headers.get("Content-Type") or "text/html").partition(";")
    if kind.strip().lower() not in _HTML:
        raise PageError(OTHER, kind.strip()[:80])
    charset = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", parameters, re.I)
    return charset[1] if charset else None


def _body(body: bytes, headers: Any, limit: int) -> bytes:
    """Returns the first bytes of a body, decoded; as it is where the headers name a coding that it has not."""
    named = ",".join(
        filter(None, (headers.get("Content-Encoding"), headers.get("Transfer-Encoding")))
    ).lower()
    codings = [_CODINGS[name] for part in named.split(",") if (name := part.strip()) in _CODINGS]
    for coding in reversed(codings[-3:]):
        if _has(coding, body):
            try:
                body = _reader(coding, io.BytesIO(body)).read(max(limit, 1 << 22))
            except (OSError, ValueError, RuntimeError) as error:
                raise PageError(BODY, f"{coding}: {str(error)[:200]}") from error
    return body[:limit]


def _has(coding: str, body: bytes) -> bool:
    """Returns whether a body may be in a coding: crawlers store some decoded, and keep the header."""
    if coding == "gzip":
        return body.startswith(b"\x1f\x8b")
    if coding == "zstd":
        return body.startswith(b"\x28\xb5\x2f\xfd")
    if coding == "chunked":
        return re.match(rb"[0-9a-fA-F]{1,8}[ \t]*(;[^\r\n]{0,200})?\r\n", body) is not None
    return not body.lstrip()[:1].startswith(b"<")


def _reader(coding: str, body: io.BytesIO) -> Any:
    from fastwarc import stream_io

    if coding == "deflate":
        return stream_io.GzipReader(body, zlib=True)
    kinds = {"gzip": "GzipReader", "zstd": "ZstdReader", "br": "BrotliReader", "chunked": "ChunkedReader"}
    return getattr(stream_io, kinds[coding])(body)
