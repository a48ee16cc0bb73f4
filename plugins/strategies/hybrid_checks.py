"""What of a HybridParallel's sizes does not fit the ranks, the network or the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from core.training.batch_shapes import shapes_of
from plugins.strategies import context_parallel, tensor_parallel
from plugins.strategies.mesh_sizes import MeshSizes
from plugins.strategies.pipeline_stages import ZERO_BUBBLE, Layout, is_beyond_gloo
from plugins.strategies.shared_scaler import scales_losses

if TYPE_CHECKING:
    from core.contracts import Network
    from core.selection import Run

NO_SCALER = "pipeline above 1 differentiates before a loss can be scaled, which fp16 needs: take bf16"

NO_PREDICT = "predict takes pipeline 1 and context 1, with which it goes on from the same checkpoint"


def sizes_of(given: Mapping[str, Any]) -> MeshSizes:
    """Returns the sizes among the strategy's arguments."""
    return MeshSizes(**{name: given[name] for name in MeshSizes.__dataclass_fields__})


def misfits(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each that does not fit; `given` are the strategy's arguments."""
    sizes = sizes_of(given)
    wrong = list(sizes.misfits(run.world_size))
    yield from wrong
    if given["sequence"] not in (1, given["tensor"]):
        yield f"sequence is {given['sequence']}; it is 1, or {given['tensor']} as tensor"
    for name in ("pipeline", "context"):
        if run.command == "predict" and given[name] > 1:
            yield f"{name} is {given[name]}, and {NO_PREDICT}"
    if given["expert"] > 1:
        yield f"expert is {given['expert']}, and no network has experts yet: set it to 1"
    network = None if wrong else _network(run)
    if network is None:  # which says by itself what is wrong
        return
    if given["tensor"] > 1:
        split = given["sequence"] > 1, given["loss_parallel"]
        yield from tensor_parallel.misfits(network, given["tensor"], *split)
    length = run.argument("data.sequence_length")
    if given["context"] > 1:
        method = given["context_method"]
        yield from context_parallel.misfits(network, given["context"], given["tensor"], method, length)
        if run.argument("model.network.dropout") and run.command == "fit":
            yield f"context is {given['context']}, which takes attention without dropout: set model.network.dropout to 0"
    if given["sequence"] > 1 and length and (share := length // given["context"]) % given["sequence"]:
        yield f"sequence is {given['sequence']}, which does not divide the {share} tokens of a context rank"
    if given["pipeline"] > 1:
        yield from _pipeline_misfits(run, given, network, sizes.of(run.world_size))
    if run.command == "fit":
        yield from _schedule_misfits(run, given, sizes.of(run.world_size))


def _schedule_misfits(run: Run, given: Mapping[str, Any], mesh: Mapping[str, int]) -> Iterator[str]:
    """Yields which batches of a schedule of lengths or batch sizes cannot be cut up."""
    tokens = given["context"] * given["sequence"]
    if given["context"] > 1:
        tokens = math.lcm(tokens, context_parallel.pieces(given["context"], given["context_method"]))
    layout = Layout(given["schedule"], given["pipeline"], 0)
    rows = (given["microbatches"] or layout.stages) if given["pipeline"] > 1 else 1
    for name, shapes in shapes_of(run, mesh["data_replicate"] * mesh["data_shard"]):
        lengths = sorted({shape.sequence_length for shape in shapes if shape.sequence_length % tokens})
        sizes = sorted({shape.batch_size for shape in shapes if shape.batch_size % rows})
        if lengths:
            yield (
                f"rows are cut into {tokens} parts, and {name} makes some of {lengths[0]} tokens: set its start, stages "
                f"and multiple to multiples of {tokens}"
            )
        if sizes:
            yield f"microbatches is {rows}, which does not divide the batches of {sizes[0]} rows that {name} makes"


def _pipeline_misfits(
    run: Run, given: Mapping[str, Any], network: Network, sizes: Mapping[str, int]
) -> Iterator[str]:
    if network.ends is None:
        yield f"{type(network).__name__} does not say where it can be cut into stages: set pipeline to 1"
        return
    layout = Layout(given["schedule"], given["pipeline"], len(network.blocks))
    microbatches = layout.stages if given["microbatches"] is None else given["microbatches"]
    yield from layout.misfits(microbatches, run.argument("data.batch_size"))
    if given["schedule"] in ZERO_BUBBLE and sizes["data_shard"] > 1:
        yield (
            f"schedule {given['schedule']} computes gradients of weights apart from those of inputs, and sharded "
            "data parallelism loses some of them: take data_replicate for data_shard, or Interleaved1F1B"
        )
    if run.accelerator == "cpu" and is_beyond_gloo(given["schedule"]):
        yield (
            f"schedule {given['schedule']} begins with messages of ranks to themselves in torch {torch.__version__}, "
            "which gloo cannot send: take InterleavedZeroBubble, or a newer torch"
        )
    if any(item.name == "MemoryMonitor" for item in run.selected):
        yield (
            "pipeline above 1 runs forward and backward of several micro-batches by turns, which MemoryMonitor does "
            "not tell apart: leave it out (--callbacks.-MemoryMonitor)"
        )
    if scales_losses(run) or str(run.argument("trainer.precision")) == "16-true":
        yield NO_SCALER


def _network(run: Run) -> Network | None:
    """Returns the run's network without memory, or None where it cannot be built."""
    from core.checkpoints.checkpoint import build_network

    try:
        with torch.device("meta"):
            network: Network = build_network(run.argument("model.network"))
    except Exception:  # the run's own building, which follows, says what is wrong
        return None
    return network
