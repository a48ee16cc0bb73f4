"""Records in files by ranges of their keys."""

from itertools import pairwise

import numpy as np
import pytest

from datamodules.preparation.duplicates import spilled_records
from datamodules.preparation.duplicates.spilled_records import SpilledRecords


@pytest.mark.parametrize(("files", "end"), [(1, 1 << 64), (7, 1 << 64), (50, 1 << 40)])
def test_records_come_back_by_key_in_the_order_of_add(tmp_path, monkeypatch, files, end):
    monkeypatch.setattr(spilled_records, "_BUFFER_BYTES", 3000)
    rng = np.random.default_rng(0)
    keys = rng.integers(0, end, 5000, np.uint64)
    keys[::3] = keys[0]
    keys[7] = end - 1
    monkeypatch.setattr(spilled_records, "PARTITION_BYTES", keys.nbytes // files)
    spilled = SpilledRecords(tmp_path / "spilled", keys.dtype, len(keys), end)
    numbers = SpilledRecords(tmp_path / "numbers", keys.dtype, len(keys), end)
    for some in np.array_split(np.arange(len(keys), dtype=np.uint64), 40):
        spilled.add(keys[some], keys[some])
        numbers.add(some, keys[some])
    parts = list(spilled.partitions())
    assert len(parts) == pytest.approx(files, abs=1)
    assert all(one.max() < other.min() for one, other in pairwise(parts))
    order = np.concatenate([part[np.argsort(keys[part], kind="stable")] for part in numbers.partitions()])
    assert order.tolist() == np.argsort(keys, kind="stable").tolist()


def test_nothing_is_nothing(tmp_path):
    assert list(SpilledRecords(tmp_path / "spilled", np.dtype("u8"), 0).partitions()) == []
