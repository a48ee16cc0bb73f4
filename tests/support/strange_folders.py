"""Prepared folders as a stranger may hand them over: changed, and all checksums made to fit."""

import hashlib
import json
import os
import shutil
from contextlib import suppress

import numpy as np

from core.errors import ConfigError
from core.pretrain_datamodule import PretrainDataModule
from datamodules.packing.best_fit import BestFit
from datamodules.packing.block_checksums import CHECKSUMS, sums_of, write_sums
from datamodules.packing.token_index import read_index
from datamodules.preparation.preparation_task import file_digest
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.writers.token_shards import TokenShards
from toolkit.manifest_schema import checksum


def sign(folder, manifest=None):
    """Writes block checksums and a manifest that fit what is in the folder."""
    for sums in folder.glob(f"*/{CHECKSUMS}"):
        with suppress(OSError, ValueError):  # where the index itself is a strange one
            chunks = [sums.parent / name for name in read_index(sums.parent).names]
            if all(chunk.is_file() and chunk.stat().st_size < 1 << 30 for chunk in chunks):
                write_sums(sums, map(sums_of, chunks))
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) if manifest is None else manifest
    for name in manifest["files"]:
        if (folder / name).is_file():
            manifest["files"][name] = file_digest(folder / name)
    path.write_text(json.dumps(manifest | {"sha256": checksum(manifest)}))


def in_manifest(**values):
    def change(folder, _):
        manifest = json.loads((folder / "manifest.json").read_text())
        sign(folder, manifest | values)

    return change


def in_files(name, known=None):
    def change(folder, _):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = known or {"bytes": 1, "sha256": "0" * 64}
        sign(folder, manifest)

    return change


def in_index(change):
    def apply(folder, outside):
        path = folder / "train" / "index.json"
        index = json.loads(path.read_text())
        change(index, outside)
        path.write_text(json.dumps(index))
        sign(folder)

    return apply


def chunk(**values):
    return in_index(lambda index, _: index["chunks"][0].update(values))


def text(name, content):
    """The file has this content, which need not be JSON; the manifest fits, if it is not that itself."""

    def change(folder, _):
        (folder / name).write_bytes(content)
        if name != "manifest.json":
            sign(folder)

    return change


def place(name, put):
    """Something else lies where a file was."""

    def change(folder, outside):
        path = folder / name
        copy = outside / path.name
        shutil.move(path, copy)
        put(path, copy)

    return change


def linked(path, copy):
    path.symlink_to(copy)


def piped(path, _):
    os.mkfifo(path)


def huge(path, _):
    path.touch()
    os.truncate(path, 1 << 40)


