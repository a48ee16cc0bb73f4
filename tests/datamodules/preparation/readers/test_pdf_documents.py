"""PDF files: their text, what is rejected, and files that end or hold up the parser's process."""

import os
import random
import signal

import pytest

from core.errors import ConfigError
from datamodules.preparation.readers import pdf_documents, pdf_process, source_files
from datamodules.preparation.readers.pdf_documents import PDFDocuments, cleaned
from tests.support.books import lines, pdf
from tests.support.corpus import rows_of, texts_of
from tests.support.restarts_of_preparation import ends_in_the_same_bytes

pytest.importorskip("pypdfium2")

ENCRYPT = (
    b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <" + b"11" * 32 + b"> /U <" + b"22" * 32 + b"> >> "
    b"/ID [<00> <00>]"
)
STAYS = "It stays."


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.pdf").write_bytes(content)
    return str(folder)


def rejected(folder, **options):
    rejects = []
    assert texts_of(PDFDocuments(folder, **options), rejects) == [STAYS]
    return [reject[2] for reject in rejects]


def test_files_or_pages_are_documents(tmp_path):
    first = lines(
        "The quick brown fox jumps over the", "lazy dog of the neigh-", "bours, na\u00efve (and old)."
    )
    folder = write(
        tmp_path / "x", a=pdf([first, [], lines("Page 2")]), b=pdf([lines("Compressed")], compress=True)
    )
    text = "The quick brown fox jumps over the\nlazy dog of the neighbours, na\u00efve (and old)."
    rows, _ = rows_of(PDFDocuments(folder))
    assert [(row["text"], row["id"], row["source"]) for row in rows] == [
        (f"{text}\n\nPage 2", "a.pdf", "x"), ("Compressed", "b.pdf", "x")]  # fmt: skip
    pages, _ = rows_of(PDFDocuments(folder, unit="page"))
    assert [(row["text"], row["id"]) for row in pages] == [
        (text, "a.pdf:1"), ("Page 2", "a.pdf:3"), ("Compressed", "b.pdf:1")]  # fmt: skip


def test_columns_come_one_after_the_other(tmp_path):
    left = [(50, 740 - 15 * row, f"left {row}") for row in range(5)]
    right = [(320, 740 - 15 * row, f"right {row}") for row in range(5)]
    (text,) = texts_of(PDFDocuments(write(tmp_path, a=pdf([left + right]))))
    assert text.split("\n") == [one[2] for one in left + right]


def test_ligatures_hyphens_and_control_characters():
    assert cleaned("e\ufb03cient \ufb01le \r\nwell-known hyphen\x02\r\nated\ufffe word\0s ") == (
        "efficient file\nwell-known hyphenated words"
    )
    assert cleaned("a\ud800b") == "a?b"


def test_what_has_no_text_is_rejected_with_the_reason(tmp_path):
    whole = pdf([lines(STAYS)])
    folder = write(
        tmp_path,
        a=pdf([b"0 0 100 100 re f", []]),
        b=whole,
        c=whole[:200],
        d=b"",
        e=b"%PDF-1.7\n" + random.Random(0).randbytes(10_000),
        f=whole.replace(b"/Root 1 0 R", b"/Root 1 0 R " + ENCRYPT),
        g=pdf([lines("x")] * 6),
        h=pdf([lines("word " * 20)] * 4),
    )
    assert rejected(folder, max_pages=5, max_text_bytes=300) == [
        pdf_documents.SCAN, *[pdf_process.BROKEN] * 3, pdf_process.ENCRYPTED, pdf_process.MANY_PAGES, pdf_process.LONG,
    ]  # fmt: skip


@pytest.mark.ci
def test_a_file_that_takes_too_long_is_rejected_and_the_next_is_read(tmp_path):
    many = b"BT /F1 12 Tf 50 50 Td " + b"(a) Tj 1 0 Td " * 3_000_000 + b"ET"
    folder = write(tmp_path, a=pdf([many], compress=True), b=pdf([lines(STAYS)]))
    assert rejected(folder, max_seconds=1) == [pdf_documents.SLOW]


@pytest.mark.ci
def test_a_bomb_ends_the_parser_s_process_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(pdf_documents, "_MEMORY", 1 << 28)
    folder = write(tmp_path, a=pdf([b" " * (300 << 20)], compress=True), b=pdf([lines(STAYS)]))
    assert len(rejected(folder)) == 1


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_crash_of_the_parser_is_one_rejected_file(tmp_path, number):
    folder = write(tmp_path, a=pdf([lines("x")]), b=pdf([lines(STAYS)]))
    reader, rejects = PDFDocuments(folder), []
    with pdf_documents._Parser(9, 9, 999) as parser:
        assert parser.answer(tmp_path / "a.pdf")["pages"] == ["x"]
        os.kill(parser._process.pid, number)
        parser._process.wait()
        pieces = reader.tasks()[0]["pieces"]
        rows = [
            row
            for piece in pieces
            for row in reader._rows(piece, lambda *reject: rejects.append(reject), parser)
        ]
    assert [row[0] for row in rows] == [STAYS]
    assert [reject[2:] for reject in rejects] == [(pdf_documents.CRASHED, f"exit code {-number}")]


@pytest.mark.ci
def test_damaged_files_never_end_a_run(tmp_path):
    draw, whole = random.Random(0), pdf([lines("Some text", "of two lines")] * 3, compress=True)
    (tmp_path / "in").mkdir()
    for number in range(150):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        (tmp_path / "in" / f"{number:03}.pdf").write_bytes(
            damaged[: draw.choice([None, None, draw.randrange(len(whole))])]
        )
    rejects = []
    reader = PDFDocuments(str(tmp_path / "in"))
    found = rows_of(reader, rejects)[0]
    assert len(found) + len(rejects) == 150
    assert len(found) > 20 < len(rejects)
    assert found == rows_of(reader, [])[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"unit": "pages"}, "Did you mean page"), ({"max_pages": 0}, "max_seconds are at least 1")],
)
def test_mistakes_are_named(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        PDFDocuments(str(tmp_path), **options)


@pytest.mark.ci
def test_workers_and_kills_change_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 5000)
    words = ["the", "model", "learns", "words", "of", "text"]
    draw = random.Random(0)
    files = {
        f"f{number:02}": pdf([lines(*(" ".join(draw.choices(words, k=9)) for _ in range(9)))] * 2)
        for number in range(12)
    }
    write(tmp_path / "in", **files, scan=pdf([[]]))
    options = {"reader": PDFDocuments, "max_reject_fraction": 0.5}
    ends_in_the_same_bytes(tmp_path / "in", tmp_path / "out", kills=2, **options)
