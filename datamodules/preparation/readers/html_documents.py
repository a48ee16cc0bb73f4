"""Reads documents from HTML files: the main text of each page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.contracts import Reject
from core.technique import technique
from datamodules.preparation.readers import web_pages
from datamodules.preparation.readers.compressed_files import (
    codec_of,
    decompressed,
    rejecting_broken,
    with_codecs,
)
from datamodules.preparation.readers.file_reader import FileReader, Row
from datamodules.preparation.readers.opened_files import opened
from datamodules.preparation.readers.source_files import Piece, SourceFiles, whole_files
from datamodules.preparation.readers.web_pages import CountBy, Extractor, PageError

TOO_LONG = "a page of more than max_page_bytes"


@technique(
    paper="resiliparse: Bevendorff et al., ECIR 2018, doi:10.1007/978-3-319-76941-7_83; trafilatura: Barbaresi, ACL 2021, "
    "doi:10.18653/v1/2021.acl-demo.15; compared in DataComp-LM, arXiv:2406.11794, section 4.2",
    needs=[web_pages.PACKAGES["resiliparse"]],
)
class HTMLDocuments(FileReader):
    """Reads .html and .htm files, plain, gzip (.gz) or zstd (.zst): the main text of each page is a document.

    Menus, footers and other boilerplate are left out. The encoding is that of the byte order mark, of the page's
    `meta`, or detected from its bytes. A document's id is the name of the file, and after a space the page's own
    address (canonical link, `og:url`) if it names one; that and its language are its metadata. Pages without main
    text, and pages that a parser would take minutes for (1,000 levels of blocks, 5,000 attributes of a tag), are
    rejected with the reason, and so are files that cannot be read.

    Args:
        source: A path, a folder, or a glob.
        extractor: What finds the main text: "resiliparse" takes about 1 ms for a page; "trafilatura" 10 to 30 times
            as long, and leaves out more.
        count_by: What the report counts a document under: "file", the folder of its file, as for other readers;
            "site", the host name of its address; "language", which its `html` element declares.
        max_page_bytes: Longest page, in bytes after decompression; longer ones are rejected.

    Raises:
        ConfigError: If there is no such file, an argument is out of range, or a package is missing.

    Example:
        data:
          init_args:
            reader: {class_path: HTMLDocuments, init_args: {extractor: resiliparse}}
    """

    metadata = ("url", "language")

    def __init__(
        self,
        source: str,
        extractor: Extractor = "resiliparse",
        count_by: CountBy = "file",
        max_page_bytes: int = 1 << 22,
    ) -> None:
        web_pages.check("HTMLDocuments", extractor, count_by, max_page_bytes)
        self.extractor, self.count_by, self.max_page_bytes = extractor, count_by, max_page_bytes
        self.files = SourceFiles(source, with_codecs(".html", ".htm"))

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
        """Yields the page of a file."""
        path, data = Path(piece["path"]), None
        source, name = self.files.source_of(path), self.files.name(path)
        with rejecting_broken(path, source, reject):
            data = self._content(path)
        if data is None:
            return
        try:
            if len(data) > self.max_page_bytes:
                raise PageError(TOO_LONG, f"{self.max_page_bytes:,} bytes")
            page = web_pages.page_of(web_pages.decoded(data), self.extractor)
        except PageError as error:
            reject(source, str(path), error.reason, error.details)
            return
        counted = web_pages.counted_under(source, page, self.count_by)
        yield page.text, counted, f"{name} {page.url}".rstrip(), web_pages.known_of(page)

    def _content(self, path: Path) -> bytes:
        """Returns the content of a file, or the begin of one that is too long."""
        codec, most = codec_of(path), self.max_page_bytes + 1
        if codec is None:
            with opened(path) as stream:
                return stream.read(most)  # type: ignore[no-any-return]
        blocks, size = [], 0
        for block in decompressed(path, codec):
            blocks.append(block)
            size += len(block)
            if size >= most:
                break
        return b"".join(blocks)
