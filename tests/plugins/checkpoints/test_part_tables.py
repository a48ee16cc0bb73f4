"""Parts of tensors are found in the tables of ranks, in as few of them as possible; wrong tables are refused."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from plugins.checkpoints.checked_files import Damage
from plugins.checkpoints.part_tables import (
    PARTS,
    TENSORS,
    Part,
    PartTables,
    data_file,
    table,
    table_file,
    tensor_table,
)
from tests.support.found_on_ranks import found_on_ranks

SHAPES = {"matrix": (4, 6), "vector": (5,), "count": ()}


def tables_of(*ranks, shapes=SHAPES):
    """Returns the tables of ranks with such parts, and the names of those that are read."""
    contents = {table_file(rank): table(parts) for rank, parts in enumerate(ranks)}
    contents[TENSORS] = tensor_table({name: (shape, torch.float32) for name, shape in shapes.items()})
    files = {name: {"bytes": len(content)} for name, content in contents.items()}
    files |= {data_file(rank): {"bytes": 1000} for rank in range(len(ranks))}
    seen = []

    def read(name):
        seen.append(name)
        return contents[name]

    return PartTables(contents[TENSORS], files, read), seen


def whole(*names):
    return {name: torch.empty(SHAPES[name]) for name in names}


def found(tables, targets):
    metadata = tables.parts_for(targets)
    assert {entry.properties.dtype for entry in metadata.state_dict_metadata.values()} == {torch.float32}
    return {
        (index.fqn, tuple(index.offset)): (place.relative_path, place.offset, place.length)
        for index, place in metadata.storage_data.items()
    }


FIRST = [Part("matrix", (0, 0), (4, 2), 0, 0, 50), Part("count", (), (), 0, 50, 9)]
SECOND = [Part("vector", (0,), (5,), 1, 30, 7), Part("matrix", (0, 2), (4, 4), 1, 0, 30)]


def test_tensors_are_found_in_the_tables_of_all_that_wrote_them():
    tables, seen = tables_of(FIRST, SECOND)
    assert {name: tuple(size) for name, (size, _) in tables.tensors.items()} == SHAPES
    assert found(tables, whole(*SHAPES)) == {
        ("matrix", (0, 0)): ("__0_0.distcp", 0, 50),
        ("matrix", (0, 2)): ("__1_0.distcp", 0, 30),
        ("count", ()): ("__0_0.distcp", 50, 9),
        ("vector", (0,)): ("__1_0.distcp", 30, 7),
    }
    assert found(tables, whole("vector")) == {("vector", (0,)): ("__1_0.distcp", 30, 7)}  # among all rows
    assert sorted(seen) == ["__0.parts", "__1.parts"]  # each once


def test_the_own_table_says_whose_table_has_the_rest():
    """One process is rank 0: what it shared with rank 7 is looked up there, and in no table between."""
    own = [*FIRST, Part("vector", (0,), (5,), 7)]
    others = [[Part("matrix", (0, 2 + n), (4, 1), n + 1, 0, 9)] for n in range(4)]
    tables, seen = tables_of(own, *others, [], [], [Part("vector", (0,), (5,), 7, 4, 8)])
    assert found(tables, whole("vector")) == {("vector", (0,)): ("__7_0.distcp", 4, 8)}
    assert seen == ["__0.parts", "__7.parts"]
    assert found(tables, whole("count")) == {("count", ()): ("__0_0.distcp", 50, 9)}
    assert len(found(tables, whole("matrix"))) == 5
    assert seen[:2] == ["__0.parts", "__7.parts"]
    assert sorted(seen[2:]) == [f"__{n}.parts" for n in range(1, 5)]


def seen_by_one_of_eight(rank):
    """Looks for a row that rank 1 of 16 wrote, as one of two replicas of four shards."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=5, world_size=8)
    rows = [[Part("matrix", (n, 0), (1, 6), n, 0, 50)] if n < 4 else [] for n in range(16)]
    tables, seen = tables_of(*rows)
    mesh = init_device_mesh("cpu", (2, 4))
    target = DTensor.from_local(torch.empty(1, 6), mesh, [Replicate(), Shard(0)], run_check=False)
    tables.parts_for({"matrix": target})
    return seen


def test_a_rank_looks_first_where_rows_are_likely_to_be(tmp_path):
    assert found_on_ranks(seen_by_one_of_eight, 1, tmp_path) == [["__5.parts", "__1.parts"]]


def test_a_part_that_nobody_wrote_is_missed():
    tables, _ = tables_of(FIRST, SECOND[:1])
    with pytest.raises(Damage, match="parts of matrix are in none of its tables"):
        tables.parts_for(whole("matrix"))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Part("vector", (1,), (5,), 0, 0, 9), "outside of vector"),
        (Part("vector", (0,), (5,), 0, 995, 9), "bytes that __0_0.distcp does not have"),
        (Part("vector", (0,), (5,), 1, 0, 9), "in the file of another rank"),
        (Part("vector", (-1,), (5,), 0, 0, 9), "out of range"),
        (Part("vector", (0,), (2**62,), 0, 0, 9), "out of range"),
        (Part("vector", (0, 0, 0), (5, 1, 1), 0, 0, 9), "3 dimensions"),
    ],
)
def test_tables_that_name_what_cannot_be_are_refused(part, reason):
    tables, _ = tables_of([part], [])
    with pytest.raises(Damage, match=reason):
        tables.parts_for(whole("vector"))


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 17, np.array([2**50], "<i8").tobytes()])
def test_a_file_that_is_no_table_is_refused(content):
    tables, _ = tables_of(FIRST, SECOND)
    tables = PartTables(tensor_table({"count": ((), torch.float32)}), {f"__0{PARTS}": {}}, lambda _: content)
    with pytest.raises(Damage, match=r"__0\.parts is no table of parts"):
        tables.parts_for(whole("count"))


@pytest.mark.parametrize(
    "content",
    [b"[]", b'{"w": ["load", [1]]}', b'{"w": ["float32", [-1]]}', b'{"w": ["float32", [1.5]]}'],
)
def test_a_table_of_tensors_names_types_and_shapes_alone(content):
    with pytest.raises(Damage, match=r"tensors\.json"):
        PartTables(content, {}, lambda _: b"")
