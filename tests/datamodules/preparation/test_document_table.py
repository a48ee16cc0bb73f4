"""documents.parquet: what is known of each document, in the order in which its tokens are stored."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from pyarrow import parquet

from core.errors import ConfigError
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
from plugins.commands.verify_data import verify_data
from tests.support.corpus import articles, contents, documents_of, prepare, texts, with_metadata
from tests.support.restarts_of_preparation import ends_in_the_same_bytes


def test_each_row_is_the_document_whose_tokens_are_stored_there(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 2000)
    folder = prepare(
        articles(tmp_path / "in"),
        tmp_path / "out",
        reader=with_metadata("url", "date", "year"),
        transforms=[ExactDuplicates()],
        test_fraction=0.1,
    )
    table = parquet.read_table(folder / "documents.parquet").to_pylist()
    wanted = {
        text: (f"https://site{n % 7}.example/{n}", str(2000 + n % 5)) for n, text in enumerate(texts(200))
    }
    assert len(table) == 200
    for split in ("train", "validation", "test"):
        rows, store = [row for row in table if row["split"] == split], TokenStore(folder / split)
        begins = [*store.document_starts().tolist(), len(store)]
        assert [row["tokens"] for row in rows] == [b - a for a, b in pairwise(begins)]
        assert [(row["url"], row["year"]) for row in rows] == [
            wanted[text] for text in documents_of(folder, split)
        ]
    assert {row["date"] for row in table} == {None, *(f"2024-{month:02}-03" for month in range(1, 13))}
    assert list(table[0]) == ["split", "tokens", "source", "id", "url", "date", "year"]


def test_the_bytes_depend_neither_on_workers_nor_on_kills(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 2000)
    articles(tmp_path / "in")
    folder = ends_in_the_same_bytes(tmp_path / "in", tmp_path, kills=3, reader=with_metadata("url"))
    assert "documents.parquet" in contents(folder)


def test_without_metadata_there_is_no_table_and_no_other_plan(tmp_path):
    folder = prepare(articles(tmp_path / "in"), tmp_path / "out")
    assert not (folder / "documents.parquet").exists()
    assert "metadata" not in json.loads((folder / "plan.json").read_text())["options"]["reader"]


def test_a_changed_table_is_found_and_a_removed_one_is_not_missed(tmp_path, capsys):
    folder = prepare(articles(tmp_path / "in"), tmp_path / "out", reader=with_metadata("url"))
    assert verify_data([str(folder)]) == 0
    whole = (folder / "documents.parquet").read_bytes()
    (folder / "documents.parquet").write_bytes(whole[:-1] + b"x")
    with pytest.raises(ConfigError, match=r"documents\.parquet: its content has changed"):
        verify_data([str(folder)])
    (folder / "documents.parquet").unlink()
    assert verify_data([str(folder)]) == 0


def test_another_configuration_leaves_no_table_behind(tmp_path):
    articles(tmp_path / "in")
    prepare(tmp_path / "in", tmp_path / "out", reader=with_metadata("url"))
    folder = prepare(tmp_path / "in", tmp_path / "out", overwrite=True)
    assert not (folder / "documents.parquet").exists()
    assert verify_data([str(folder)]) == 0


@pytest.mark.parametrize("names", [("url", "url"), ("text",), ("split_key",)])
def test_names_that_cannot_be_columns(names):
    with pytest.raises(ConfigError, match=f"metadata names '{names[0]}'"):
        JSONLinesDocuments("x", metadata=names)


def test_the_report_counts_tokens_by_language_and_license(tmp_path):
    values = [("en", "CC0-1.0"), ("de", None), ("<b>|x", "MIT"), (None, "MIT")]
    (tmp_path / "in").mkdir()
    for part in range(3):
        described = enumerate(texts(300)[part::3])
        lines = [
            {"text": text, "language": values[n % 4][0], "license": values[n % 4][1]} for n, text in described
        ]
        (tmp_path / "in" / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader = with_metadata("language", "license")
    folders = [
        prepare(tmp_path / "in", tmp_path / str(number), reader=reader, engine=engine)
        for number, engine in enumerate((None, LocalEngine(2)))
    ]
    assert contents(folders[0]) == contents(folders[1])
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    table = parquet.read_table(folders[0] / "documents.parquet").to_pydict()
    for name in ("language", "license"):
        counted = Counter()
        for value, tokens in zip(table[name], table["tokens"], strict=True):
            counted[value or "unknown"] += tokens
        assert manifest[f"{name}_tokens"] == counted
        assert len(counted) == len({pair[name == "license"] for pair in values})
    page, text = ((folders[0] / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert "<h2>Tokens by language</h2>" in page
    assert "&lt;b&gt;|x (" in page
    assert f"| ` MIT ` | {manifest['license_tokens']['MIT']:,} | " in text
    assert "| ` <b> x ` | " in text
