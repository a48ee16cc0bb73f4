"""Makes columns of record batches without `pyarrow.array`, which imports pandas (60 MB in every worker)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow


def strings(values: Sequence[str]) -> pyarrow.Array:
    """Returns a column of strings, as `pyarrow.array(values, pyarrow.large_string())` does."""
    encoded = [value.encode() for value in values]
    ends = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(value) for value in encoded], out=ends[1:])
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(encoded))]
    return pyarrow.Array.from_buffers(pyarrow.large_string(), len(encoded), buffers)


def flags(values: Sequence[bool]) -> pyarrow.Array:
    """Returns a column of booleans, as `pyarrow.array(values)` does."""
    bits = np.packbits(np.asarray(values, np.bool_), bitorder="little")
    return pyarrow.Array.from_buffers(pyarrow.bool_(), len(values), [None, pyarrow.py_buffer(bits)])
