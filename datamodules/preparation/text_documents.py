"""Reads documents from text, Markdown and JSON Lines files."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.contracts import DocumentSource
from core.errors import ConfigError, nearest
from core.technique import technique
from datamodules.preparation import python_docs

SUFFIXES = (".txt", ".md", ".jsonl")


@technique(
    paper="JSON Lines, jsonlines.org; the built-in text is pydoc's topics and the library's docstrings",
    maturity="stable",
)
class TextDocuments(DocumentSource):
    """The documents of a file, of a folder and its subfolders, or of the files that a glob matches.

    A .txt or .md file is one document; so is every line of a .jsonl file, which holds an object with the
    field "text". Files are taken in the order of their names. Blank documents are left out. UTF-8 only.

    Args:
        source: A path, a glob (`corpus/**/*.md`), or "python-docs": about 2 MB of English that every
            Python installation carries, its language reference and the docstrings of its library.

    Raises:
        ConfigError: If nothing readable is found. While reading: at the file and byte or line at fault.

    Example:
        data:
          init_args:
            source: ~/corpus
            reader: TextDocuments
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._files = [] if source == python_docs.NAME else _find(source)

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the files' names, sizes and digests; for the built-in text, what decides it."""
        if not self._files:
            return python_docs.fingerprint()
        root = os.path.commonpath([file.parent for file in self._files])
        described = []
        for file in self._files:
            with _open(file) as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                described.append([file.relative_to(root).as_posix(), stream.tell(), digest])
        return {"files": described}

    def documents(self) -> Iterator[str]:
        """Yields each document's text; see the class for what a document is."""
        empty = True
        for text in self._texts():
            if text and not text.isspace():
                empty = False
                yield text
        if empty:
            raise ConfigError(
                f"data.source={self.source}: all documents are blank; there is no text to train on."
            )

    def _texts(self) -> Iterator[str]:
        if not self._files:
            yield from python_docs.python_documents()
        for file in self._files:
            if file.suffix.lower() == ".jsonl":
                yield from _json_lines(file)
            else:
                with _open(file) as stream:
                    yield _decode(stream.read(), file, 0)


def _find(source: str) -> list[Path]:
    """Returns the files that a path or glob means, sorted by name."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    elif path.is_file():
        found = [path]
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
    files = sorted(
        (file for file in found if file.suffix.lower() in SUFFIXES), key=lambda file: file.as_posix()
    )
    if files:
        return files
    kinds = ", ".join(SUFFIXES)
    if found:
        raise ConfigError(
            f"data.source={source}: none of the {len(found)} file(s) found, such as {found[0]},\nis of a kind "
            f"that is read: {kinds}. Convert or rename them."
        )
    around = path.parent if path.parent.is_dir() else Path()
    hint = nearest(path.name, {python_docs.NAME, *(entry.name for entry in around.iterdir())})
    raise ConfigError(
        f"data.source={source}: no such file or folder, and no file matches it as a glob.{hint}\nLooked from "
        f"{Path.cwd()} for files of the kinds {kinds}; {python_docs.NAME} is the built-in text."
    )


def _open(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error


def _decode(data: bytes, file: Path, offset: int) -> str:
    """Decodes what stands at a byte offset of a file; a byte order mark at its start is dropped."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8: byte {offset + error.start:,} is 0x{data[error.start]:02x}. "
            f"Convert it, for example: iconv -f latin1 -t utf-8"
        ) from None
    return text if offset else text.removeprefix(codecs.BOM_UTF8.decode())


def _json_lines(file: Path) -> Iterator[str]:
    offset = 0
    with _open(file) as stream:
        for number, line in enumerate(stream, 1):
            text = _decode(line, file, offset)
            offset += len(line)
            if not text.isspace():
                yield _text_field(text, f"{file}:{number}")


def _text_field(line: str, where: str) -> str:
    """Returns the field "text" of a JSON object."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: this line is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(
            f'{where}: expected an object with the field "text", found a {type(record).__name__}.'
        )
    if "text" not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise ConfigError(f'{where}: the object has no field "text". Its fields: {fields}.')
    text = record["text"]
    if not isinstance(text, str):
        raise ConfigError(f'{where}: the field "text" is a {type(text).__name__}, not a string.')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: character {error.start} of the text is half of a surrogate pair."
        ) from None
    return text
