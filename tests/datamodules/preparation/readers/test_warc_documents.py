"""Web archives: pages and WET texts, what is left out and why, broken records, and archives made to do harm."""

import gzip
import json
import pickle
import random
import tracemalloc
import zlib

import pytest
import zstandard

from core.errors import ConfigError
from core.technique import Package
from datamodules.preparation.readers import source_files, warc_documents, warc_records, web_pages
from datamodules.preparation.readers.html_documents import TOO_LONG
from datamodules.preparation.readers.warc_documents import WARCDocuments
from datamodules.preparation.token_preparation import TokenPreparation
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.archives import DATE, PACK, page, record, response, write_archive
from tests.support.corpus import rows_of, texts, texts_of
from tests.support.restarts_of_preparation import ends_in_the_same_bytes

pytest.importorskip("fastwarc")
pytest.importorskip("resiliparse")

TEXTS = texts(8)
URLS = [f"http://site-{number}.org/a?b={number}" for number in range(8)]
RESPONSES = [response(page(text), url) for text, url in zip(TEXTS, URLS, strict=True)]
HEADERS = (
    b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a/\r\nWARC-Date: 2024-01-02T03:04:05Z\r\n"
    b"WARC-Record-ID: <urn:uuid:1>\r\nContent-Type: application/http; msgtype=response\r\n"
)


def read(path, **options):
    """The texts, and the rejects as (place, reason, lost bytes)."""
    rejects = []
    found = texts_of(WARCDocuments(str(path), **options), rejects)
    return found, [(place.removeprefix(f"{path}, "), reason, *lost) for _, place, reason, _, *lost in rejects]


@pytest.fixture(params=["a.warc", "a.warc.gz", "a.warc.zst"])
def path(request, tmp_path):
    return tmp_path / request.param


# Records ----------------------------------------------------------------------------------------------------


def test_pages_are_read_in_order_and_named(path):
    info = record("warcinfo", b"software: x\r\n", content_type="application/warc-fields")
    request = record("request", b"GET / HTTP/1.1\r\n\r\n", content_type="application/http; msgtype=request")
    begins = write_archive(path, [info, *(part for one in RESPONSES for part in (request, one))])
    rows, tasks = rows_of(WARCDocuments(str(path)))
    assert tasks == 1
    assert [row["text"] for row in rows] == TEXTS
    assert [row["id"] for row in rows] == [
        f"{path.name}:{begin} {DATE} {url}" for begin, url in zip(begins[2::2], URLS, strict=False)
    ]


def test_an_archive_of_one_member_is_read(tmp_path):
    (tmp_path / "a.warc.gz").write_bytes(gzip.compress(b"".join(RESPONSES)))
    assert read(tmp_path / "a.warc.gz") == (TEXTS, [])


def test_records_of_wet_files_are_texts_as_they_are(tmp_path):
    records = [
        record(
            "conversion", b"one\n\xc3\xa9", URLS[0], "text/plain", WARC_Identified_Content_Language="eng,fra"
        ),
        record("conversion", b" \n", URLS[1], "text/plain"),
        record("conversion", b"\xe9", URLS[2], "text/plain"),
        record("conversion", b"x" * 3000, URLS[3], "text/plain"),
        record("conversion", b"two", URLS[4], "text/plain"),
    ]
    write_archive(tmp_path / "a.warc.wet.gz", records)
    rejects = []
    reader = WARCDocuments(str(tmp_path), count_by="language", max_page_bytes=2000)
    rows, _ = rows_of(reader, rejects)
    assert [(row["text"], row["source"]) for row in rows] == [("one\né", "eng"), ("two", "unknown")]
    assert [reject[2] for reject in rejects] == [web_pages.EMPTY, "not UTF-8", TOO_LONG]
    assert URLS[1] in rejects[0][3]


