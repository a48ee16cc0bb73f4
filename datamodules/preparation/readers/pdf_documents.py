"""Reads documents from PDF files: the text that they show."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow

from core.contracts import Reject
from core.errors import ConfigError, nearest
from core.technique import Package, technique
from datamodules.preparation.readers import pdf_process
from datamodules.preparation.readers.file_reader import FileReader, Row, batches
from datamodules.preparation.readers.opened_files import unstorable
from datamodules.preparation.readers.source_files import Piece, SourceFiles, whole_files
from datamodules.preparation.readers.web_pages import need

PYPDFIUM2 = Package("pypdfium2>=5", extra="books")
Unit = Literal["file", "page"]

SCAN, CRASHED = "a PDF without text, as scans are", "a PDF that crashes the parser"
SLOW = "a PDF that takes more than max_seconds"

_MEMORY = 1 << 31
"""Bytes of addresses that the parser's process may take; usual files need less than 200 MB."""

_LIGATURES = {
    0xFB00: "ff",
    0xFB01: "fi",
    0xFB02: "fl",
    0xFB03: "ffi",
    0xFB04: "ffl",
    0xFB05: "st",
    0xFB06: "st",
}
_HYPHEN = re.compile(r"[\x02\ufffe]\n?")  # what PDFium makes of a hyphen at the end of a line
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffe\uffff]")


@technique(
    paper="ISO 32000-2; read with PDFium, the parser of Chromium, by pypdfium2",
    needs=[PYPDFIUM2],
)
class PDFDocuments(FileReader):
    """Reads the text of PDF files: a file is a document, or a page.

    Lines stay as they are on the page, columns one after the other as the file has them; words that are hyphenated at
    the end of a line are joined, ligatures become letters. Headers, footers and page numbers stay. The title and author
    that a file names are often wrong and are not used. Scans without text, encrypted, broken and too long files are
    rejected with the reason. The parser runs in a process of its own, with 2 GiB of memory: a file that crashes it, or
    takes it more than `max_seconds` of CPU time, is rejected, and reading goes on with the next.

    Args:
        source: A path, a folder, or a glob.
        unit: What a document is: "file", or "page", whose number follows the file in its id.
        max_pages: Pages of a file that is read, at most.
        max_text_bytes: Longest text of a file, in characters.
        max_seconds: CPU seconds for a file, at most; usual files take less than one.

    Raises:
        ConfigError: If there is no such file, an argument is out of range, or the package is missing.

    Example:
        data:
          init_args:
            reader: {class_path: PDFDocuments, init_args: {unit: file}}
    """

    def __init__(
        self,
        source: str,
        unit: Unit = "file",
        max_pages: int = 10_000,
        max_text_bytes: int = 1 << 26,
        max_seconds: int = 120,
    ) -> None:
        if unit not in (units := get_args(Unit)):
            raise ConfigError(
                f"PDFDocuments: unit={unit!r} is none of {', '.join(units)}.{nearest(unit, set(units))}"
            )
        if min(max_pages, max_text_bytes, max_seconds) < 1:
            raise ConfigError("PDFDocuments: max_pages, max_text_bytes and max_seconds are at least 1.")
        need("PDFDocuments", PYPDFIUM2)
        self.unit, self.max_pages, self.max_text_bytes = unit, max_pages, max_text_bytes
        self.max_seconds = max_seconds
        self.files = SourceFiles(source, (".pdf",))

    def options(self) -> dict[str, Any]:
        """Returns the arguments, and the version of the package."""
        names = ("unit", "max_pages", "max_text_bytes", "max_seconds")
        return {name: getattr(self, name) for name in names} | {"parser": version("pypdfium2")}

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of files."""
        return self.files.tasks(whole_files)

    def read(self, task: Mapping[str, Any], reject: Reject) -> Iterator[pyarrow.RecordBatch]:
        """Yields the documents of a task; one process reads its files, unless they crash it."""
        with _Parser(self.max_seconds, self.max_pages, self.max_text_bytes) as parser:
            yield from batches(
                row for piece in self.files.pieces(task, reject) for row in self._rows(piece, reject, parser)
            )

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the text of a file, or its pages."""
        with _Parser(self.max_seconds, self.max_pages, self.max_text_bytes) as parser:
            yield from self._rows(piece, reject, parser)

    def _rows(self, piece: Piece, reject: Reject, parser: _Parser) -> Iterator[Row]:
        path = Path(piece["path"])
        source, name = self.files.source_of(path), self.files.name(path)
        if not self.files.readable(path, reject):
            return
        answer = parser.answer(path)
        pages = [cleaned(page) for page in answer.get("pages", [])]
        if "reason" not in answer and not any(pages):
            answer = {"reason": SCAN, "details": f"{len(pages):,} pages"}
        if "reason" in answer:
            reject(source, str(path), answer["reason"], answer["details"])
        elif self.unit == "file":
            yield "\n\n".join(filter(None, pages)), source, name
        else:
            for number, page in enumerate(pages, 1):
                if page:
                    yield page, source, f"{name}:{number}"


def cleaned(text: str) -> str:
    """Returns the text of a page with hyphenated words joined, ligatures as letters, and no control characters."""
    text = _HYPHEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _CONTROL.sub("", text).translate(_LIGATURES)
    text = "\n".join(line.rstrip() for line in text.split("\n")).strip()
    return text.encode("utf-8", "replace").decode() if unstorable(text) else text


class _Parser:
    """A process that parses files, started again after each one that ends it."""

    def __init__(self, seconds: int, pages: int, characters: int) -> None:
        limits = map(str, (seconds, _MEMORY, pages, characters))
        self._command = [sys.executable, "-P", pdf_process.__file__, *limits]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Parser:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def answer(self, path: Path) -> dict[str, Any]:
        """Returns the pages of a file, or the reason why there are none."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(str(path)).encode() + b"\n")
            process.stdin.flush()
        if (line := process.stdout.readline()).endswith(b"\n"):
            return json.loads(line)  # type: ignore[no-any-return]
        process.communicate()
        self._process, code = None, process.returncode
        if code == -signal.SIGXCPU:
            return {"reason": SLOW, "details": ""}
        return {"reason": CRASHED, "details": f"exit code {code}"}
