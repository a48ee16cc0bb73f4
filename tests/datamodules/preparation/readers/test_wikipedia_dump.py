"""Dumps of MediaWiki: which pages are read, their plain text, broken dumps, and dumps made to do harm."""

import bz2
import gzip
import json
import time
import tracemalloc

import pytest
import zstandard

from core.errors import ConfigError
from core.technique import Package
from datamodules.preparation.readers import source_files, web_pages, wikipedia_dump
from datamodules.preparation.readers.wikipedia_dump import WikipediaDump, plain_text
from tests.support.corpus import rows_of, texts, texts_of
from tests.support.restarts_of_preparation import ends_in_the_same_bytes
from tests.support.wiki import dump, wiki_page

pytest.importorskip("mwparserfromhell")

PACK = {"xml": bytes, "bz2": bz2.compress, "gz": gzip.compress, "zst": zstandard.compress}
TEXTS = texts(40)
PAGES = [wiki_page(number, f"Title {number}", text) for number, text in enumerate(TEXTS)]


def write(path, pages, cut=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PACK[path.suffix[1:]](dump(pages).encode())[:cut])
    return path


def reasons(path, **options):
    rejects = []
    texts_of(WikipediaDump(str(path), **options), rejects)
    return [reject[2] for reject in rejects]


@pytest.mark.parametrize(
    "name", ["a.xml", "a.xml.bz2", "a.xml.gz", "a.xml.zst", "pages-articles1.xml-p1p40.bz2"]
)
def test_articles_are_read_in_order_and_named(tmp_path, name):
    rows, _ = rows_of(WikipediaDump(str(write(tmp_path / name, PAGES))))
    assert [row["text"] for row in rows] == TEXTS
    assert rows[3]["id"] == f"{name}:3 2024-01-02T03:04:05Z Title 3"