def test_what_is_no_page_is_counted_by_reason(tmp_path):
    http = "application/http; msgtype=response"
    given = {
        warc_documents.REDIRECT: response(b"", status="301 Moved Permanently"),
        warc_documents.STATUS: response(page("gone"), status="404 Not Found"),
        warc_documents.OTHER: response(b"\x89PNG", content_type="image/png"),
        web_pages.EMPTY: response("<html></html>"),
        web_pages.BINARY: response(b"%PDF-1.4"),
        web_pages.NESTED: response("<div>" * 10_000 + "x"),
        TOO_LONG: response(b"x" * 300_000),
        warc_documents.REVISIT: record("revisit", b"HTTP/1.1 200 OK\r\n\r\n", content_type=http),
    }
    nothing = [record("response", b"10.0.0.1", "dns:example.org", "text/dns")]
    nothing += [record("response", content, content_type=http) for content in (
        b"<html>no headers", b"HTTP/1.1 banana\r\n\r\nx", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000)]  # fmt: skip
    begins = write_archive(tmp_path / "a.warc.gz", [*given.values(), *nothing, RESPONSES[0]])
    found, rejects = read(tmp_path / "a.warc.gz", max_page_bytes=100_000)
    assert found == TEXTS[:1]
    reasons = [*given, warc_documents.OTHER_PROTOCOL, *[warc_documents.NO_HTTP] * 3]
    assert rejects == [(f"byte {begin:,}", reason) for begin, reason in zip(begins, reasons, strict=False)]
    with pytest.raises(ConfigError, match=r"byte 0: a redirect: 301 http://example.org/"):
        list(WARCDocuments(str(tmp_path)).documents())


def test_what_documents_are_counted_under(tmp_path):
    name = "CC-MAIN-20240220211055-20240221001055-00007.warc.gz"
    write_archive(tmp_path / name, [response(page("Some words.", "de-AT"), "https://Www.Example.org:8080/x")])
    for by, source in {"file": "CC-MAIN", "site": "www.example.org", "language": "de"}.items():
        rows, _ = rows_of(WARCDocuments(str(tmp_path), count_by=by))
        assert [row["source"] for row in rows] == [source]


def chunked(data):
    return b"%x\r\n%b\r\n%X\r\n%b\r\n0\r\n\r\n" % (5, data[:5], len(data) - 5, data[5:])


CODINGS = {
    "gzip": (["Content-Encoding: gzip"], gzip.compress),
    "x-gzip": (["content-encoding: X-GZIP"], gzip.compress),
    "deflate": (["Content-Encoding: deflate"], zlib.compress),
    "zstd": (["Content-Encoding: zstd"], zstandard.compress),
    "chunked": (["Transfer-Encoding: chunked"], chunked),
    "chunked gzip": (
        ["Transfer-Encoding: chunked", "Content-Encoding: gzip"],
        lambda data: chunked(gzip.compress(data)),
    ),
    "decoded by the crawler": (["Content-Encoding: gzip", "Transfer-Encoding: chunked"], bytes),
    "of no known name": (["Content-Encoding: aws-chunked"], bytes),
}


@pytest.mark.parametrize("name", CODINGS)
def test_bodies_are_decoded(tmp_path, name):
    more, pack = CODINGS[name]
    write_archive(tmp_path / "a.warc", [response(pack(page("Some words.").encode()), more=more)])
    assert read(tmp_path / "a.warc") == (["Some words."], [])


def test_a_body_that_cannot_be_decoded_is_rejected_alone(tmp_path):
    bad = response(b"6\r\n<p>abc\r\nZZ", more=["Transfer-Encoding: chunked"])
    write_archive(tmp_path / "a.warc", [bad, RESPONSES[0]])
    assert read(tmp_path / "a.warc") == (TEXTS[:1], [("byte 0", warc_documents.BODY)])


def test_lines_that_end_without_a_carriage_return_and_the_encoding_of_http(tmp_path):
    content = b"HTTP/1.0 200 OK\nContent-Type: text/html; charset='windows-1251'\n\n" + page("Это").encode(
        "cp1251"
    )
    write_archive(tmp_path / "a.warc", [record("response", content, content_type="application/http")])
    assert read(tmp_path / "a.warc") == (["Это"], [])


# Damage -----------------------------------------------------------------------------------------------------


def test_behind_a_broken_record_reading_goes_on(path):
    begins = write_archive(path, RESPONSES)
    data, lost = bytearray(path.read_bytes()), begins[4] - begins[3]
    data[begins[4] - 30] ^= 0xFF
    path.write_bytes(data)
    found, [(place, reason, bytes_lost)] = read(path)
    assert found == TEXTS[:3] + TEXTS[4:]
    assert (place, bytes_lost) == (f"byte {begins[3]:,}", lost)
    assert reason in (warc_records.BROKEN, warc_records.DIGEST)


def test_a_record_whose_begin_is_gone_is_lost_alone(path):
    begins = write_archive(path, RESPONSES)
    data = bytearray(path.read_bytes())
    data[begins[3] : begins[3] + 12] = bytes(12)
    path.write_bytes(data)
    found, rejects = read(path)
    assert found == TEXTS[:3] + TEXTS[4:]
    assert rejects == [(f"after byte {begins[2]:,}", warc_records.BROKEN, begins[4] - begins[2])]


