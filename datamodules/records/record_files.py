"""Reads whole records, objects with fields, from JSON Lines, JSON, tables and Parquet files and saved datasets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from core.contracts import Reject
from core.errors import ConfigError
from datamodules.preparation.readers import json_lines_documents
from datamodules.preparation.readers.hugging_face_documents import checked, data_files, split_folders
from datamodules.preparation.readers.opened_files import unstorable
from datamodules.preparation.readers.parquet_documents import BROKEN, compressed_bytes
from datamodules.preparation.readers.source_files import Piece, SourceFiles, whole_files
from datamodules.records.chats import WrongRecord
from toolkit.bounded import parse_json, read_error, read_inside

Record = dict[str, Any]
Placed = tuple[str, Record]
"""Where a record is, for messages, and the record."""

Spread = Callable[[Record], Iterable[Record]]

STATES = ("state.json", "dataset_dict.json")
BATCH = 256


class RecordFiles:
    """The records of files, in the order of the files' names.

    Read are .jsonl and .ndjson (also .gz and .zst), .json (a list of objects), .tsv (fields separated by tabs, named in
    the first line), .parquet, and folders of `save_to_disk` of Hugging Face datasets.

    Args:
        source: A path, a folder, or a glob.
        columns: Names of the fields of .tsv files without a line that names them; None: the first line does.
        spread: Yields the records that one of the files holds; may raise a `WrongRecord`. None: each is one.

    Raises:
        ConfigError: If there is no such file.
    """

    def __init__(
        self, source: str, columns: tuple[str, ...] | None = None, spread: Spread | None = None
    ) -> None:
        folder = Path(source).expanduser()
        self.source, self.columns, self._spread = source, columns, spread
        self.saved = any((folder / name).is_file() for name in STATES)
        if self.saved:
            found = [part / name for part in split_folders(folder, None) for name in data_files(part)]
            if (folder / STATES[1]).is_file() and not (folder / STATES[0]).is_file():
                splits = ", ".join(str(part) for part in split_folders(folder, None)[:3])
                raise ConfigError(
                    f"{source} is a dataset with splits: name the folders of the splits that are meant, {splits}."
                )
            self.files = SourceFiles(source, (".arrow",))
            self.files.restrict(found)
        else:
            self.files = SourceFiles(source, tuple(READERS))

    def fingerprint(self) -> dict[str, Any]:
        """Returns the files' names, sizes and digests."""
        return self.files.fingerprint()

    def size(self) -> int:
        """Returns the bytes of all files."""
        return sum(path.stat().st_size for path in self.files.paths)

    def records(self, reject: Reject) -> Iterator[Placed]:
        """Yields the records; rejects what is none."""
        for task in self.files.tasks(whole_files):
            for piece in self.files.pieces(task, reject):
                path = Path(piece["path"])
                if self.files.readable(path, reject):
                    source = self.files.source_of(path)
                    found = self._of(path, piece, source, reject)
                    yield from spread_out(found, self._spread, source, reject)

    def _of(self, path: Path, piece: Piece, source: str, reject: Reject) -> Iterator[Placed]:
        name = path.name.lower()
        if name.endswith(".tsv"):
            yield from _table(path, piece, source, reject, self.columns)
            return
        read = _arrow if self.saved else next(read for end, read in READERS.items() if name.endswith(end))
        for place, record in read(path, piece, source, reject):
            if isinstance(record, dict):
                yield place, record
            else:
                reject(source, place, "expected an object with fields", f"found a {type(record).__name__}")


def spread_out(
    found: Iterable[Placed], spread: Spread | None, source: str, reject: Reject
) -> Iterator[Placed]:
    """Yields the records that each record holds, at its place; see :class:`RecordFiles`."""
    for place, record in found:
        try:
            several = [record] if spread is None else list(spread(record))
        except WrongRecord as error:
            reject(source, place, error.reason, error.details)
            continue
        yield from ((place, one) for one in several)


def _lines(path: Path, piece: Piece, source: str, reject: Reject) -> Iterator[tuple[str, Any]]:
    for place, _, text in json_lines_documents.texts(path, piece, source, reject):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            reject(source, place, "this line is not JSON", str(error))
            continue
        if fault := unstorable(json.dumps(record, ensure_ascii=False)):
            reject(source, place, "not UTF-8", fault)
        else:
            yield place, record


def _list(path: Path, piece: Piece, source: str, reject: Reject) -> Iterator[tuple[str, Any]]:
    try:
        found = parse_json(read_inside(path.parent, path.name), unique=False)
    except (OSError, ValueError) as error:
        reject(source, str(path), "cannot be read as JSON", read_error(error), piece["bytes"])
        return
    if isinstance(found, dict) and isinstance(
        found.get("data"), list
    ):  # as SQuAD and Hugging Face's server have it
        found = found["data"]
    if not isinstance(found, list):
        reject(
            source, str(path), "expected a list of objects", f"found a {type(found).__name__}", piece["bytes"]
        )
        return
    for number, record in enumerate(found, 1):
        yield f"{path}, record {number}", record


def _table(
    path: Path, piece: Piece, source: str, reject: Reject, columns: tuple[str, ...] | None
) -> Iterator[Placed]:
    for place, _, text in json_lines_documents.texts(path, piece, source, reject):
        cells = text.rstrip("\r\n").split("\t")
        if columns is None:
            columns = tuple(cells)
        elif len(cells) != len(columns):
            reject(
                source,
                place,
                "another number of fields",
                f"{len(cells)}, not {len(columns)}: {', '.join(columns)[:200]}",
            )
        else:
            yield place, dict(zip(columns, cells, strict=True))


def _parquet(path: Path, piece: Piece, source: str, reject: Reject) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                try:
                    for batch in file.iter_batches(BATCH, row_groups=[group]):
                        yield from _rows(path, batch, number, source, reject)
                        number += len(batch)
                except BROKEN as error:
                    lost = compressed_bytes(file.metadata.row_group(group))
                    reject(source, f"{path}, row group {group}", "broken Parquet file", _first(error), lost)
    except BROKEN as error:
        reject(source, str(path), "broken Parquet file", _first(error), piece["bytes"])


def _arrow(path: Path, piece: Piece, source: str, reject: Reject) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with pyarrow.memory_map(str(path)) as file:
            for batch in checked(pyarrow.ipc.open_stream(file)):
                for begin in range(0, len(batch), BATCH):
                    part = batch.slice(begin, BATCH)
                    yield from _rows(path, part, number, source, reject)
                    number += len(part)
    except BROKEN as error:
        reject(source, str(path), "broken Arrow file", _first(error), piece["bytes"])


def _rows(
    path: Path, batch: pyarrow.RecordBatch, number: int, source: str, reject: Reject
) -> Iterator[Placed]:
    try:
        records: list[Any] = batch.to_pylist()
    except UnicodeDecodeError:  # then row by row, to find which
        records = [None] * len(batch)
    for at, record in enumerate(records):
        place = f"{path}, row {number + at + 1}"
        try:
            yield place, batch.slice(at, 1).to_pylist()[0] if record is None else record
        except UnicodeDecodeError as error:
            reject(source, place, "not UTF-8", str(error))


def _first(error: BaseException) -> str:
    return str(error).partition("\n")[0]


READERS: dict[str, Callable[..., Iterator[tuple[str, Any]]]] = {
    **dict.fromkeys(json_lines_documents.SUFFIXES, _lines),
    ".json": _list,
    ".tsv": _table,
    ".parquet": _parquet,
}
"""End of a file's name -> what reads it."""
