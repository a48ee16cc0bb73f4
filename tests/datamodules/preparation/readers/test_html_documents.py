"""HTML files: the main text, encodings, what documents are counted under, and pages that are rejected."""

import gzip
import json
import pickle
import time

import pytest
import zstandard

from core.errors import ConfigError
from core.technique import Package
from datamodules.preparation.readers import source_files, web_pages
from datamodules.preparation.readers.html_documents import TOO_LONG, HTMLDocuments
from datamodules.preparation.readers.web_pages import PageError, decoded, language_code, page_of, site
from tests.support.corpus import prepare, rows_of, texts, texts_of
from tests.support.restarts_of_preparation import ends_in_the_same_bytes

resiliparse = pytest.importorskip("resiliparse")

TEXTS = [text.replace("<", "") for text in texts(60)]


def html(text, head="", lang="en"):
    return (
        f'<!doctype html><html lang="{lang}"><head><title>T</title>{head}</head><body><nav><ul><li><a href="/">Home'
        f"</a></li></ul></nav><main><p>{text}</p></main><footer>Imprint</footer></body></html>"
    )


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(
        gzip.compress(data, mtime=0)
        if path.suffix == ".gz"
        else zstandard.compress(data)
        if path.suffix == ".zst"
        else data
    )
    return path


def rejects_of(reader):
    rejects = []
    texts_of(reader, rejects)
    return [(place, reason) for _, place, reason, *_ in rejects]


@pytest.mark.parametrize("extractor", ["resiliparse", "trafilatura"])
def test_the_main_text_of_each_page_is_a_document(tmp_path, extractor):
    pages = [" ".join([f"Paragraph {number} of this page is about many words."] * 20) for number in range(5)]
    for number, suffix in enumerate(["html", "htm", "html.gz", "HTM", "html.zst"]):
        write(tmp_path / f"{number}.{suffix}", html(pages[number]))
    assert texts_of(HTMLDocuments(str(tmp_path), extractor)) == pages


def test_the_text_is_the_library_s(tmp_path):
    page = html("One.</p><ul><li>a</li><li>b</li></ul><p>Two &amp; three.")
    trafilatura = pytest.importorskip("trafilatura")
    from resiliparse.extract.html2text import extract_plain_text

    assert page_of(page, "resiliparse").text == extract_plain_text(page, main_content=True, alt_texts=False)
    assert page_of(page, "trafilatura").text == trafilatura.extract(page)


@pytest.mark.parametrize(
    ("encoding", "charset", "head"),
    [
        ("utf-8", None, ""),
        ("utf-8-sig", "latin1", ""),  # the mark counts more than HTTP
        ("utf-16", None, ""),
        ("cp1251", None, '<meta charset="windows-1251">'),
        ("cp1251", "Windows-1251", '<meta charset="utf-8">'),  # HTTP counts more than the page
        ("koi8-r", None, '<meta http-equiv="Content-Type" content="text/html; charset=koi8-r">'),
        ("cp1251", None, ""),
        ("cp1251", "no such encoding", ""),
    ],
)
def test_the_encoding_is_found(encoding, charset, head):
    words = "Это русский текст, в котором несколько обычных слов. " * 5
    assert words.strip() in page_of(decoded(html(words, head).encode(encoding), charset), "resiliparse").text


def test_bytes_of_no_encoding_are_read_all_the_same():
    assert decoded(b"<p>caf\xe9 \xed\xa0\x80", "utf-8") == "<p>caf\u00e9 \u00ed\u00a0\u20ac"
    assert decoded(b"<p>caf\xe9 \x81", "utf-8") == "<p>caf\ufffd \ufffd"


def test_ids_and_what_documents_are_counted_under(tmp_path):
    link = '<link rel="canonical" href="https://Example.org/a b">'
    write(tmp_path / "blog" / "a.html", html("Some words about it.", link, "en-GB"))
    write(
        tmp_path / "b.html",
        html("Some words about it.", '<meta property="og:url" content="javascript:x">', ""),
    )

    def counted(by):
        rows, _ = rows_of(HTMLDocuments(str(tmp_path), count_by=by))
        assert [row["id"] for row in rows] == ["b.html", "blog/a.html https://Example.org/ab"]
        return [row["source"] for row in rows]

    assert counted("file") == [tmp_path.name, "blog"]
    assert counted("site") == ["unknown", "example.org"]
    assert counted("language") == ["unknown", "en"]


def test_sites_and_languages_of_strange_values():
    assert [language_code(value) for value in ("de-AT", "ZH_hans", "eng, fra", "", None, "<b>", "x" * 99)] == [
        "de", "zh", "eng", *["unknown"] * 4]  # fmt: skip
    assert [site(url) for url in ("http://[::1", "mailto:a@b", "", "http://a.b:99999/x")] == [
        "unknown", "unknown", "unknown", "a.b"]  # fmt: skip


