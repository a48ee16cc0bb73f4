"""EPUB books: reading order, XHTML, what is known of a book, and books that are rejected."""

import json
import zipfile

import pytest

from core.errors import ConfigError
from datamodules.preparation.readers import epub_documents, source_files
from datamodules.preparation.readers.epub_documents import EPUBDocuments
from tests.support.books import CONTAINER, ENCRYPTED, epub, package, write_zip, xhtml
from tests.support.corpus import rows_of, texts, texts_of
from tests.support.restarts_of_preparation import ends_in_the_same_bytes

pytest.importorskip("resiliparse")

BOMB = "<p>" + "a" * 1000 + "</p>"


def test_chapters_come_in_the_order_of_the_spine(tmp_path):
    epub(tmp_path / "a.epub", ["one", "two", "three"], spine=["c2", "c0", "c1", "c2", "nobody"])
    rows, _ = rows_of(EPUBDocuments(str(tmp_path)))
    assert [(row["text"], row["id"]) for row in rows] == [("2\n\nthree\n\n0\n\none\n\n1\n\ntwo", "a.epub")]
    known = {key: rows[0][key] for key in EPUBDocuments.metadata}
    assert known == {
        "title": "A Title", "author": "Ann A., Bob B.", "language": "en", "date": "1897-05-26", "identifier": "urn:x:1",
    }  # fmt: skip


def test_a_chapter_is_a_document_if_asked(tmp_path):
    epub(tmp_path / "a.epub", ["one", "two"])
    rows, _ = rows_of(EPUBDocuments(str(tmp_path), unit="chapter"))
    assert [(row["text"], row["id"], row["title"]) for row in rows] == [
        ("0\n\none", "a.epub:1", "A Title"), ("1\n\ntwo", "a.epub:2", "A Title")]  # fmt: skip


def test_nothing_known_is_null_and_books_in_a_folder_are_one_source(tmp_path):
    for name in "ab":
        epub(
            tmp_path / f"{name}.epub", ["one"], metadata="<dc:language>!</dc:language><dc:date>May</dc:date>"
        )
    rows, _ = rows_of(EPUBDocuments(str(tmp_path)))
    assert {row["source"] for row in rows} == {tmp_path.name}
    assert {row[key] for row in rows for key in EPUBDocuments.metadata} == {None}


def test_xhtml_is_read_as_xhtml(tmp_path):
    head = '<title/><script src="a>b.js"/><style/>'
    page = xhtml('<p>Fish &amp; chips,<br/>na\u00efve<a id="x"/></p><hr/><div/><p>end</p>', head)
    files = {
        "META-INF/container.xml": CONTAINER.format("b.opf"),
        "b.opf": package([("n", "n.xhtml", "nav"), ("a", "./x/../a.xhtml#top", ""), ("b", "b.html", "")]),
        "n.xhtml": xhtml("<p>Contents</p>"),
        "a.xhtml": page,
        "b.html": xhtml("<p>gro\u00df</p>").replace("utf-8", "iso-8859-1").encode("latin1"),
    }
    write_zip(tmp_path / "a.epub", files)
    (text,) = texts_of(EPUBDocuments(str(tmp_path)))
    assert text.split() == ["Fish", "&", "chips,", "na\u00efve", "end", "gro\u00df"]


def rejected(tmp_path, **options):
    rejects = []
    assert texts_of(EPUBDocuments(str(tmp_path), **options), rejects) == ["0\n\nIt stays."]
    assert all(len(reject[3]) < 1000 for reject in rejects)
    return [reject[2] for reject in rejects]


def files_of(**changes):
    """A book whose files are changed: None leaves one out."""
    names = {"container": "META-INF/container.xml", "package": "b.opf", "chapter": "a.xhtml"}
    content = {
        "container": CONTAINER.format("b.opf"),
        "package": package([("a", "a.xhtml", "")]),
        "chapter": xhtml("x"),
    }
    return {names[key]: value for key, value in (content | changes).items() if value is not None}


LAUGHS = (
    '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]>'
    + package([("a", "a.xhtml", "")])[21:]
)

