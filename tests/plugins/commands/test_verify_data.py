"""verify-data and inspect-data, on whole folders and damaged ones."""

import json
import random
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from core.__main__ import main
from datamodules.packing.token_store import TokenStore
from tests.support.corpus import corpus, prepare, texts


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verified")
    return prepare(corpus(folder / "source"), folder / "out")


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def complaint(folder, capsys):
    assert main(["verify-data", str(folder)]) == 2
    shown_text = capsys.readouterr().err
    assert len(shown_text.splitlines()) <= 10
    return shown_text


def test_a_whole_folder_passes_without_its_report(folder, capsys):
    for name in ("report.md", "report.html", "report.json", "lengths.png", "plan.json"):
        (folder / name).unlink()
    assert main(["verify-data", str(folder)]) == 0
    assert "is complete" in capsys.readouterr().out


def test_a_flipped_bit_in_any_file_is_found(folder, capsys):
    rng = random.Random(0)
    others = folder / "train" / "index.json", folder / "tokenizer.json"
    for path in (*sorted(folder.rglob("*.bin")), *others):
        before = path.read_bytes()
        at = rng.randrange(len(before))
        path.write_bytes(before[:at] + bytes([before[at] ^ 1 << rng.randrange(8)]) + before[at + 1 :])
        assert f"{path}: its content has changed" in complaint(folder, capsys)
        path.write_bytes(before)
    assert main(["verify-data", str(folder)]) == 0


def test_files_cut_off_missing_or_unknown(folder, capsys):
    first, *_, last = sorted((folder / "train").glob("*.bin"))
    size = first.stat().st_size
    first.write_bytes(first.read_bytes()[:-3])
    last.unlink()
    (folder / "train" / "chunk-99-0.bin").write_bytes(b"x")
    shown_text = complaint(folder, capsys)
    assert f"{first}: {size - 3:,} bytes, the manifest says {size:,}" in shown_text
    assert f"{last}: No such file" in shown_text
    assert "chunk-99-0.bin: the manifest does not know this file" in shown_text


def test_wrong_counts_and_ids(folder, capsys):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    for change, message in {
        "train_tokens": "tokens, the manifest says 1",
        "validation_documents": "documents, the manifest says 1",
        "vocab_size": "the manifest's vocabulary has 1",
        "end_of_text_id": "document 0 does not end with the id 1",
    }.items():
        path.write_text(json.dumps(manifest | {change: 1}))
        assert message in complaint(folder, capsys)


def test_an_index_without_chunks_and_damaged_manifests(folder, capsys):
    index = folder / "train" / "index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"chunks": []}))
    manifest = json.loads((folder / "manifest.json").read_text())
    from datamodules.preparation.preparation_task import file_digest

    manifest["files"]["train/index.json"] = file_digest(index)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "index.json is missing or damaged: it lists no chunks" in complaint(folder, capsys)
    del manifest["files"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "manifest.json is damaged" in complaint(folder, capsys)
    (folder / "manifest.json").write_text("[]")
    assert "manifest.json is missing or damaged" in complaint(folder, capsys)
    (folder / "manifest.json").unlink()
    assert "is not finished" in complaint(folder, capsys)
    assert "no folder that prepare has written" in complaint(folder.parent, capsys)


# inspect-data ---------------------------------------------------------------------------------------------


def shown(folder, capsys, *words):
    assert main(["inspect-data", str(folder), *words]) == 0
    return capsys.readouterr().out


def test_rows_are_shown_as_text_with_boundaries(whole, capsys):
    store = TokenStore(whole / "train")
    tokenizer = Tokenizer.from_file(str(whole / "tokenizer.json"))
    for index in (0, 5):
        shown_text = shown(whole, capsys, "--index", str(index), "--sequence_length", "300")
        ids = store.read(300 * index, 300 * (index + 1))
        expected = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        text = shown_text.partition("\n")[2].replace("|", "").removesuffix("\n")
        assert text == expected.replace("|", "")
        # one before the row, one behind each end of a document that is not the row's own
        assert shown_text.count("|") - 2 * shown_text.count("<|endoftext|>") == 1 + int((ids[:-1] == 0).sum())


@pytest.mark.parametrize("packing", ["PaddedDocuments", "BestFit"])
def test_packed_rows_hold_whole_documents(whole, capsys, packing):
    shown_text = shown(whole, capsys, "--packing", packing, "--sequence_length", "512", "--batch_size", "3")
    rows = shown_text.split("row ")[1:]
    assert len(rows) == 3
    known = set(texts(120))
    for row in rows:
        parts = [
            part.strip("|\n") for part in row.partition("\n")[2].partition("[")[0].split("<|endoftext|>")
        ]
        assert {part for part in parts if part} <= known
    padding = int(np.sum([int(row.partition("[")[2].split()[0]) for row in rows if "[" in row]))
    assert padding >= 0


def test_colours_tell_documents_and_masks_apart(whole, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown_text = shown(whole, capsys, "--sequence_length", "300", "--mask_documents")
    assert "\x1b[36m" in shown_text  # cyan, then yellow
    assert "\x1b[33m" in shown_text
    assert "\x1b[2;4m" in shown_text or "\x1b[4;2m" in shown_text  # the ends of documents: dim, no label


def test_mistakes(whole, capsys):
    for words, message in {
        ("--index", "10000"): "--index is 10000; there are ",
        ("--batch_size", "0"): "--batch_size is 0",
        ("--packing", "Concat"): "Did you mean Concatenate?",
        ("--packing", "BPETokenizer"): "--packing is BPETokenizer, which does not pack documents into rows.",
        ("--packing", "BestFit", "--mask_documents"): "--mask_documents: BestFit has no such argument.",
    }.items():
        assert main(["inspect-data", str(whole), *words]) == 2
        assert message in capsys.readouterr().err
