"""Folders of tokens as litdata writes them."""

import json
import warnings

import zstandard
from litdata import TokensLoader
from litdata.streaming.writer import BinaryWriter


class _Writer(BinaryWriter):
    rank = 0


def write_litdata(folder, documents, kind, chunk_bytes=900, **options):
    """Writes documents, each as `kind(ids)`, with litdata's writer, as `litdata.optimize` does in each worker."""
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = _Writer(str(folder), chunk_bytes=chunk_bytes, item_loader=TokensLoader(), **options)
        for index, ids in enumerate(documents):
            writer.add_item(index, kind(ids))
        writer.done()
    (folder / "0.index.json").rename(folder / "index.json")
    return folder


def compress(folder):
    """Compresses the chunks of a folder as litdata does with `compression="zstd"` and `compression_level="chunk"`."""
    index = json.loads((folder / "index.json").read_text())
    index["config"] |= {"compression": "zstd"}
    for chunk in index["chunks"]:
        plain = folder / chunk["filename"]
        chunk["filename"] = f"{plain.stem}.zstd.bin"
        (folder / chunk["filename"]).write_bytes(zstandard.compress(plain.read_bytes(), 4))
        plain.unlink()
    (folder / "index.json").write_text(json.dumps(index, sort_keys=True))
    return folder