BAD = {
    "no container": (files_of(container=None), epub_documents.NO_BOOK),
    "broken container": (files_of(container="<container>"), epub_documents.NO_BOOK),
    "an empty container": (files_of(container=""), epub_documents.NO_BOOK),
    "no package": (files_of(package=None), epub_documents.NO_BOOK),
    "a package outside": (files_of(container=CONTAINER.format("../b.opf")), epub_documents.NO_BOOK),
    "entities": (files_of(package=LAUGHS), epub_documents.NO_BOOK),
    "an outer entity": (
        files_of(container='<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>'),
        epub_documents.NO_BOOK,
    ),
    "pictures alone": (files_of(package=package([])), epub_documents.NO_BOOK),
    "an unknown encoding": (files_of(container='<?xml version="1.0" encoding="x-none"?><x/>'), epub_documents.NO_BOOK),
    "no chapter": (files_of(chapter=None), "a book that lacks a chapter"),
    "a chapter outside": (files_of(package=package([("a", "../../etc/passwd", "")])), "a book that lacks a chapter"),
    "no text": (files_of(chapter=xhtml("<img src='a.png'/>")), epub_documents.EMPTY),
    "nested": (files_of(chapter=xhtml("<div>" * 50_000)), "markup nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_book_is_rejected(tmp_path, name):
    files, reason = BAD[name]
    write_zip(tmp_path / "a.epub", files)
    epub(tmp_path / "b.epub", ["It stays."])
    assert rejected(tmp_path) == [reason]


def test_encrypted_chapters_are_rejected_encrypted_fonts_are_not(tmp_path):
    name = epub_documents._ENCRYPTION
    epub(tmp_path / "a.epub", ["secret"], {name: ENCRYPTED.format("OEBPS/text/c%200.xhtml")})
    epub(tmp_path / "b.epub", ["It stays."], {name: ENCRYPTED.format("OEBPS/font.ttf")})
    assert rejected(tmp_path) == [epub_documents.ENCRYPTED]


def test_broken_archives_are_rejected(tmp_path):
    epub(tmp_path / "b.epub", ["It stays."])
    whole = (tmp_path / "b.epub").read_bytes()
    (tmp_path / "a.epub").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.epub").write_bytes(b"")
    damaged = bytearray(epub(tmp_path / "d.epub", ["word " * 1000]).read_bytes())
    with zipfile.ZipFile(tmp_path / "d.epub") as archive:
        at = archive.infolist()[-1].header_offset
    damaged[at + 60 : at + 64] = b"\xff" * 4
    (tmp_path / "d.epub").write_bytes(damaged)
    assert rejected(tmp_path) == ["broken zip file"] * 3


def test_bombs_and_long_books_are_rejected(tmp_path):
    epub(tmp_path / "a.epub", [BOMB * 20])
    epub(tmp_path / "b.epub", ["It stays."])
    epub(tmp_path / "c.epub", [BOMB * 6] * 3)  # each is below the limit
    assert rejected(tmp_path, max_book_bytes=15_000) == [epub_documents.TOO_LONG] * 2


def test_tags_without_end_take_no_time():
    for page in ("<a" * 200_000, "<a b='" * 100_000, "<a " + "/" * 400_000, "<a b=\"'" * 100_000):
        assert epub_documents._as_html(page.encode()) == page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "chapters"}, "Did you mean chapter"),
        ({"max_book_bytes": 0}, "max_book_bytes is 0; it is at least 1"),
    ],
)
def test_mistakes_are_named(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        EPUBDocuments(str(tmp_path), **options)


@pytest.mark.ci
def test_workers_and_kills_change_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 2000)
    for number, text in enumerate(texts(40)):
        epub(tmp_path / "in" / f"{number}.epub", [text] if number % 10 else [""], metadata="")
    (tmp_path / "in" / "10.epub").write_bytes(b"PK")
    options = {"reader": EPUBDocuments, "max_reject_fraction": 0.9}
    out = ends_in_the_same_bytes(tmp_path / "in", tmp_path / "out", kills=2, **options)
    assert json.loads((out / "manifest.json").read_text())["rejected"] == {"broken zip file": 1}