def test_a_truncated_archive_is_read_to_its_last_whole_record(path):
    begins = write_archive(path, RESPONSES)
    path.write_bytes(path.read_bytes()[: begins[-1] - 60])
    found, [(place, reason, lost)] = read(path)
    assert found == TEXTS[:-1]
    assert (place, lost) == (f"byte {begins[-2]:,}", begins[-1] - 60 - begins[-2])
    assert reason in (warc_records.CUT, warc_records.BROKEN)


def test_a_record_cut_short_in_the_middle_is_lost_alone(path):
    begins = write_archive(path, RESPONSES)
    data = path.read_bytes()
    path.write_bytes(data[: begins[4] - 70] + data[begins[4] :])
    found, [(place, _, _)] = read(path)
    assert (found, place) == (TEXTS[:3] + TEXTS[4:], f"byte {begins[3]:,}")


@pytest.mark.parametrize("seed", [*range(30), 4754, 17586, 18948])  # the last: fastwarc ends without a word
def test_whatever_is_damaged_the_rest_is_read_and_the_same_each_time(path, seed):
    begins, chance = write_archive(path, RESPONSES), random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data))
        data[at : at + chance.randint(1, 40)] = chance.randbytes(chance.randint(0, 40))
    path.write_bytes(data)
    found, rejects = read(path)
    assert set(found) <= set(TEXTS)
    assert len(found) >= 8 - 2 * 3
    assert len(found) == len(begins) - 1 or rejects
    assert (found, rejects) == read(path)


def test_what_is_no_archive_is_rejected(path):
    for content in (b"no archive at all", b"\x1f\x8b", gzip.compress(b"no archive"), bytes(100_000)):
        path.write_bytes(content)
        assert read(path) == ([], [("byte 0", warc_records.BROKEN, len(content))])
    path.write_bytes(b"")
    assert read(path) == ([], [])


# Harm -------------------------------------------------------------------------------------------------------


