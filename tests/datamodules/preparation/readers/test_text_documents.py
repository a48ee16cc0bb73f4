import json

import pytest

from core.errors import ConfigError
from datamodules.preparation.readers.text_documents import TextDocuments


def lines(*records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "b.txt").write_text("plain, ünïcode 🙂\r\n", encoding="utf-8", newline="")
    (folder / "deep" / "er" / "c.MD").write_text("# Markdown\n\ntwo paragraphs\n")
    (folder / "a.jsonl").write_text(lines({"id": 1, "text": "first"}, {"text": "second\nline"}) + "\n")
    (folder / "skipped.csv").write_text("text\nno\n")
    (folder / "z.txt").write_text(" \n\t\n")
    return folder


def read(source):
    return list(TextDocuments(str(source)).documents())


def test_a_folder_is_read_in_the_order_of_names(corpus):
    documents = TextDocuments(str(corpus))
    expected = ["first", "second\nline", "plain, ünïcode 🙂\r\n", "# Markdown\n\ntwo paragraphs\n"]
    assert list(documents.documents()) == list(documents.documents()) == expected


def test_files_and_globs(corpus, monkeypatch):
    assert read(corpus / "a.jsonl") == ["first", "second\nline"]
    assert read(corpus / "**" / "*.MD") == ["# Markdown\n\ntwo paragraphs\n"]
    assert read(corpus / "*.*") == ["first", "second\nline", "plain, ünïcode 🙂\r\n"]
    monkeypatch.setenv("HOME", str(corpus))
    assert read("~/b.txt") == ["plain, ünïcode 🙂\r\n"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwindows")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n')
    assert read(tmp_path) == ["windows", "x"]


def test_the_fingerprint_is_that_of_names_and_content_not_of_the_place(corpus, tmp_path):
    before = TextDocuments(str(corpus)).fingerprint()
    assert json.loads(json.dumps(before)) == before
    assert [name for name, _, _ in before["files"]] == ["a.jsonl", "b.txt", "deep/er/c.MD", "z.txt"]
    corpus.rename(tmp_path / "moved")
    moved = tmp_path / "moved"
    assert TextDocuments(str(moved)).fingerprint() == before
    (moved / "b.txt").write_text("plain")
    changed = TextDocuments(str(moved)).fingerprint()
    assert changed != before
    (moved / "b.txt").rename(moved / "bb.txt")
    assert TextDocuments(str(moved)).fingerprint() != changed


@pytest.mark.slow  # the quickstart reads it too
def test_the_built_in_text():
    documents = TextDocuments("python-docs")
    assert documents.fingerprint() == TextDocuments("python-docs").fingerprint()
    assert any(text.startswith('The "assert" statement') for text in documents.documents())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nnot \xe9 here", r"a.txt: not UTF-8: byte 9 is 0xe9"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\xff"}\n',
            r"a.jsonl:2: not UTF-8: byte 24 of the file is 0xff",
        ),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": "x"\n', r"a.jsonl:3: this line is not JSON"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"body": "x", "id": 2}\n',
            r"a.jsonl:2: .*no field \"text\".*'body', 'id'",
        ),
        ("a.jsonl", b'["x"]\n', r"a.jsonl:1: expected an object .*found a list"),
        ("a.jsonl", b'{"text": null}\n', r"a.jsonl:1: the field \"text\" is not a string: it is a NoneType"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl:1: not UTF-8: character 0 .*surrogate"),
        ("a.txt", b" \n", r"all documents are blank"),
        ("a.jsonl", b"", r"all documents are blank"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


def test_nothing_found(corpus, monkeypatch):
    with pytest.raises(ConfigError, match=r"no such file .*Did you mean corpus\?\n.*\.txt, \.md, \.jsonl"):
        TextDocuments(str(corpus.parent / "corpsu"))
    with pytest.raises(ConfigError, match=r"Did you mean python-docs\?"):
        TextDocuments("python_docs")
    with pytest.raises(ConfigError, match=r"no such file"):
        TextDocuments(str(corpus / "*.parquet"))
    with pytest.raises(ConfigError, match=r"none of the 1 file\(s\) found, such as .*skipped.csv,\n"):
        TextDocuments(str(corpus / "skipped.csv"))
    (corpus / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty"):
        TextDocuments(str(corpus / "empty"))