def test_pages_without_text_are_rejected_with_the_reason(tmp_path):
    write(tmp_path / "a.html", "<html><body><script>let x = 1</script></body></html>")
    write(tmp_path / "b.html", b"")
    write(tmp_path / "c.html", b"%PDF-1.7\n")
    write(tmp_path / "d.html", bytes(1000))
    write(tmp_path / "e.html", html("x" * 5000))
    write(tmp_path / "f.html.gz", html("cut")).write_bytes(gzip.compress(html("cut").encode())[:-9])
    write(tmp_path / "g.html", html("It stays."))
    reader = HTMLDocuments(str(tmp_path), max_page_bytes=4000)
    assert rejects_of(reader) == [
        (str(tmp_path / name), reason)
        for name, reason in {
            "a.html": web_pages.EMPTY,
            "b.html": web_pages.EMPTY,
            "c.html": web_pages.BINARY,
            "d.html": web_pages.BINARY,
            "e.html": TOO_LONG,
            "f.html.gz": "broken gzip file",
        }.items()
    ]
    assert texts_of(reader, []) == ["It stays."]
    with pytest.raises(ConfigError, match=r"a.html: no main text"):
        list(reader.documents())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("codec", [pytest.param("gz", marks=pytest.mark.ci), "zst"])
def test_a_decompression_bomb_is_not_unpacked(tmp_path, codec):
    write(tmp_path / f"a.html.{codec}", b" " * (300 << 20))
    assert rejects_of(HTMLDocuments(str(tmp_path))) == [(str(tmp_path / f"a.html.{codec}"), TOO_LONG)]


HOSTILE = {
    "blocks": ("<div>" * 100_000, web_pages.NESTED),
    "blocks that are closed": ("<DIV>" * 50_000 + "</div>" * 50_000, web_pages.NESTED),
    "blocks in tables": ("<article><table><td></article>" * 10_000, web_pages.NESTED),
    "attributes": ("<p " + " ".join(f"a{n}" for n in range(100_000)) + ">x", web_pages.FLOOD),
    "attributes of a script": (
        "<script " + "".join(f"a{n}='>'" for n in range(90_000)) + ">x",
        web_pages.FLOOD,
    ),
    "attributes after a script": (
        "<script>a<b c='</SCRIPT><p " + "/".join(f"a{n}" for n in range(100_000)),
        web_pages.FLOOD,
    ),
    "tags that do not end": ("<a" * 400_000, web_pages.EMPTY),
    "comments that do not end": ("<!--" * 200_000, web_pages.EMPTY),
    "quotes that do not end": ("<a b='" + "<a " * 200_000, web_pages.EMPTY),
    "templates": ("<template>" * 50_000, web_pages.EMPTY),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_markup_made_to_keep_a_parser_busy_is_rejected_at_once(name):
    markup, reason = HOSTILE[name]
    begin = time.process_time()
    with pytest.raises(PageError, match=reason):
        page_of(markup, "resiliparse")
    assert time.process_time() - begin < 5  # without the check some take minutes


def test_usual_large_pages_are_not_taken_for_hostile():
    rows = "".join(
        f"<div id=a{n} class='b c d' title=\"x > y\"><p>Row {n} &lt; 5</p></div>" for n in range(5000)
    )
    script = "<script>" + "if (a<b && c > d) e = '<div ' + f; " * 5000 + "</script>"
    data_uri = f"<img src='data:image/png;base64,{'/ab+' * 50_000}'>"
    assert page_of(html(script + rows + data_uri), "resiliparse").text.count("Row") == 5000


def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch):
    write(tmp_path / "a.html", html("x"))
    monkeypatch.setitem(web_pages.PACKAGES, "trafilatura", Package("no-such-package>=1", extra="web"))
    with pytest.raises(
        ConfigError, match=r"HTMLDocuments: no-such-package is not installed: pip install 'leyden\[web\]'"
    ):
        HTMLDocuments(str(tmp_path), "trafilatura")
    assert texts_of(HTMLDocuments(str(tmp_path))) == ["x"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extractor": "resiliparser"}, "none of resiliparse, trafilatura. Did you mean resiliparse"),
        ({"count_by": "host"}, "count_by='host' is none of file, site, language"),
        ({"max_page_bytes": 0}, "max_page_bytes is 0; it is at least 1"),
    ],
)
def test_mistakes_are_named(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        HTMLDocuments(str(tmp_path), **options)


@pytest.mark.ci
def test_workers_and_kills_change_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 2000)
    for number, text in enumerate(TEXTS):
        write(tmp_path / "in" / f"{number}.html{['', '.gz'][number % 2]}", html(text if number % 10 else ""))
    reader = HTMLDocuments(str(tmp_path / "in"))
    assert len(reader.tasks()) > 5
    assert rows_of(pickle.loads(pickle.dumps(reader)), []) == rows_of(reader, [])
    options = {"reader": HTMLDocuments, "max_reject_fraction": 0.5}
    out = ends_in_the_same_bytes(tmp_path / "in", tmp_path / "out", **options)
    assert json.loads((out / "manifest.json").read_text())["rejected"] == {web_pages.EMPTY: 6}
    lines = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert {line["reason"] for line in lines} == {web_pages.EMPTY}
    assert prepare(tmp_path / "in", out, **options) == out
