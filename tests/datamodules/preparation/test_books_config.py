"""configs/data/books.yaml and gutenberg.yaml on a few books and PDF files: copies and other languages go, encrypted books are counted."""

import json
import random

import pytest

from core.__main__ import main
from datamodules.preparation.readers import epub_documents, gutenberg_texts, pdf_documents
from tests.support.books import ENCRYPTED, epub, lines, pdf
from tests.support.quality_corpus import prose

pytestmark = pytest.mark.ci

FRENCH = (
    "Le chat dort sur la chaise pendant que les enfants jouent dans le jardin avec leurs amis. Il fait beau. "
    * 5
)


def text(seed):
    draw = random.Random(seed)
    return "\n".join(prose(draw, words=120, odd=0.0) for _ in range(3))


def report_of(source, folder, *words, config="data/books"):
    command = ["prepare", "--config", config, f"--data.source={source}", f"--output={folder}"]
    assert main([*command, "--data.tokenizer.vocab_size=400", *words]) == 0
    report = json.loads((folder / "report.json").read_text())
    return report["rejected"], {
        name.partition(". ")[2]: sum(n.values()) for name, n in report["dropped"].items()
    }


def test_books(tmp_path):
    good = [text(seed) for seed in range(40)]
    for number, chapter in enumerate([*good, good[1], FRENCH]):
        epub(tmp_path / "in" / f"{number:02}.epub", [chapter])
    name = epub_documents._ENCRYPTION
    epub(tmp_path / "in" / "x.epub", ["?"], {name: ENCRYPTED.format("OEBPS/text/c%200.xhtml")})
    rejected, dropped = report_of(tmp_path / "in", tmp_path / "out")
    assert rejected == {epub_documents.ENCRYPTED: 1}
    assert (dropped["LanguageFilter"], dropped["ExactDuplicates"]) == (1, 1)


def test_pdf_files(tmp_path):
    (tmp_path / "in").mkdir()
    good = [text(seed) for seed in range(40)]
    for number, one in enumerate([*good, good[1], ""]):
        (tmp_path / "in" / f"{number:02}.pdf").write_bytes(pdf([lines(part) for part in one.split("\n")]))
    rejected, dropped = report_of(tmp_path / "in", tmp_path / "out", "--data.reader=PDFDocuments")
    assert rejected == {pdf_documents.SCAN: 1}
    assert dropped["ExactDuplicates"] == 1


def test_gutenberg(tmp_path):
    (tmp_path / "in").mkdir()
    good = [text(seed) for seed in range(40)]
    for number, one in enumerate([*good, good[1], FRENCH]):
        mark = "*** {} OF THE PROJECT GUTENBERG EBOOK ***"
        content = f"Title: T\n\n{mark.format('START')}\n{one}\n{mark.format('END')}\nlicense\n"
        (tmp_path / "in" / f"{number}-0.txt").write_text(content)
    (tmp_path / "in" / "readme.txt").write_text("No book.")
    rejected, dropped = report_of(tmp_path / "in", tmp_path / "out", config="data/gutenberg")
    assert rejected == {gutenberg_texts.UNMARKED: 1}
    assert (dropped["LanguageFilter"], dropped["ExactDuplicates"]) == (1, 1)
