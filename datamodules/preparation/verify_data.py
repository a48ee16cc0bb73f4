"""The command `verify-data`: holds a folder of prepared tokens against its manifest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.configuration.command_parser import Parser
from core.data.prepared import read_manifest, whole_folder
from core.errors import ConfigError
from core.technique import technique

_SPLITS = ("train", "validation")
_SHOWN = 7
_STEP = 1 << 22


@technique(paper="SHA-256, FIPS 180-4; the chunk format is litdata's")
def verify_data(arguments: list[str]) -> int:
    """Checks a folder that prepare wrote: checksums, index, headers, counts, token ids; names what is damaged.

    Example:
        python -m core verify-data prepared/corpus
    """
    parser = Parser(prog="python -m core verify-data", description=verify_data.__doc__)
    parser.add_argument("folder", metavar="DIR", help="the folder that prepare wrote")
    folder = whole_folder(parser.parse_args(arguments).folder)
    manifest = read_manifest(folder)
    try:
        problems = list(_problems(folder, manifest))
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / 'manifest.json'} is damaged: {type(error).__name__}: {error}"
        ) from error
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ConfigError("\n".join([f"{folder} is damaged; prepare it again:", *problems[:_SHOWN], *more]))
    tokens = sum(manifest[f"{split}_tokens"] for split in _SPLITS)
    print(f"{folder} is whole: {len(manifest['files'])} files, {tokens:,} tokens.", file=sys.stdout)
    return 0


def _problems(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each thing that is not as the manifest says."""
    damaged = False
    for name, told in manifest["files"].items():
        if problem := _file_problem(folder / name, told):
            damaged = True
            yield f"{folder / name}: {problem}"
    for split in _SPLITS:
        for path in sorted((folder / split).glob("*")):
            if f"{split}/{path.name}" not in manifest["files"]:
                yield f"{path}: the manifest does not know this file"
    if damaged:
        return  # what is in damaged files says nothing
    for split in _SPLITS:
        try:
            yield from _token_problems(folder / split, split, manifest)
        except ConfigError as error:
            yield str(error)


def _file_problem(path: Path, told: dict[str, Any]) -> str | None:
    from datamodules.preparation.manifest import described

    try:
        found = described(path)
    except OSError as error:
        return str(error.strerror)
    if found["bytes"] != told["bytes"]:
        return f"{found['bytes']:,} bytes, the manifest says {told['bytes']:,}"
    return None if found == told else "its content has changed (SHA-256)"


def _token_problems(folder: Path, split: str, manifest: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong in a split whose files are as they were written."""
    import numpy as np

    from datamodules.packing.token_store import TokenStore

    store = TokenStore(folder)
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
