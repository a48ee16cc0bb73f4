"""Reads documents from the folders that `datasets` saves to disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow

from core.contracts import Reject
from core.errors import ConfigError, nearest
from core.technique import technique
from datamodules.preparation.readers.file_reader import FileReader, Row, checked_metadata
from datamodules.preparation.readers.parquet_documents import BROKEN, check_columns, rows
from datamodules.preparation.readers.source_files import Piece, SourceFiles, whole_files

_STATE, _SPLITS = "state.json", "dataset_dict.json"


@technique(paper="Dataset.save_to_disk of Hugging Face datasets: Arrow IPC streams and state.json")
class HuggingFaceDocuments(FileReader):
    """Reads a dataset that `save_to_disk` of Hugging Face `datasets` wrote: one document per row.

    The package itself is not needed: the files are Arrow streams. A `DatasetDict` has a folder for each split.
    A broken file is rejected from the damage to its end; a row without text is rejected alone.

    Args:
        source: The folder.
        split: Which split of a `DatasetDict`; None: the only one, or all in their order.
        text_column: Column of the text.
        source_column: Column of the source that the document is counted under; None: the name of the
            split's folder where there are several, else "data".
        metadata: Columns that are kept beside the tokens, in documents.parquet: strings; numbers, dates and lists of strings as
            text.

    Raises:
        ConfigError: If the folder was not written by `save_to_disk`, lacks the split or column, or a file is missing.

    Example:
        data:
          init_args:
            reader: {class_path: HuggingFaceDocuments, init_args: {text_column: text}}
    """

    def __init__(
        self,
        source: str,
        split: str | None = None,
        text_column: str = "text",
        source_column: str | None = None,
        metadata: Sequence[str] = (),
    ) -> None:
        self.text_column, self.source_column = text_column, source_column
        self.metadata = checked_metadata("HuggingFaceDocuments", metadata)
        self._folders = split_folders(Path(source).expanduser(), split)
        names = [data_files(folder) for folder in self._folders]
        self.files = SourceFiles(source, (".arrow",))
        self.files.restrict(
            [folder / name for folder, of in zip(self._folders, names, strict=True) for name in of]
        )
        if missing := [str(path) for path in self.files.paths if not path.is_file()]:
            raise ConfigError(f"{missing[0]} is missing; {_STATE} beside it lists it.")

    def options(self) -> dict[str, Any]:
        """Returns the columns."""
        kept = {"metadata": self.metadata} if self.metadata else {}
        return {"text_column": self.text_column, "source_column": self.source_column} | kept

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of files."""
        for path in self.files.paths:
            try:
                with pyarrow.memory_map(str(path)) as file:
                    schema = pyarrow.ipc.open_stream(file).schema
            except BROKEN:  # it is rejected, with the reason, when it is read
                continue
            check_columns(path, schema, self.text_column, self.source_column, metadata=self.metadata)
        return self.files.tasks(whole_files)

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the documents of a file."""
        path = Path(piece["path"])
        name, source = self.files.name(path), self.files.source_of(path)
        if not self.files.readable(path, reject):
            return
        read = 0

        def tables() -> Iterator[pyarrow.RecordBatch]:
            nonlocal read
            for table in checked(pyarrow.ipc.open_stream(file)):
                yield table
                read = file.tell()

        try:
            with pyarrow.memory_map(str(path)) as file:
                columns = self.text_column, self.source_column
                yield from rows(tables(), *columns, source, name, path, reject, self.metadata)
        except BROKEN as error:
            lost = piece["bytes"] - read
            reject(source, str(path), "broken Arrow file", str(error).splitlines()[0], lost)


def checked(stream: Any) -> Iterator[pyarrow.RecordBatch]:
    """Yields the record batches of a stream."""
    for batch in stream:
        batch.validate(full=True)  # an offset out of range would read other memory of the process
        yield batch


def split_folders(folder: Path, split: str | None) -> list[Path]:
    """Returns the folders of the splits to read."""
    if (folder / _STATE).is_file():
        if split:
            raise ConfigError(f"{folder} is a single dataset, without splits: leave out split={split}.")
        return [folder]
    splits = _json(folder / _SPLITS, "splits") if (folder / _SPLITS).is_file() else None
    if not isinstance(splits, list):
        raise ConfigError(
            f"data.source={folder} is no folder of `save_to_disk` of Hugging Face datasets: it has neither "
            f"{_STATE}\nnor {_SPLITS}. For a folder of .parquet files take the reader ParquetDocuments."
        )
    if split is not None and split not in splits:
        listing = ", ".join(map(str, splits))
        raise ConfigError(f"{folder} has no split {split!r}.{nearest(split, set(splits))} It has: {listing}.")
    return [folder / name for name in ([split] if split else splits)]


def data_files(folder: Path) -> list[str]:
    """Returns the names of a dataset's files, in their order."""
    try:
        names = [entry["filename"] for entry in _json(folder / _STATE, "data_files")]
    except (TypeError, KeyError):
        names = []
    if not names or any(os.path.basename(name) != name for name in names):
        raise ConfigError(f"{folder / _STATE} is damaged: it lists no data files beside it.")
    return names


def _json(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is missing or damaged: {type(error).__name__}: {error}") from error
