"""Folders of raw text as litdata and MosaicML's streaming write them."""

import json
import warnings

import numpy as np
import zstandard
from litdata.streaming.framed_zstd import pack_framed_zstd
from litdata.streaming.writer import BinaryWriter


class _Writer(BinaryWriter):
    rank = 0


def write_texts(folder, items, chunk_bytes=900, compressed=None):
    """Writes items with litdata's writer, as `litdata.optimize` does in each worker; `compressed`: "chunk" or "batch"."""
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = _Writer(str(folder), chunk_bytes=chunk_bytes)
        for index, item in enumerate(items):
            writer.add_item(index, item)
        writer.done()
    (folder / "0.index.json").rename(folder / "index.json")
    if compressed:
        _compress(folder, compressed)
    return folder


def _compress(folder, level):
    """Compresses chunks as litdata does where the package zstd is installed."""
    index = json.loads((folder / "index.json").read_text())
    index["config"] |= {"compression": "zstd", "compression_level": level}
    for chunk in index["chunks"]:
        path = folder / chunk["filename"]
        plain = path.read_bytes()
        if level == "chunk":
            path.unlink()
            chunk["filename"] = f"{path.stem}.zstd.bin"
            (folder / chunk["filename"]).write_bytes(zstandard.compress(plain))
        else:
            path.write_bytes(pack_framed_zstd(plain, zstandard.ZstdCompressor(), 3))
            chunk["chunk_bytes"] = path.stat().st_size
    (folder / "index.json").write_text(json.dumps(index))


def write_mds(folder, texts, size=2000, column="text"):
    """Writes samples with a text and a number, about so many bytes in a shard, in the layout of MDS, version 2."""
    folder.mkdir(parents=True)
    described = {"column_encodings": ["int", "str"], "column_names": ["a", column], "column_sizes": [8, None]}
    shards, held = [], []

    def flush():
        head = json.dumps(described, sort_keys=True).encode()
        begin = 4 * (len(held) + 2) + len(head)
        offsets = (np.cumsum([0, *map(len, held)]) + begin).astype("<u4")
        name = f"shard.{len(shards):05}.mds"
        content = np.uint32(len(held)).tobytes() + offsets.tobytes() + head + b"".join(held)
        (folder / name).write_bytes(content)
        data = {"basename": name, "bytes": len(content), "hashes": {}}
        shards.append(described | {"format": "mds", "version": 2, "compression": None, "hashes": [],
                                   "raw_data": data, "samples": len(held), "size_limit": size, "zip_data": None})  # fmt: skip
        held.clear()

    for number, text in enumerate(texts):
        raw = text.encode()
        held.append(np.uint32(len(raw)).tobytes() + np.int64(number).tobytes() + raw)
        if sum(map(len, held)) > size:
            flush()
    if held:
        flush()
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder
