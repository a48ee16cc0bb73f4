"""How large the description of a sharded checkpoint is, and what it costs the ranks that write it and those that read it.

    python -m tests.benchmarks.checkpoint_description [--ranks 512 4096 4096x8]

Weights and two moments of AdamW of Llama-3 8B, each sharded by its rows over all ranks, as FSDP does; "4096x8" is as
HybridParallel has them, 512 shards in 8 replicas. A rank writes a table of its parts; the first one decides which of the
replicas writes a part, and writes what is common. One reads them again in a process of its own: with the shards it had,
as one of half as many ranks, with the columns of matrices cut in 8, and with columns in the place of rows: then each rank
has some of the parts of all.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from plugins.checkpoints.part_tables import (
    TENSORS,
    Part,
    PartTables,
    data_file,
    hashed,
    table,
    table_file,
    tensor_table,
)
from plugins.checkpoints.written_once import writers

LAYOUTS = ("same", "half as many ranks", "tensor parallel", "columns")
Box = tuple[str, tuple[int, ...], tuple[int, ...]]


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the tensors of weights and moments."""
    width, narrow, wide = 4096, 1024, 14_336
    block = {
        "attention.q": (width, width),
        "attention.k": (narrow, width),
        "attention.v": (narrow, width),
        "attention.o": (width, width),
        "mlp.gate": (wide, width),
        "mlp.up": (wide, width),
        "mlp.down": (width, wide),
        "norm1": (width,),
        "norm2": (width,),
    }
    weights = {f"blocks.{layer}.{name}.weight": shape for layer in range(32) for name, shape in block.items()}
    weights |= {
        "embedding.weight": (128_256, width),
        "head.weight": (128_256, width),
        "norm.weight": (width,),
    }
    kinds = ("state_dict.network.", "optimizer.0.exp_avg.network.", "optimizer.0.exp_avg_sq.network.")
    return {kind + name: shape for kind in kinds for name, shape in weights.items()}


def boxes(shard: int, shards: int) -> list[Box]:
    """Returns name, offsets and sizes of what a rank holds."""
    found = []
    for name, shape in shapes().items():
        rows = -(-shape[0] // shards)
        first = shard * rows
        if first < shape[0]:
            sizes = (min(rows, shape[0] - first), *shape[1:])
            found.append((name, (first, *[0] * (len(shape) - 1)), sizes))
    return found


def held() -> float:
    """Returns what this process has held at most, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def forgotten() -> float:
    """Returns what this process holds, from which `held` begins again, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return held()


def written(folder: Path, ranks: int, shards: int) -> str:
    """Writes the tables of all ranks; returns cells: parts, most seconds of a rank, seconds and MiB of the first, MB."""
    own = [boxes(shard, shards) for shard in range(shards)]
    rows = [np.array([[hashed(f"{n} {o}"), int(np.prod(s))] for n, o, s in part], np.int64) for part in own]
    # What is sharded over all ranks needs no decision.
    sent = [pickle.dumps(rows[rank % shards] if shards < ranks else rows[0][:0]) for rank in range(ranks)]
    before, begin = forgotten(), time.process_time()
    chosen = writers([pickle.loads(each) for each in sent])
    answers = [pickle.dumps(each.astype(np.int32)) for each in chosen]
    content = tensor_table({name: (shape, torch.float32) for name, shape in shapes().items()})
    (folder / TENSORS).write_bytes(content)
    files: dict[str, Any] = {
        name(n): {"bytes": 2**40, "sha256": "0" * 64}
        for n in range(ranks)
        for name in (data_file, table_file)
    }
    manifest = json.dumps({"files": files}, indent=1).encode()
    del answers
    first, most, slowest, size = (
        time.process_time() - begin,
        held() - before,
        0.0,
        len(content) + len(manifest),
    )
    for rank in range(ranks):
        begin, start, parts = time.process_time(), 0, []
        of_each = chosen[rank].tolist() if shards < ranks else [rank] * len(own[rank])
        for (name, offsets, sizes), writer in zip(own[rank % shards], of_each, strict=True):
            length = 4 * int(np.prod(sizes)) + 1200 if writer == rank else 0
            parts.append(Part(name, offsets, sizes, writer, start if length else 0, length))
            start += length
        (folder / table_file(rank)).write_bytes(content := table(parts))
        slowest, size = max(slowest, time.process_time() - begin), size + len(content)
    (folder / "files.json").write_text(json.dumps(files))
    return f"{sum(map(len, rows)):,} | {slowest:.3f} s | {first:.2f} s | {most:.0f} | {size / 1e6:.1f}"


def targets(ranks: int, shards: int, layout: str) -> dict[str, Tensor]:
    """Returns what a rank in the middle reads into; without memory."""
    if layout == "half as many ranks":
        ranks, shards = ranks // 2, shards // 2
    dist.init_process_group("fake", store=dist.HashStore(), rank=ranks // 2 + ranks // 8, world_size=ranks)
    columns = {"tensor parallel": 8, "columns": shards}.get(layout, 1)
    mesh = init_device_mesh("cpu", (ranks // shards, shards // columns, columns))
    found = {}
    for name, shape in shapes().items():
        placements = [Replicate(), Shard(0), Shard(1) if len(shape) > 1 else Replicate()]
        size, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
        found[name] = DTensor.from_local(
            torch.empty(size, device="meta"),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
    return found


def read(folder: Path, ranks: int, shards: int, layout: str) -> None:
    """Prints what a rank needs to find where all that it holds is, and to plan its reading."""
    counted: Counter[str] = Counter()

    def content(name: str) -> bytes:
        found = (folder / name).read_bytes()
        counted[name] += len(found)
        return found

    rooms = targets(ranks, shards, layout)
    files = json.loads((folder / "files.json").read_text())
    before, begin = forgotten(), time.process_time()
    tables = PartTables(content(TENSORS), files, content)
    found = tables.parts_for(rooms)
    for name, room in rooms.items():
        own = [item.tensor_data.chunk for item in room.__create_write_items__(name, room)]  # type: ignore[attr-defined]
        create_read_items_for_chunk_list(name, found.state_dict_metadata[name], own)
    seconds, most = time.process_time() - begin, held() - before
    print(
        f"{len(counted) - 1:,} | {sum(counted.values()) / 1e6:.2f} | {seconds:.2f} s | {most:.0f} |",
        flush=True,
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", default=["512", "4096", "4096x8"])
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = [tuple(map(int, f"{words}x1".split("x")[:2])) for words in options.ranks]
    if options.read:
        [(ranks, replicas)], (folder, layout) = every, options.read
        read(Path(folder), ranks, ranks // replicas, layout)
        return
    for words, (ranks, replicas) in zip(options.ranks, every, strict=True):
        with tempfile.TemporaryDirectory() as place:
            print("| ranks | parts | a rank writes | the first rank besides | MiB for that | MB in all |")
            print("| --- | --- | --- | --- | --- | --- |")
            print(f"| {words} | {written(Path(place), ranks, ranks // replicas)} |\n")
            print(
                "| read with | tables | MB | read and planned | MiB for that |\n| --- | --- | --- | --- | --- |"
            )
            for layout in LAYOUTS:
                print(f"| {layout} | ", end="", flush=True)
                command = [
                    "-m",
                    "tests.benchmarks.checkpoint_description",
                    "--ranks",
                    words,
                    "--read",
                    place,
                    layout,
                ]
                subprocess.run([sys.executable, *command], check=True)
            print()


if __name__ == "__main__":
    main()
