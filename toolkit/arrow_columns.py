"""Makes columns of record batches without `pyarrow.array`, which imports pandas (60 MB in every worker)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow

from core.errors import ConfigError, nearest


def strings(values: Sequence[str | None]) -> pyarrow.Array:
    """Returns a column of strings, as `pyarrow.array(values, pyarrow.large_string())` does; None: null."""
    encoded = [b"" if value is None else value.encode() for value in values]
    ends = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(value) for value in encoded], out=ends[1:])
    known = flags([value is not None for value in values]).buffers()[1] if None in values else None
    buffers = [known, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(encoded))]
    return pyarrow.Array.from_buffers(pyarrow.large_string(), len(encoded), buffers)


def numbers(values: np.ndarray) -> pyarrow.Array:
    """Returns a column of numbers of the same type as an array's, such as int64 or float64; shares its memory."""
    buffers = [None, pyarrow.py_buffer(np.ascontiguousarray(values))]
    return pyarrow.Array.from_buffers(pyarrow.from_numpy_dtype(values.dtype), len(values), buffers)


def flags(values: Sequence[bool]) -> pyarrow.Array:
    """Returns a column of booleans, as `pyarrow.array(values)` does."""
    bits = np.packbits(np.asarray(values, np.bool_), bitorder="little")
    return pyarrow.Array.from_buffers(pyarrow.bool_(), len(values), [None, pyarrow.py_buffer(bits)])


def column_of(batch: pyarrow.RecordBatch, name: str, transform: str) -> pyarrow.Array:
    """Returns a column of documents that an argument of a transform names.

    Raises:
        ConfigError: If there is none.
    """
    if name in batch.schema.names:
        return batch[name]
    names = [other for other in batch.schema.names if other not in ("text", "id")]
    raise ConfigError(
        f"{transform}: the documents have no column {name!r}.{nearest(name, set(names))}\nThey have {', '.join(names)}. "
        "See which metadata the reader gives, and what transforms before it add."
    )


def with_column(
    batch: pyarrow.RecordBatch, name: str, column: pyarrow.Array, transform: str
) -> pyarrow.RecordBatch:
    """Returns a batch with a further column, which a transform adds to documents.

    Raises:
        ConfigError: If the documents have a column of this name.
    """
    if name in batch.schema.names:
        raise ConfigError(
            f"{transform}: the documents have a column {name!r} already. Give another name for the one that it adds."
        )
    return batch.append_column(name, column)
