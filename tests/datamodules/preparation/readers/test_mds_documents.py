"""MDSDocuments: folders that MosaicML's writer wrote, what litdata reads of the same shards, and damaged and hostile ones."""

import base64
import json
import os
import pickle
import shutil

import numpy as np
import pytest
from litdata import StreamingDataset

from core.contracts import raise_reject
from core.errors import ConfigError
from datamodules.preparation.readers.mds_documents import MDSDocuments
from tests.support.mosaic_folders import DOCUMENTS, FOLDERS
from tests.support.raw_folders import write_mds

TEXTS = [f"Document {number}. " + "word " * (number % 7) for number in range(50)]


def read(reader, reject=None):
    rejected = []

    def note(source, place, reason, details, lost=0):
        rejected.append((place, reason, details, lost))

    batches = [batch for task in reader.tasks() for batch in reader.read(task, reject or note)]
    return [text for batch in batches for text in batch["text"].to_pylist()], rejected


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_mosaicml_wrote(kind, tmp_path):
    for name, content in FOLDERS[kind].items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    reader = pickle.loads(pickle.dumps(MDSDocuments(str(tmp_path))))
    assert read(reader) == (DOCUMENTS, [])
    with pytest.raises(ConfigError, match=r"the column 'meta' is 'json', not str"):
        MDSDocuments(str(tmp_path), "meta")


def test_litdata_reads_the_same(tmp_path):
    folder = write_mds(tmp_path / "mds", TEXTS, size=500)
    assert len(list(folder.glob("*.mds"))) > 1
    reader = MDSDocuments(str(folder))
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        shard["zip_data"] = shard["raw_data"]  # litdata takes names and sizes from there
    (shutil.copytree(folder, tmp_path / "litdata") / "index.json").write_text(json.dumps(index))
    assert read(reader)[0] == [sample["text"] for sample in StreamingDataset(str(tmp_path / "litdata"))]
    [batch] = [batch for task in reader.tasks() for batch in reader.read(task, raise_reject)]
    assert batch["id"].to_pylist()[:2] == ["shard.00000.mds:0", "shard.00000.mds:1"]
    assert set(batch["source"].to_pylist()) == {"mds"}


