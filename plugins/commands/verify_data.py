"""The command `verify-data`: holds a folder of prepared tokens against its manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from core import catalog
from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from toolkit.bounded import open_inside, read_error
from toolkit.manifest_schema import CHECKSUM
from toolkit.prepared import (
    MANIFEST,
    TOKENIZER,
    finished_folder,
    is_edited,
    load_tokenizer,
    read_tokenizer,
    split_folder,
    splits_of,
    unverified_manifest,
)

_SHOWN = 7
_STEP = 1 << 22


@technique(paper="SHA-256, FIPS 180-4; the chunk format is litdata's")
def verify_data(arguments: list[str]) -> int:
    """Checks a folder that prepare wrote: checksums, index, headers, counts, token ids; names what is damaged.

    Nothing outside the folder is read, and nothing but regular files.

    Example:
        python -m core verify-data prepared/corpus
    """
    parser = Parser(prog="python -m core verify-data", description=verify_data.__doc__)
    parser.add_argument("folder", metavar="DIR", help="the folder that prepare wrote")
    folder = finished_folder(parser.parse_args(arguments).folder)
    manifest = unverified_manifest(folder)
    counts = [f"{split}_{what}" for split in splits_of(manifest) for what in ("tokens", "documents")]
    if missing := [name for name in ("files", *counts) if name not in manifest]:
        raise ConfigError(f"{folder / MANIFEST} is damaged: it does not say {missing[0]}.")
    if problems := list(_problems(folder, manifest)):
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ConfigError("\n".join([f"{folder} is damaged; prepare it again:", *problems[:_SHOWN], *more]))
    tokens = sum(manifest[f"{split}_tokens"] for split in splits_of(manifest))
    print(f"{folder} is complete: {len(manifest['files'])} files, {tokens:,} tokens.")
    if CHECKSUM not in manifest:
        print(
            f"An earlier version prepared it: {MANIFEST} has no checksum of its own, nor of plan.json and the report. "
            "Edited\nfigures in them cannot be found."
        )
    return 0


def _problems(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each thing that is not as the manifest says."""
    damaged = False
    if is_edited(manifest):
        yield f"{folder / MANIFEST}: its figures have been changed since prepare wrote them (SHA-256)"
    for name, expected in (manifest["files"] | manifest.get("extras", {})).items():
        if name not in manifest["files"] and not os.path.lexists(folder / name):
            continue
        if problem := _file_problem(folder, name, expected):
            damaged |= name in manifest["files"]
            yield f"{folder / name}: {problem}"
    for split in ("train", "validation", "test"):
        for path in sorted((folder / split).glob("*")):
            if f"{split}/{path.name}" not in manifest["files"]:
                yield f"{ascii(str(path))[1:-1]}: the manifest does not know this file"
    if damaged:
        return  # what is in damaged files says nothing
    checks: list[Callable[..., Iterator[str]]] = [_tokenizer_problems]
    checks += [partial(_token_problems, split=split) for split in splits_of(manifest)]
    for check in checks:
        try:
            yield from check(folder, manifest)
        except ConfigError as error:
            yield str(error)


def _file_problem(folder: Path, name: str, expected: dict[str, Any]) -> str | None:
    try:
        with open_inside(folder, name) as stream:
            size = stream.seek(0, os.SEEK_END)
            if size != expected["bytes"]:
                return f"{size:,} bytes, the manifest says {expected['bytes']:,}"
            stream.seek(0)
            digest = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        return read_error(error)
    return None if digest == expected["sha256"] else "its content has changed (SHA-256)"


def _tokenizer_problems(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    vocabulary = load_tokenizer(read_tokenizer(folder, manifest), folder / TOKENIZER).get_vocab()
    largest, vocab_size = max(vocabulary.values(), default=-1), manifest["vocab_size"]
    if largest >= vocab_size:
        yield f"{folder / TOKENIZER}: it has the id {largest:,}, the manifest's vocabulary has {vocab_size:,}"


def _token_problems(folder: Path, manifest: dict[str, Any], split: str) -> Iterator[str]:
    """Yields what is wrong in a split whose files are as they were written."""
    import numpy as np

    folder = split_folder(folder, split)
    store = catalog.offering("token_store", "data").load().open(folder)
    found = {"tokens": len(store), "documents": store.number_of_documents}
    for what, number in found.items():
        if number != manifest[f"{split}_{what}"]:
            yield f"{folder}: {number:,} {what}, the manifest says {manifest[f'{split}_{what}']:,}"
    vocab_size, end = manifest["vocab_size"], manifest["end_of_text_id"]
    for begin in range(0, len(store), _STEP):
        tokens = store.read(begin, begin + _STEP)
        if (largest := int(tokens.max())) >= vocab_size:
            yield f"{folder}: token id {largest} at {begin + int(tokens.argmax()):,}, the vocabulary has {vocab_size:,}"
            return
    last = np.append(store.document_starts()[1:], len(store)) - 1
    for at in range(0, len(last), _STEP):
        ends = np.array([store.read(i, i + 1)[0] for i in last[at : at + _STEP].tolist()])
        if (wrong := np.flatnonzero(ends != end)).size:
            yield f"{folder}: document {at + int(wrong[0]):,} does not end with the id {end}"
            return