def header(change):
    """Other offsets in the header of the first chunk."""

    def apply(folder, _):
        path = first_chunk(folder)
        content = np.frombuffer(path.read_bytes(), np.uint8).copy()
        words = content[: len(content) // 4 * 4].view(np.uint32)
        change(words[: words[0] + 2])
        path.write_bytes(content.tobytes())
        sign(folder)

    return apply


def first_chunk(folder):
    return (
        folder / "train" / json.loads((folder / "train" / "index.json").read_text())["chunks"][0]["filename"]
    )


def _swapped(words):
    words[2], words[3] = words[3], words[2]


def _between(words):
    words[2] += 1


def _absolute(index, outside):
    index["chunks"][0]["filename"] = str(outside / "chunk.bin")


DEEP = b"[" * 200_000 + b"]" * 200_000
CHUNK = "train/chunk-0-0.bin"
FILES = ("manifest.json", "tokenizer.json", "train/index.json", CHUNK)

STRANGE = {
    "chunk above": chunk(filename="../../../chunk.bin"),
    "chunk at an absolute path": in_index(_absolute),
    "chunk below": chunk(filename="a/b.bin"),
    "chunk with an escape sequence": chunk(filename="\x1b[2Jx.bin"),
    "chunk listed twice": in_index(lambda index, _: index["chunks"].append(index["chunks"][0])),
    "chunk of no documents": chunk(chunk_size=0),
    "negative documents": chunk(chunk_size=-3),
    "documents as a truth": chunk(chunk_size=True),
    "chunk of a fraction": chunk(chunk_bytes=99.5),
    "chunk larger than offsets reach": chunk(chunk_bytes=1 << 40),
    "more documents than bytes": chunk(chunk_size=1 << 20),
    "chunks as an object": in_index(lambda index, _: index.update(chunks={"a": 1})),
    "chunk as a number": in_index(lambda index, _: index["chunks"].append(7)),
    "index as a list": text("train/index.json", b"[]"),
    "type of tokens as a list": in_index(lambda index, _: index["config"].update(data_format=[[]])),
    "offsets that do not rise": header(_swapped),
    "offsets between tokens": header(_between),
    "files above": in_files("../../x"),
    "files at absolute paths": in_files("/etc/passwd"),
    "files without a digest": in_files("train/x", {"bytes": 1}),
    "files of negative size": in_files("train/x", {"bytes": -1, "sha256": "0" * 64}),
    "files as a list": in_manifest(extras=[1]),
    "vocabulary below 0": in_manifest(vocab_size=-1),
    "vocabulary of 0": in_manifest(vocab_size=0),
    "vocabulary as text": in_manifest(vocab_size="300"),
    "vocabulary as a truth": in_manifest(vocab_size=True),
    "vocabulary without bounds": in_manifest(vocab_size=10**30),
    "end of text beyond the vocabulary": in_manifest(end_of_text_id=300),
    "negative tokens": in_manifest(train_tokens=-5),
    "loss as text": in_manifest(unigram_loss="low"),
    "transforms as a number": in_manifest(transforms=3),
    "transforms as a number, by their former name": in_manifest(stages=3),
    "sources as a list": in_manifest(sources=[3]),
    "lengths of nothing": in_manifest(lengths={"long": 3}),
    **{f"{name} nested deeply": text(name, DEEP) for name in FILES[:3]},
    **{f"{name} is not UTF-8": text(name, b'{"a": "\xff"}') for name in FILES[:3]},
    **{f"{name} is binary": text(name, bytes(range(256))) for name in FILES[:3]},
    **{f"{name} holds NaN": text(name, b'{"a": NaN}') for name in FILES[:3]},
    **{f"{name} has a key twice": text(name, b'{"a": 1, "a": 2}') for name in FILES[:3]},
    **{f"{name} leads out": place(name, linked) for name in (*FILES, "train")},
    **{f"{name} is a pipe": place(name, piped) for name in FILES},
    **{f"{name} is a device": place(name, lambda path, _: path.symlink_to("/dev/zero")) for name in FILES},
    **{f"{name} is a folder": place(name, lambda path, _: path.mkdir()) for name in FILES},
    **{f"{name} has a TB": place(name, huge) for name in FILES},
    **{f"{name} is a link to itself": place(name, lambda path, _: path.symlink_to(path)) for name in FILES},
}


def build(folder, **options):
    stages = JSONLinesDocuments, BPETokenizer(300), TokenShards(), options.pop("packing", BestFit())
    return PretrainDataModule(
        *stages,
        source=str(folder),
        sequence_length=16,
        batch_size=2,
        cache_dir=str(folder / "cache"),
        **options,
    )


def complaint_of_a_run(folder, **options):
    """What a run says of a folder before its first batch, or with it; None if it reads an epoch of it."""
    try:
        data = build(folder, **options)
        data.setup()
        for _ in data.train_dataloader():
            pass
        for _ in data.val_dataloader():
            pass
    except ConfigError as error:
        return str(error)
    return None


def digest(folder):
    """A digest of all that is in a folder, to see that nothing has been written."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(repr((str(path), path.lstat().st_mtime_ns)).encode())
    return found.hexdigest()