HARM = {
    "an endless header line": lambda: (HEADERS + b"X-A: " + b"a" * 20_000_000, warc_records.BROKEN),
    "endless headers": lambda: (HEADERS + b"X-A: b\r\n" * 3_000_000, warc_records.BROKEN),
    "endless headers of HTTP": lambda: (
        HEADERS + b"Content-Length: 24000017\r\n\r\nHTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 3_000_000,
        warc_documents.NO_HTTP,
    ),
    "a record of 300 MiB": lambda: (
        HEADERS + b"Content-Length: 314572800\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + bytes(300 << 20),
        warc_records.HUGE,
    ),
    "a record of a terabyte": lambda: (
        HEADERS + b"Content-Length: 1000000000000\r\n\r\nHTTP",
        warc_records.HUGE,
    ),
    "a page that expands": lambda: (
        response(gzip.compress(b" " * (200 << 20)), more=["Content-Encoding: gzip"]),
        TOO_LONG,
    ),
    "a page that expands twice": lambda: (
        response(gzip.compress(gzip.compress(b" " * (200 << 20))), more=["Content-Encoding: gzip, gzip"]),
        TOO_LONG,
    ),
}
"""Hundreds of megabytes, which are not made where tests are only collected."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.ci] * (name in ("a record of 300 MiB", "a page that expands")))
        for name in HARM
    ],
)
def test_archives_made_to_fill_the_memory_are_rejected(tmp_path, name):
    harmful, reason = HARM[name]()
    write_archive(tmp_path / "a.warc.gz", [harmful, RESPONSES[0]])
    tracemalloc.start()
    found, rejects = read(tmp_path / "a.warc.gz")
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    assert found == TEXTS[:1]
    assert rejects[0][1] == reason


@pytest.mark.timeout(60)
def test_an_archive_that_expands_more_than_a_thousand_times_is_a_bomb(tmp_path):
    big = HEADERS + b"Content-Length: 209715200\r\n\r\n" + bytes(200 << 20) + b"\r\n\r\n"
    begins = write_archive(tmp_path / "a.warc.zst", [big] * 5)
    _, rejects = read(tmp_path / "a.warc.zst")
    assert rejects[-1] == (f"byte {begins[1]:,}", warc_records.BOMB, begins[5] - begins[1])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.warc.zst"])
def test_an_archive_full_of_false_begins_is_given_up(tmp_path, name):
    false = {"warc": b"\nWARC/1.0\r\n", "gz": b"\x1f\x8b\x08\x00", "zst": b"\x28\xb5\x2f\xfd"}
    (tmp_path / name).write_bytes(false[name.rpartition(".")[2]] * 1_000_000)
    assert read(tmp_path / name) == ([], [("byte 0", warc_records.BROKEN, (tmp_path / name).stat().st_size)])


# Options ----------------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch):
    write_archive(tmp_path / "a.warc.gz", RESPONSES)
    monkeypatch.setattr(warc_documents, "FASTWARC", Package("no-such-package>=1", extra="web"))
    with pytest.raises(
        ConfigError, match=r"WARCDocuments: no-such-package is not.*pip install 'leyden\[web\]'"
    ):
        WARCDocuments(str(tmp_path))
    with pytest.raises(ConfigError, match="count_by='host' is none of file, site, language"):
        WARCDocuments(str(tmp_path), count_by="host")


@pytest.mark.ci
def test_workers_and_kills_change_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 1000)
    for number, text in enumerate(texts(60)):
        suffix = ["warc", "warc.gz", "warc.zst"][number % 3]
        moved = response(b"", f"http://b.org/{number}", "302 Found")
        one = response(page(text.replace("<", "")), f"http://a.org/{number}")
        begins = write_archive(tmp_path / "in" / f"{number:02}.{suffix}", [moved, one, RESPONSES[0]])
        if number % 10 == 0:
            place = tmp_path / "in" / f"{number:02}.{suffix}"
            place.write_bytes(place.read_bytes()[: begins[3] - 60])
    reader = WARCDocuments(str(tmp_path / "in"))
    assert len(reader.tasks()) > 5
    assert rows_of(pickle.loads(pickle.dumps(reader)), []) == rows_of(reader, [])
    out = ends_in_the_same_bytes(
        tmp_path / "in", tmp_path / "out", reader=WARCDocuments, max_reject_fraction=0.1
    )
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["skipped"] == {warc_documents.REDIRECT: 60}
    assert sum(manifest["rejected"].values()) == 6
    assert PACK.keys() >= {"gz", "zst"}


# Skipped --------------------------------------------------------------------------------------------------


def _prepared(folder, out, **options):
    out.mkdir(exist_ok=True)
    parts = WARCDocuments(str(folder)), BPETokenizer(300), TokenShards()
    return TokenPreparation(*parts, validation_fraction=0.3, **options).run(out, "archive")


def test_an_archive_mostly_of_redirects_needs_no_limit_and_broken_records_still_count(tmp_path):
    http = "application/http; msgtype=response"
    others = [
        response(b"", status="301 Moved Permanently"),
        response(b"", status="404 Not Found"),
        response(b"\x89PNG", content_type="image/png"),
        record("revisit", b"HTTP/1.1 200 OK\r\n\r\n", content_type=http),
        record("response", b"10.0.0.1", "dns:example.org", "text/dns"),
    ] * 20
    pages = [response(page(one)) for one in texts(20)]
    write_archive(tmp_path / "a" / "a.warc.gz", [*others, *pages])
    totals = _prepared(tmp_path / "a", tmp_path / "one")  # max_reject_fraction is 0: nothing may be broken
    assert totals.skipped == dict.fromkeys(WARCDocuments.skipped, 20)
    assert (totals.documents >= 20, totals.rejected) == (True, {})
    assert not (tmp_path / "one" / "rejects.jsonl").exists()
    broken = record("response", b"HTTP/1.1 banana\r\n\r\nx", content_type=http)
    write_archive(tmp_path / "b" / "b.warc.gz", [*others, *pages, broken])
    with pytest.raises(ConfigError, match=warc_documents.NO_HTTP):
        _prepared(tmp_path / "b", tmp_path / "two")
    # One of 21, whatever was skipped.
    with pytest.raises(ConfigError, match="1 of 21 documents cannot be used"):
        _prepared(tmp_path / "b", tmp_path / "three", max_reject_fraction=0.04)
    assert _prepared(tmp_path / "b", tmp_path / "four", max_reject_fraction=0.05).rejected == {
        warc_documents.NO_HTTP: 1
    }


def test_an_archive_without_pages_says_what_it_held(tmp_path):
    write_archive(tmp_path / "a" / "a.warc.gz", [response(b"", status="301 Moved Permanently")] * 7)
    with pytest.raises(ConfigError, match="7 skipped: a redirect"):
        _prepared(tmp_path / "a", tmp_path / "one")
