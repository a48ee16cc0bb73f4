"""JSON Lines, Parquet and Hugging Face folders: what is read, in which pieces, and what is rejected."""

import gzip
import json

import pytest
import zstandard

from core.errors import ConfigError
from datamodules.preparation.readers import source_files
from datamodules.preparation.readers.hugging_face_documents import HuggingFaceDocuments
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.readers.parquet_documents import ParquetDocuments
from datamodules.preparation.readers.text_documents import TextDocuments
from tests.support.corpus import (
    rows_of,
    texts,
    texts_of,
    write_hugging_face,
    write_lines,
    write_parquet,
)

TEXTS = texts(300)


# JSON Lines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson.zst"])
def test_plain_and_compressed_lines_are_the_same(tmp_path, name):
    data = write_lines(tmp_path / "plain", TEXTS).read_bytes()
    half = data.index(b"\n", len(data) // 2) + 7  # in the middle of a line: members need not end with one
    pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.rpartition(".")[2], bytes)
    (tmp_path / name).write_bytes(pack(data[:half]) + pack(data[half:]))
    assert texts_of(JSONLinesDocuments(str(tmp_path / name))) == TEXTS
    assert texts_of(TextDocuments(str(tmp_path / name))) == TEXTS


@pytest.mark.parametrize("size", [13, 40, 333, 1000, 5000])
def test_however_a_file_is_cut_each_line_is_read_once(tmp_path, monkeypatch, size):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    whole, _ = rows_of(JSONLinesDocuments(str(path)))
    monkeypatch.setattr(source_files, "LEAST", size)
    monkeypatch.setattr(source_files, "PARTS", 10**9)
    for reader in (JSONLinesDocuments(str(path)), TextDocuments(str(path))):
        rows, tasks = rows_of(reader)
        assert rows == whole
        assert tasks >= path.stat().st_size // size
    assert len({row["id"] for row in rows}) == len(TEXTS)


def test_small_files_share_tasks_of_about_equal_size(tmp_path, monkeypatch):
    for number in range(40):
        write_lines(tmp_path / f"{number:02}.jsonl", TEXTS[number : number + 2])
    monkeypatch.setattr(source_files, "LEAST", 2000)
    tasks = JSONLinesDocuments(str(tmp_path)).tasks()
    sizes = [sum(piece["bytes"] for piece in task["pieces"]) for task in tasks]
    assert 2 < len(tasks) < 20
    assert all(2000 <= size < 4000 for size in sizes[:-1])
    assert sum(len(task["pieces"]) for task in tasks) == 40


def test_fields_and_sources(tmp_path):
    records = [{"body": "one", "from": "web"}, {"body": "two", "from": None}, {"body": "three"}]
    path = tmp_path / "wiki-00003-of-00128.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows, _ = rows_of(JSONLinesDocuments(str(path), text_field="body", source_field="from"))
    assert [(row["text"], row["source"]) for row in rows] == [
        ("one", "web"),
        ("two", "wiki"),
        ("three", "wiki"),
    ]
    assert rows[1]["id"] == f"wiki-00003-of-00128.jsonl:{len(json.dumps(records[0])) + 1}"
    write_lines(tmp_path / "books" / "deep" / "x.jsonl", ["four"])
    rows, _ = rows_of(
        TextDocuments(str(write_lines(tmp_path / "a.jsonl", ["five"]).parent / "**/*.jsonl")), []
    )
    assert {row["text"]: row["source"] for row in rows} == {"five": "a", "four": "books"}


@pytest.mark.parametrize(
    ("line", "reason", "details"),
    [
        (b'{"text": "x', "this line is not JSON", "Invalid control character"),
        (b"[" * 100_000, "this line is not JSON", "recursion"),
        (b'{"text": "\xe9"}', "not UTF-8", "byte 25 of the file is 0xe9"),
        (b'"x"', 'expected an object with the field "text"', "found a str"),
        (b'{"txt": "x"}', 'the object has no field "text"', "'txt'"),
        (b'{"text": 3}', 'the field "text" is not a string', "int"),
        (b'{"text": "\\udc00"}', "not UTF-8", "surrogate"),
    ],
)
def test_a_bad_line_is_rejected_alone(tmp_path, line, reason, details):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ab"}\n' + line + b'\n{"text": "c"}\n')
    rejects = []
    assert texts_of(JSONLinesDocuments(str(path)), rejects) == ["ab", "c"]
    [(source, place, cause, more)] = rejects
    assert (source, place, cause) == ("a", f"{path}:2", reason)
    assert details in more


