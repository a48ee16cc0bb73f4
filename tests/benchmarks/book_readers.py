"""Prints how fast EPUBDocuments, PDFDocuments and GutenbergTexts read, on one core, and pypdf beside PDFium.

    pip install pypdf
    python -m tests.benchmarks.book_readers --books 60

Books are drawn: 25 chapters of 12 kB, or 100 pages of 45 lines. PDFium and pypdf run interleaved, on the same files.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from core.contracts import raise_reject
from datamodules.preparation.readers.epub_documents import EPUBDocuments
from datamodules.preparation.readers.file_reader import FileReader
from datamodules.preparation.readers.gutenberg_texts import GutenbergTexts
from datamodules.preparation.readers.pdf_documents import PDFDocuments
from tests.support.books import epub, lines, pdf


def main() -> None:
    """Writes books in each format, reads them three times and prints the median."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--books", type=int, default=60)
    books = parser.parse_args().books
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("epub", "pdf", "txt"):
            (folder / kind).mkdir()
        for number in range(books):
            write(folder, number)
        print(
            "| reader | files, MB | text, MB | s | MB/s of files | MB/s of text |\n|---|---|---|---|---|---|"
        )
        found: dict[str, list[tuple[float, int]]] = {}
        ways: dict[str, tuple[str, Callable[[Path], int]]] = {
            "EPUBDocuments": ("epub", lambda path: read(EPUBDocuments(str(path)))),
            "PDFDocuments": ("pdf", lambda path: read(PDFDocuments(str(path)))),
            "pypdf": ("pdf", read_with_pypdf),
            "GutenbergTexts": ("txt", lambda path: read(GutenbergTexts(str(path)))),
        }
        for _ in range(3):
            for way, (kind, function) in ways.items():
                begin = time.perf_counter()
                text = function(folder / kind)
                found.setdefault(way, []).append((time.perf_counter() - begin, text))
        for way, (kind, _) in ways.items():
            seconds, text = sorted(found[way])[1]
            size = sum(path.stat().st_size for path in (folder / kind).iterdir()) / 1e6
            print(
                f"| {way} | {size:.1f} | {text / 1e6:.1f} | {seconds:.2f} | {size / seconds:.1f} | {text / 1e6 / seconds:.1f} |"
            )


def write(folder: Path, number: int) -> None:
    """Writes a book in each format."""
    draw = random.Random(number)
    vocabulary = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(3000)]
    rows = [" ".join(draw.choices(vocabulary, k=12)) for _ in range(4500)]
    epub(folder / f"epub/{number}.epub", ["</p><p>".join(rows[at : at + 180]) for at in range(0, 4500, 180)])
    pages = [lines(*rows[at : at + 45]) for at in range(0, 4500, 45)]
    (folder / f"pdf/{number}.pdf").write_bytes(pdf(pages, compress=True))
    marks = [f"*** {word} OF THE PROJECT GUTENBERG EBOOK ***" for word in ("START", "END")]
    (folder / f"txt/{number}-0.txt").write_text("\n".join(["Title: T", marks[0], *rows, marks[1]]))


def read(reader: FileReader) -> int:
    """Returns the characters of all documents."""
    batches = (batch for task in reader.tasks() for batch in reader.read(task, raise_reject))
    return sum(len(text) for batch in batches for text in batch["text"].to_pylist())


def read_with_pypdf(folder: Path) -> int:
    """Returns the characters that pypdf finds."""
    from pypdf import PdfReader

    files = (PdfReader(path) for path in sorted(folder.iterdir()))
    return sum(len(page.extract_text()) for file in files for page in file.pages)


if __name__ == "__main__":
    main()
