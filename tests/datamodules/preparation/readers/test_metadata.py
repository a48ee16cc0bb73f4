"""What readers know of documents beside their text: addresses, dates, languages, licenses, columns of the user's choice."""

import datetime

import pyarrow
import pytest
from pyarrow import parquet

from core.errors import ConfigError
from datamodules.preparation.readers.html_documents import HTMLDocuments
from datamodules.preparation.readers.hugging_face_documents import HuggingFaceDocuments
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.readers.parquet_documents import ParquetDocuments
from datamodules.preparation.readers.source_code import SourceCode
from datamodules.preparation.readers.stack_exchange_dump import StackExchangeDump
from datamodules.preparation.readers.warc_documents import WARCDocuments
from datamodules.preparation.readers.wikipedia_dump import WikipediaDump
from tests.support.archives import DATE, page, record, response, write_archive
from tests.support.corpus import prepare, rows_of, texts, write_lines
from tests.support.license_texts import MIT
from tests.support.stack_exchange import answer, posts, question
from tests.support.wiki import dump, wiki_page

WORDS = texts(1)[0]
DAY = datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)
COLUMNS = {
    "text": ["a", "b"],
    "license": [["MIT", "Zlib"], None],
    "lang": ["en", None],
    "stars": [3, None],
    "day": pyarrow.array([DAY, None], pyarrow.timestamp("ns", "UTC")),
    "born": [datetime.date(2024, 1, 2), None],
    "nested": [{"a": 1}, None],
}
KEPT = {"license": '["MIT", "Zlib"]', "lang": "en", "stars": "3", "born": "2024-01-02", "nested": None}


def known(reader):
    """Returns the metadata of the documents."""
    rows, _ = rows_of(reader, [])
    return [{name: row[name] for name in row if name not in ("text", "source", "id")} for row in rows]


def test_web_archives_know_address_date_and_language(tmp_path):
    text = record("conversion", WORDS.encode(), "http://b.org/", WARC_Identified_Content_Language="deu,eng")
    records = [
        response(page(WORDS, lang="en-GB"), "http://a.org/x"),
        response(page(WORDS, lang=""), "http://a.org/y"),
        text,
    ]
    write_archive(tmp_path / "a.warc.gz", records)
    assert known(WARCDocuments(str(tmp_path))) == [
        {"url": "http://a.org/x", "date": DATE, "language": "en"},
        {"url": "http://a.org/y", "date": DATE, "language": None},
        {"url": "http://b.org/", "date": DATE, "language": "de"},
    ]


def test_pages_know_address_and_language(tmp_path):
    link = '<link rel="canonical" href="https://a.org/1">'
    (tmp_path / "a.html").write_text(page(WORDS).replace("<title>", f"{link}<title>"))
    (tmp_path / "b.html").write_text(page(WORDS, lang="?"))
    expected = [{"url": "https://a.org/1", "language": "en"}, {"url": None, "language": None}]
    assert known(HTMLDocuments(str(tmp_path))) == expected


def test_articles_know_title_address_date_and_language(tmp_path):
    whole = dump([wiki_page(1, "What? & why", WORDS)])
    (tmp_path / "a.xml").write_text(whole)
    expected = {"title": "What? & why", "date": "2024-01-02T03:04:05Z", "language": "de"}
    assert known(WikipediaDump(str(tmp_path))) == [expected | {"url": None}]
    base = "<base>https://de.wikipedia.org/wiki/Wikipedia:Hauptseite</base>"
    (tmp_path / "a.xml").write_text(whole.replace("</sitename>", f"</sitename>{base}"))
    assert known(WikipediaDump(str(tmp_path)))[0]["url"] == "https://de.wikipedia.org/wiki/What%3F_%26_why"


@pytest.mark.parametrize("tags", ["<c++><list>", "|c++|list|"])
def test_questions_know_title_address_date_license_and_tags(tmp_path, tags):
    folder = tmp_path / "ai.stackexchange.com"
    folder.mkdir()
    rows = [question(7, "Why & how?", "<p>Q</p>", Tags=tags), answer(8, 7, "<p>A</p>")]
    (folder / "Posts.xml").write_bytes(posts(rows))
    assert known(StackExchangeDump(str(tmp_path))) == [
        {
            "title": "Why & how?",
            "url": "https://ai.stackexchange.com/questions/7",
            "date": "2010-08-02T15:38:23.067",
            "license": "CC BY-SA 2.5",
            "tags": "c++ list",
        }
    ]


def test_code_knows_language_license_and_repository(tmp_path):
    for name, text in {"r/LICENSE": MIT, "r/src/a.py": "a = 1\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = [{"language": "Python", "license": "MIT", "repository": "r"}]
    assert known(SourceCode(str(tmp_path))) == expected
    assert known(SourceCode(str(tmp_path / "r"))) == expected


def columns_file(folder, kind):
    table = pyarrow.table(COLUMNS)
    folder.mkdir()
    if kind is ParquetDocuments:
        parquet.write_table(table, folder / "a.parquet")
        return folder
    with (
        pyarrow.OSFile(str(folder / "a.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    return folder


@pytest.mark.parametrize("kind", [ParquetDocuments, HuggingFaceDocuments])
def test_columns_that_are_named_are_kept_as_text(tmp_path, kind):
    folder = columns_file(tmp_path / "in", kind)
    rows = known(kind(str(folder), metadata=[*KEPT, "day"]))
    assert rows[0] == KEPT | {"day": rows[0]["day"]}
    assert rows[0]["day"].startswith("2024-05-06T07:08:09")
    assert rows[1] == dict.fromkeys([*KEPT, "day"])
    assert known(kind(str(folder))) == [{}, {}]
    assert "metadata" not in kind(str(folder)).options()
    out = prepare(
        folder, tmp_path / "out", reader=lambda source: kind(source, metadata=["lang"]), transforms=[]
    )
    assert parquet.read_table(out / "documents.parquet")["lang"].to_pylist().count("en") == 1


@pytest.mark.parametrize("kind", [ParquetDocuments, HuggingFaceDocuments])
def test_columns_that_are_not_there_are_named(tmp_path, kind):
    folder = columns_file(tmp_path / "in", kind)
    with pytest.raises(ConfigError, match=r"no column 'licence'. Did you mean license"):
        kind(str(folder), metadata=["licence"]).tasks()
    with pytest.raises(ConfigError, match="every document has"):
        kind(str(folder), metadata=["text"])


def test_bytes_that_are_no_text_are_not_known(tmp_path):
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xffa")],
    )
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "who": broken}), tmp_path / "a.parquet")
    assert known(ParquetDocuments(str(tmp_path), metadata=["who"])) == [{"who": None}, {"who": "a"}]


def test_lists_of_json_are_kept_as_text(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["x"], tags=["a", "ß"], odd=[1, {}])
    rows = known(JSONLinesDocuments(str(tmp_path), metadata=["tags", "odd"]))
    assert rows == [{"tags": '["a", "ß"]', "odd": None}]