def test_streams_behind_each_other_are_one_dump(tmp_path):
    data = dump(PAGES).encode()
    half = data.index(b"<page>", len(data) // 2)
    (tmp_path / "a.xml.bz2").write_bytes(bz2.compress(data[:half]) + bz2.compress(data[half:]))
    assert texts_of(WikipediaDump(str(tmp_path))) == TEXTS


def test_wikitext_becomes_plain_text():
    wikitext = """{{Infobox|a=b|c=[[x]]}}'''Ada''' was an [[England|English]] [[mathematician]].<ref name="x">A {{cite}}</ref>
== Life ==
[[File:a.jpg|thumb|A caption with [[links]]]]
{| class="wikitable"
| a || b
|}
See [http://a.b their site]&nbsp;now<!-- hidden -->, <math>x^2</math> too.
[[Category:People]] [[Datei:b.jpg]]"""
    plain = plain_text(wikitext, ("file:", "category:", "datei:"))
    assert plain == "Ada was an English mathematician.\nLife\n\nSee their site\xa0now,  too."


def test_redirects_and_other_namespaces_are_skipped_and_others_rejected(tmp_path):
    pages = [
        wiki_page(1, "A", "Words of A."),
        wiki_page(2, "B", "#REDIRECT [[A]]", redirect="A"),
        wiki_page(3, "Talk:A", "Words of a talk.", namespace=1),
        wiki_page(4, "C", "{{only|a=template}}"),
        wiki_page(5, "D", "x" * 5000),
        wiki_page(6, "E", "{}", model="json"),
        wiki_page(7, "F", "[http://a " * 2000),
        wiki_page(8, "G", "Words of G.\n[[Datei:x.jpg]]"),
    ]
    path = write(tmp_path / "a.xml", pages)
    rejects = []
    options = {"max_page_bytes": 4000}
    assert texts_of(WikipediaDump(str(path), **options), rejects) == ["Words of A.", "Words of G."]
    assert [(reject[1].removeprefix(f"{path}, "), reject[2]) for reject in rejects] == [
        ("page 4", web_pages.EMPTY),
        ("page 5", wikipedia_dump.TOO_LONG),
        ("page 6", wikipedia_dump.MODEL),
        ("page 7", wikipedia_dump.TOO_LONG),
    ]
    assert reasons(path)[-1] == wikipedia_dump.UNCLOSED
    assert texts_of(WikipediaDump(str(path), namespaces=(1,))) == ["Words of a talk."]


@pytest.mark.parametrize("name", ["a.xml", pytest.param("a.xml.bz2", marks=pytest.mark.ci)])
def test_a_truncated_dump_is_kept_up_to_the_damage(tmp_path, name):
    many = [wiki_page(number, "T", text * 40) for number, text in enumerate(texts(400))]
    path = write(tmp_path / name, many)
    write(path, many, path.stat().st_size // 2)
    found, rejects = [], []
    found = texts_of(WikipediaDump(str(path)), rejects)
    assert found == [text * 40 for text in texts(400)][: len(found)]
    assert len(found) > 50 if name == "a.xml" else rejects
    assert [reject[2] for reject in rejects] == [
        wikipedia_dump.BROKEN if name == "a.xml" else "broken bz2 file"
    ]


HARM = {
    "entities": '<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><mediawiki>&b;</mediawiki>',
    "files": '<!DOCTYPE a SYSTEM "file:///etc/passwd"><mediawiki/>',
    "levels": "<a>" * 1000,
    "an endless tag": "<mediawiki " + "a" * (40 << 20),
    "no XML": "no XML at all",
}


@pytest.mark.parametrize("name", HARM)
def test_what_no_dump_has_is_refused(tmp_path, name):
    (tmp_path / "a.xml.bz2").write_bytes(bz2.compress(HARM[name].encode()))
    assert reasons(tmp_path / "a.xml.bz2") == [wikipedia_dump.BROKEN]


def test_long_pages_take_no_memory(tmp_path):
    head, tail = dump(["@"]).split("@")
    page = wiki_page(1, "T", "@").replace("@", "word " * (20 << 20))
    (tmp_path / "a.xml.gz").write_bytes(gzip.compress((head + page + tail).encode(), 1))
    del page
    tracemalloc.start()
    assert reasons(tmp_path / "a.xml.gz") == [wikipedia_dump.TOO_LONG]
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("wikitext", ["{|\n", "<div>", "[http://a ", "<ref>"])
def test_what_would_take_minutes_is_rejected_at_once(tmp_path, wikitext):
    begin = time.process_time()
    path = write(tmp_path / "a.xml", [wiki_page(1, "T", wikitext * 20_000)])
    assert reasons(path) == [wikipedia_dump.UNCLOSED]
    assert time.process_time() - begin < 5


def test_mistakes_are_named(tmp_path, monkeypatch):
    write(tmp_path / "a.xml", PAGES)
    with pytest.raises(ConfigError, match="namespaces names at least one"):
        WikipediaDump(str(tmp_path), namespaces=())
    monkeypatch.setattr(wikipedia_dump, "MWPARSERFROMHELL", Package("no-such-package>=1", extra="web"))
    with pytest.raises(ConfigError, match=r"no-such-package is not installed: pip install 'leyden\[web\]'"):
        WikipediaDump(str(tmp_path))


@pytest.mark.ci
def test_workers_and_kills_change_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 1000)
    for number in range(10):
        empty = wiki_page(99, "Empty", "{{x}}")
        write(tmp_path / "in" / f"{number}.xml.bz2", [*PAGES[number * 4 : number * 4 + 4], empty])
    assert len(WikipediaDump(str(tmp_path / "in")).tasks()) > 3
    options = {"reader": WikipediaDump, "max_reject_fraction": 0.5}
    out = ends_in_the_same_bytes(tmp_path / "in", tmp_path / "out", **options)
    assert json.loads((out / "manifest.json").read_text())["rejected"] == {web_pages.EMPTY: 10}
