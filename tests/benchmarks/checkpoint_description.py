"""How large the description of a sharded checkpoint is, and what it costs the rank that writes it and each that reads it.

    python -m tests.benchmarks.checkpoint_description [--ranks 64 512 4096]

Weights and two moments of AdamW of Llama-3 8B, each sharded by its rows over all ranks, as FSDP does. `.metadata` names
each part of each tensor: it grows with tensors times ranks. The first rank makes it of the plans of all ranks (measured up
to 1,024 ranks); when a run resumes, each rank reads it, and plans the reading of its own parts by it. Reading is measured
in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from plugins.checkpoints import sharded

MOST_PLANNED = 1024


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


def chunk(shape: tuple[int, ...], rank: int, ranks: int) -> dcp.ChunkStorageMetadata | None:
    """Returns the rows of a rank; None: it has none."""
    rows = -(-shape[0] // ranks)
    first = rank * rows
    if first >= shape[0]:
        return None
    size = torch.Size((min(rows, shape[0] - first), *shape[1:]))
    return dcp.ChunkStorageMetadata(torch.Size((first, *[0] * (len(shape) - 1))), size)


def described(ranks: int) -> dcp.Metadata:
    """Returns the description."""
    properties = dcp.TensorProperties(torch.float32)
    entries, places, written = {}, {}, [0] * ranks
    for name, shape in shapes().items():
        chunks: list[dcp.ChunkStorageMetadata] = []
        for rank in range(ranks):
            if (own := chunk(shape, rank, ranks)) is None:
                break
            length = 4 * own.sizes.numel() + 1200
            places[dcp.MetadataIndex(name, own.offsets, len(chunks))] = _StorageInfo(
                f"__{rank}_0.distcp", written[rank], length
            )
            written[rank] += length
            chunks.append(own)
        entries[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    return dcp.Metadata(entries, storage_data=places, storage_meta=dcp.StorageMeta())  # type: ignore[arg-type]


def plans(ranks: int) -> Iterator[SavePlan]:
    """Yields the plan of each rank."""
    properties = dcp.TensorProperties(torch.float32)
    for rank in range(ranks):
        items = []
        for name, shape in shapes().items():
            if (own := chunk(shape, rank, ranks)) is not None:
                data = TensorWriteData(own, properties, torch.Size(shape))
                items.append(
                    WriteItem(dcp.MetadataIndex(name, own.offsets), WriteItemType.SHARD, tensor_data=data)
                )
        yield SavePlan(items)


def held() -> float:
    """Returns what this process has held at most, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def read(folder: Path, ranks: int) -> None:
    """Prints what a rank in the middle needs to read the description and to plan its own reading."""
    files = json.loads((folder / "files.json").read_text())
    before, begin = held(), time.process_time()
    found = sharded._described(folder, files)
    middle = time.process_time()
    for name, shape in shapes().items():
        if (own := chunk(shape, ranks // 2, ranks)) is not None:
            assert create_read_items_for_chunk_list(name, found.state_dict_metadata[name], [own])
    end = time.process_time()
    print(f"{middle - begin:.2f} s | {held() - before:.0f} | {end - middle:.2f} s |", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(options.read, options.ranks[0])
        return
    print("| ranks | parts | planned | written | MB | read | MiB for that | own reading planned |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for ranks in options.ranks:
        planned = "-"
        if ranks <= MOST_PLANNED:
            every = list(plans(ranks))
            begin = time.process_time()
            create_default_global_save_plan(every)
            planned = f"{time.process_time() - begin:.2f} s"
            del every
        with tempfile.TemporaryDirectory() as place:
            folder, found = Path(place), described(ranks)
            begin = time.process_time()
            with open(folder / sharded.METADATA, "wb") as file:
                pickle.dump(found, file)
            seconds, parts = time.process_time() - begin, len(found.storage_data or ())
            del found
            files = {f"__{rank}_0.distcp": {"bytes": 2**40} for rank in range(ranks)}
            files |= {
                sharded.METADATA: sharded.checksum(folder / sharded.METADATA),
                sharded.STATE: {"bytes": 0},
            }
            (folder / "files.json").write_text(json.dumps(files))
            size = files[sharded.METADATA]["bytes"] / 1e6
            print(
                f"| {ranks:,} | {parts:,} | {planned} | {seconds:.2f} s | {size:.1f} | ", end="", flush=True
            )
            words = ["-m", "tests.benchmarks.checkpoint_description", "--ranks", str(ranks), "--read", place]
            subprocess.run([sys.executable, *words], check=True)


if __name__ == "__main__":
    main()