@pytest.mark.parametrize("codec", [pytest.param("gz", marks=pytest.mark.ci), "zst"])
def test_a_broken_member_is_rejected_from_the_broken_place_on(tmp_path, codec):
    many = texts(12_000)  # several blocks
    data = write_lines(tmp_path / "plain", many).read_bytes()
    pack = gzip.compress if codec == "gz" else zstandard.compress
    path = tmp_path / f"a.jsonl.{codec}"
    path.write_bytes(pack(data)[: -len(pack(data)) // 4])
    rejects = []
    found = texts_of(JSONLinesDocuments(str(path)), rejects)
    assert 0 < len(found) < len(many)
    assert found == many[: len(found)]
    assert [reject[1:3] for reject in rejects] == [
        (str(path), f"broken {'gzip' if codec == 'gz' else 'zstd'} file")
    ]
    assert texts_of(JSONLinesDocuments(str(path)), []) == found
    path.write_bytes(b"no archive at all")
    rejects = []
    assert texts_of(JSONLinesDocuments(str(path)), rejects) == []
    assert len(rejects) == 1


# Parquet --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3000, 1 << 20])
def test_row_groups_are_read_in_order(tmp_path, monkeypatch, size):
    monkeypatch.setattr(source_files, "LEAST", size)
    write_parquet(tmp_path / "a.parquet", TEXTS[:170])
    write_parquet(tmp_path / "b.parquet", TEXTS[170:])
    rows, tasks = rows_of(ParquetDocuments(str(tmp_path)))
    assert [row["text"] for row in rows] == TEXTS
    assert len({row["id"] for row in rows}) == 300
    assert tasks == {1: 7, 1 << 20: 1}.get(size, tasks)


def test_rows_without_text_and_sources_from_a_column(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["x", None, "y"], origin=["p", "p", None])
    rejects = []
    rows, _ = rows_of(ParquetDocuments(str(path), source_column="origin"), rejects)
    assert [(row["text"], row["source"]) for row in rows] == [("x", "p"), ("y", "a")]
    assert [reject[1:3] for reject in rejects] == [(f"{path}, row 1", 'the column "text" is empty')]


def test_broken_parquet_is_rejected_by_file_or_row_group(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS)
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(data[: len(data) // 2])
    broken = bytearray(data)
    broken[4:60] = b"\xff" * 56  # the first page's header
    (tmp_path / "c.parquet").write_bytes(broken)
    rejects = []
    found = texts_of(ParquetDocuments(str(tmp_path)), rejects)
    assert found == TEXTS + TEXTS[50:]
    assert [reject[1] for reject in rejects] == [
        str(tmp_path / "b.parquet"),
        f"{tmp_path}/c.parquet, row group 0",
    ]


def test_a_missing_column_is_told_with_those_there_are(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS, count=list(range(300)))
    with pytest.raises(
        ConfigError, match=r"a.parquet has no column 'txt'. Did you mean text\?\n.*text, count"
    ):
        ParquetDocuments(str(path), text_column="txt").tasks()
    with pytest.raises(ConfigError, match=r"column 'count' holds int64, not strings"):
        ParquetDocuments(str(path), text_column="count").tasks()


# Hugging Face ---------------------------------------------------------------------------------------------


def test_a_saved_dataset_is_read(tmp_path):
    folder = write_hugging_face(tmp_path / "set", TEXTS)
    rows, _ = rows_of(HuggingFaceDocuments(str(folder)))
    assert [row["text"] for row in rows] == TEXTS
    assert {row["source"] for row in rows} == {"data"}


def test_a_saved_dataset_dict_is_read_by_split(tmp_path):
    for split, documents in {"train": TEXTS[:200], "test": TEXTS[200:]}.items():
        write_hugging_face(tmp_path / "set" / split, documents)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts_of(HuggingFaceDocuments(str(tmp_path / "set"))) == TEXTS
    assert texts_of(HuggingFaceDocuments(str(tmp_path / "set"), split="test")) == TEXTS[200:]
    with pytest.raises(ConfigError, match=r"no split 'tests'. Did you mean test\? It has: train, test"):
        HuggingFaceDocuments(str(tmp_path / "set"), split="tests")


def test_what_datasets_itself_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "set"), num_shards=2)
    assert texts_of(HuggingFaceDocuments(str(tmp_path / "set"))) == TEXTS


def test_a_truncated_arrow_file_is_rejected_from_there_on(tmp_path):
    folder = write_hugging_face(tmp_path / "set", TEXTS)
    path = folder / "data-00001-of-00003.arrow"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    rejects = []
    found = texts_of(HuggingFaceDocuments(str(folder)), rejects)
    assert found[:100] == TEXTS[:100]
    assert found[-100:] == TEXTS[200:]
    assert 200 <= len(found) < 300
    assert [reject[1:3] for reject in rejects] == [(str(path), "broken Arrow file")]


def test_what_is_no_saved_dataset_is_told(tmp_path):
    folder = write_hugging_face(tmp_path / "set", TEXTS)
    with pytest.raises(ConfigError, match=r"neither state.json\nnor dataset_dict.json"):
        HuggingFaceDocuments(str(tmp_path))
    with pytest.raises(ConfigError, match="single dataset"):
        HuggingFaceDocuments(str(folder), split="train")
    (folder / "data-00002-of-00003.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data-00002-of-00003.arrow is missing"):
        HuggingFaceDocuments(str(folder))
    for content in ("{", "[]", '{"_data_files": []}', '{"_data_files": [{"filename": "../x.arrow"}]}'):
        (folder / "state.json").write_text(content)
        with pytest.raises(ConfigError, match=r"state\.json is"):
            HuggingFaceDocuments(str(folder))