def test_shards_in_subfolders_as_merge_index_leaves_them(tmp_path):
    write_mds(tmp_path / "mds" / "0", TEXTS[:20])
    write_mds(tmp_path / "mds" / "1", TEXTS[20:])
    shards = []
    for part in ("0", "1"):
        for shard in json.loads((tmp_path / "mds" / part / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{part}/{shard['raw_data']['basename']}"
            shards.append(shard)
    (tmp_path / "mds" / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    assert read(MDSDocuments(str(tmp_path / "mds")))[0] == TEXTS


def damaged(folder, change):
    path = folder / "shard.00000.mds"
    raw = bytearray(path.read_bytes())
    path.write_bytes(change(raw))


def put(raw, place, number):
    raw[place : place + 4] = np.uint32(number).tobytes()
    return raw


DAMAGE = {
    "cut off": (lambda raw: raw[:-5], "bytes, not the"),
    "longer": (lambda raw: raw + b"x", "more than the"),
    "another number of items": (lambda raw: put(raw, 0, 3), "it has 3 items"),
    "huge number of items": (lambda raw: put(raw, 0, 0xFFFFFFFF), "it has 4,294,967,295 items"),
    "offset beyond the end": (lambda raw: put(raw, 8, 1 << 30), "offsets do not rise"),
    "offset in the header": (lambda raw: put(raw, 4, 0), "offsets do not rise"),
    "text beyond its item": (
        lambda raw: put(raw, int(np.frombuffer(raw[4:8], "<u4")[0]), 1 << 31),
        "longer than the item",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_shard_is_rejected_and_the_others_read(case, tmp_path):
    change, said = DAMAGE[case]
    folder = write_mds(tmp_path / "mds", TEXTS, size=500)
    first = json.loads((folder / "index.json").read_text())["shards"][0]
    damaged(folder, change)
    texts, [(place, reason, details, lost)] = read(MDSDocuments(str(folder)))
    assert texts == TEXTS[first["samples"] :]
    assert (reason, place) == ("broken chunk", str(folder / "shard.00000.mds"))
    assert said in details
    assert lost == (folder / "shard.00000.mds").stat().st_size


def test_one_text_that_is_no_utf8(tmp_path):
    folder = write_mds(tmp_path / "mds", TEXTS)
    damaged(folder, lambda raw: raw.replace(b"Document 1.", b"Document\xff1."))
    texts, [(place, reason, _, _)] = read(MDSDocuments(str(folder)))
    assert texts == [TEXTS[0], *TEXTS[2:]]
    assert (reason, place) == ("not UTF-8", f"{folder / 'shard.00000.mds'}, item 1")


INDEX = {
    "no JSON": ("{", "no JSON"),
    "a list": ([], "no index"),
    "no shards": ({"shards": []}, "lists no items"),
    "another format": ({"format": "json"}, "kind"),
    "of the future": ({"version": 3}, "kind"),
    "out of the folder": (
        {"raw_data": {"basename": "../secret.mds", "bytes": 9}},
        "no path inside the folder",
    ),
    "absolute": ({"raw_data": {"basename": "/etc/passwd", "bytes": 9}}, "no path inside the folder"),
    "negative": ({"raw_data": {"basename": "shard.00000.mds", "bytes": -1}}, "-1 bytes or items"),
    "huge": ({"samples": 1 << 60}, "bytes or items"),
    "another codec": ({"compression": "snappy:1"}, "snappy"),
    "no such column": ({"column_names": ["a", "b"]}, "no field 'text'"),
    "pickled": ({"column_encodings": ["int", "pkl"]}, "'pkl', not str"),
    "a size that cannot be": ({"column_sizes": [-8, None]}, "cannot be"),
    "sizes of others": ({"column_sizes": [8]}, "not str"),
    "no names": ({"column_names": None}, "no index"),
}


@pytest.mark.parametrize("case", INDEX)
def test_a_damaged_index_is_refused(case, tmp_path):
    change, said = INDEX[case]
    folder = write_mds(tmp_path / "mds", TEXTS)
    index = json.loads((folder / "index.json").read_text())
    if isinstance(change, dict):
        index["shards"] = change["shards"] if "shards" in change else [index["shards"][0] | change]
        change = index
    (folder / "index.json").write_text(change if isinstance(change, str) else json.dumps(change))
    with pytest.raises(ConfigError, match=said) as caught:
        MDSDocuments(str(folder))
    assert "MDSWriter" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4


def test_files_outside_of_the_folder_are_not_read(tmp_path):
    folder = write_mds(tmp_path / "mds", TEXTS)
    (folder / "shard.00000.mds").rename(tmp_path / "other")
    os.symlink(tmp_path / "other", folder / "shard.00000.mds")
    _, [(_, reason, details, _)] = read(MDSDocuments(str(folder)))
    assert reason == "broken chunk"
    assert "leads out of the folder" in details


def test_a_shard_that_decompresses_to_more_than_it_says(tmp_path):
    for name, content in FOLDERS["zstd"].items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    index = json.loads((tmp_path / "index.json").read_text())
    shard = next(shard for shard in index["shards"] if shard["samples"])
    shard["raw_data"]["bytes"] -= 1
    (tmp_path / "index.json").write_text(json.dumps(index))
    _, rejected = read(MDSDocuments(str(tmp_path)))
    assert [details.partition(" the ")[0] for *_, details, _ in rejected] == ["it has more than"]


def test_the_splits_of_a_folder_are_named(tmp_path):
    write_mds(tmp_path / "mds" / "train", TEXTS)
    with pytest.raises(ConfigError, match=r"Name one of its folders: .*mds/train"):
        MDSDocuments(str(tmp_path / "mds"))
