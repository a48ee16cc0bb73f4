"""Steps of Muon and SOAP on matrices that four ranks have: CPU time of the busiest rank, matrices of each, bytes received.

OMP_NUM_THREADS=1 python -m tests.benchmarks.divided_matrices
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.runs import free_port, on_ranks
from plugins.optimizers.muon import Muon
from plugins.optimizers.soap import SOAP

RANKS = 4
PLACES: dict[str, list[Any]] = {
    "sharded in two ways": [Shard(0), Shard(1)],
    "2 copies of 2 shards": [Replicate(), Shard(0)],
}
KINDS = {"Muon": (Muon, 384), "SOAP": (partial(SOAP, precondition_frequency=1), 128)}
"""Optimizer, and rows and columns of a matrix; SOAP with a new basis in each step."""
MATRICES, STEPS = 8, 5


class _Counts(TorchDispatchMode):
    """Counts products of matrices and the bytes of what collectives return."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.products += name in ("addmm", "mm", "linalg_qr")
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            got = result if isinstance(result, Tensor) else args[0]
            tensors = [got] if isinstance(got, Tensor) else got
            self.received += sum(each.nbytes for each in tensors if isinstance(each, Tensor))
        return result


def measured(rank: int, port: int, folder: Path, kind: Any, size: int, places: list[Any]) -> None:
    """Writes the CPU seconds of a step, products, and bytes received of a rank."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    mesh, generator = init_device_mesh("cpu", (2, 2)), torch.Generator().manual_seed(0)

    def matrix() -> Any:
        return distribute_tensor(torch.randn(size, size, generator=generator), mesh, places)

    parameters = [nn.Parameter(matrix()) for _ in range(MATRICES)]
    optimizer, times, counts = kind(parameters, lr=0.01), [], _Counts()
    for step in range(STEPS + 2):
        for parameter in parameters:
            parameter.grad = matrix()
        dist.barrier()
        begun = time.process_time()
        if step == STEPS + 1:
            with counts:
                optimizer.step()
        else:
            optimizer.step()
            times.append(time.process_time() - begun)
    found = torch.tensor([statistics.median(times[1:]), counts.products, counts.received])
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Prints a row for each optimizer and placement."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| optimizer | matrices | CPU ms a step | products of each rank | MB received |")
    print("| --- | --- | --- | --- | --- |")
    for name, (kind, size) in KINDS.items():
        for place, places in PLACES.items():
            with tempfile.TemporaryDirectory() as folder:
                on_ranks(measured, RANKS, free_port(), Path(folder), kind, size, places)
                found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
            times, products, received = zip(*(each.tolist() for each in found), strict=True)
            each = " ".join(f"{count:.0f}" for count in products)
            row = f"{MATRICES} of {size} x {size}, {place} | {1e3 * max(times):.0f}"
            print(f"| {name} | {row} | {each} | {max(received) / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
