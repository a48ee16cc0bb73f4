"""LitdataDocuments: texts that litdata's writer wrote, in each of its layouts, as litdata reads them."""

import json
import pickle
import struct

import numpy as np
import pytest
from litdata import StreamingDataset

from core.errors import ConfigError
from datamodules.preparation.readers.litdata_documents import LitdataDocuments
from tests.support.litdata_folders import compress, write_litdata
from tests.support.raw_folders import write_texts

TEXTS = [f"Dokument {number}. " + "naïve 北京 " * (number % 7) for number in range(60)]
ITEMS = {
    "strings": (TEXTS, "text"),
    "dicts": ([{"url": "u", "text": text, "n": 3} for text in TEXTS], "text"),
    "dicts of another key": ([{"n": 3, "body": text} for text in TEXTS], "body"),
    "dicts with a dict": ([{"meta": {"a": "1", "b": [2, "3"]}, "text": text} for text in TEXTS], "text"),
    "tuples": ([(3, text, "u") for text in TEXTS], "1"),
    "lists": ([[text, 1.5] for text in TEXTS], "0"),
}


def read(reader):
    rejected = []

    def note(source, place, reason, details, lost=0):
        rejected.append((place, reason, details))

    batches = [batch for task in reader.tasks() for batch in reader.read(task, note)]
    return [text for batch in batches for text in batch["text"].to_pylist()], rejected


@pytest.mark.parametrize("compressed", [None, "chunk", "batch"])
@pytest.mark.parametrize("kind", ITEMS)
def test_what_litdata_wrote(kind, compressed, tmp_path):
    items, field = ITEMS[kind]
    if compressed and isinstance(items[0], dict):
        pytest.skip("litdata compresses tables within the table")
    folder = write_texts(tmp_path / "optimized", items, compressed=compressed)
    assert len(list(folder.glob("*.bin"))) > 1
    assert read(pickle.loads(pickle.dumps(LitdataDocuments(str(folder), field)))) == (TEXTS, [])


@pytest.mark.parametrize("kind", ["strings", "dicts", "tuples"])
def test_litdata_reads_the_same(kind, tmp_path):
    items, field = ITEMS[kind]
    folder = write_texts(tmp_path / "optimized", items)
    found = [
        item if isinstance(item, str) else item[int(field) if field.isdigit() else field]
        for item in StreamingDataset(str(folder))
    ]
    assert read(LitdataDocuments(str(folder), field))[0] == found


def test_a_chunk_with_a_table_and_items_is_read_by_its_items(tmp_path):
    folder = write_texts(tmp_path / "optimized", TEXTS)
    index = json.loads((folder / "index.json").read_text())
    path = folder / index["chunks"][0]["filename"]
    path.write_bytes(path.read_bytes() + b"ARROW1" + struct.pack("<I", 6) + b"LDARW01\0")
    index["chunks"][0]["chunk_bytes"] += 18
    (folder / "index.json").write_text(json.dumps(index))
    assert read(LitdataDocuments(str(folder))) == (TEXTS, [])


def damage(raw, kind):
    if kind == "table":
        return raw[:-200] + bytes(100) + raw[-100:]
    if kind == "size of the table":
        return raw[:-12] + struct.pack("<I", 1 << 31) + raw[-8:]
    place = {"frame": 24 + 4 * (struct.unpack_from("<I", raw, 12)[0] + 1) + 8, "version": 8, "items": 12}[
        kind
    ]
    return raw[:place] + b"\x77" + raw[place + 1 :]


@pytest.mark.parametrize("kind", ["table", "size of the table", "frame", "version", "items"])
def test_a_damaged_chunk_is_rejected_and_the_others_read(kind, tmp_path):
    items, level = (ITEMS["dicts"][0], None) if "table" in kind else (TEXTS, "batch")
    folder = write_texts(tmp_path / "optimized", items, compressed=level)
    chunk = json.loads((folder / "index.json").read_text())["chunks"][0]
    path = folder / chunk["filename"]
    path.write_bytes(damage(path.read_bytes(), kind))
    texts, [(place, reason, _)] = read(LitdataDocuments(str(folder)))
    assert (place, reason) == (str(path), "broken chunk")
    assert texts == TEXTS[chunk["chunk_size"] :]


def refused(folder, said, field="text"):
    with pytest.raises(ConfigError, match=said) as caught:
        LitdataDocuments(str(folder), field)
    assert "index.json is missing or damaged" in str(caught.value)


def test_folders_of_other_things_are_refused(tmp_path):
    refused(tmp_path, "No such file")
    refused(write_litdata(tmp_path / "tokens", [[1, 2]], np.array), "config data/litdata")
    folder = write_texts(tmp_path / "dicts", [{"text": "a", "n": 3, "meta": {"a": "b"}}])
    refused(folder, r"no field 'body'\. They have text, n, meta", "body")
    refused(folder, "'n' is 'int' in its items", "n")
    refused(folder, "'meta' is no string", "meta")


@pytest.mark.parametrize("change", [{"encryption": {}}, {"compression": "lz4"}, {"compression": "zstd", "compression_level": "sample"},
                                    {"data_format": []}, {"data_spec": "[1, {}]"}, {"data_spec": "{"}])  # fmt: skip
def test_a_damaged_index_is_refused(change, tmp_path):
    folder = write_texts(tmp_path / "optimized", TEXTS)
    index = json.loads((folder / "index.json").read_text())
    index["config"] |= change
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"index.json is missing or damaged"):
        LitdataDocuments(str(folder))


def test_tokens_stay_with_their_own_data_module(tmp_path):
    folder = compress(write_litdata(tmp_path / "tokens", [[1, 2]], np.array))
    refused(folder, "holds tokens")
