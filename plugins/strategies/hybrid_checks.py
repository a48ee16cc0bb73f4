"""Checks of HybridParallel before the run: which sizes do not fit the ranks, the network or the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from core.errors import ConfigError
from plugins.strategies import context_parallel, expert_parallel, mixed_precision, tensor_parallel
from plugins.strategies.mesh_sizes import MeshSizes
from plugins.strategies.pipeline_stages import SPLIT_BACKWARD, Layout, is_beyond_gloo
from toolkit.batch_shapes import shapes_of

if TYPE_CHECKING:
    from core.contracts import Network
    from toolkit.selection import Run

NO_PREDICT = "predict takes pipeline 1 and context 1, which can read the same checkpoint"


def sizes_of(given: Mapping[str, Any]) -> MeshSizes:
    """Returns the sizes among the strategy's arguments."""
    return MeshSizes(**{name: given[name] for name in MeshSizes.__dataclass_fields__})


def compatibility_errors(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for each problem; `given` are the strategy's arguments."""
    sizes = sizes_of(given)
    wrong = list(sizes.compatibility_errors(run.world_size))
    yield from wrong
    if given["sequence"] not in (1, given["tensor"]):
        yield f"sequence is {given['sequence']}; it is 1, or {given['tensor']} as tensor"
    yield from mixed_precision.compatibility_errors(run, given)
    if given["async_tensor"]:
        yield from _overlap_errors(run, given)
    for name in ("pipeline", "context"):
        if run.command == "predict" and given[name] > 1:
            yield f"{name} is {given[name]}, and {NO_PREDICT}"
    network = None if wrong else _network(run)
    if network is None:  # building it later in the run reports the error
        return
    if given["expert"] > 1:
        yield from expert_parallel.compatibility_errors(network, given["expert"], given["context"])
    if given["tensor"] > 1:
        split = given["sequence"] > 1, given["loss_parallel"]
        yield from tensor_parallel.compatibility_errors(network, given["tensor"], *split)
    length = run.argument("data.sequence_length")
    if given["context"] > 1:
        method = given["context_method"]
        yield from context_parallel.compatibility_errors(
            network, given["context"], given["tensor"], method, length
        )
        own = run.argument("model.network.attention_dropout")  # of GPT; other networks only have `dropout`
        if (run.argument("model.network.dropout") if own is None else own) and run.command == "fit":
            name = "dropout" if own is None else "attention_dropout"
            yield f"context is {given['context']}, which takes attention without dropout: set model.network.{name} to 0"
    if given["sequence"] > 1 and length and (share := length // given["context"]) % given["sequence"]:
        yield f"sequence is {given['sequence']}, which does not divide the {share} tokens of a context rank"
    if given["pipeline"] > 1:
        yield from _pipeline_errors(run, given, network, sizes.of(run.world_size))
    if run.command == "fit":
        yield from _schedule_errors(run, given, sizes.of(run.world_size))


def _overlap_errors(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    if given["sequence"] == 1:
        yield (
            "async_tensor runs products beside the gathers and scatters of sequence parallelism: set sequence to the size of tensor"
        )
    compiler = next((item for item in run.selected if item.name == "Compile"), None)
    if compiler is None or compiler.arguments.get("backend", "inductor") != "inductor":
        yield "async_tensor is what torch's compiler makes of them: add Compile with backend inductor (--config techniques/compile)"
    if run.accelerator != "cuda":
        yield f"async_tensor needs GPUs that read each other's memory, and this run is on {run.accelerator}: set it to false"


def _schedule_errors(run: Run, given: Mapping[str, Any], mesh: Mapping[str, int]) -> Iterator[str]:
    """Yields which batches of a sequence length or batch size schedule cannot be split."""
    tokens = given["context"] * given["sequence"]
    if given["context"] > 1:
        tokens = math.lcm(tokens, context_parallel.pieces(given["context"], given["context_method"]))
    layout = Layout(given["schedule"], given["pipeline"], 0)
    rows = (given["microbatches"] or layout.stages) if given["pipeline"] > 1 else 1
    for name, shapes in shapes_of(run, mesh["data_replicate"] * mesh["data_shard"] * mesh["expert"]):
        lengths = sorted({shape.sequence_length for shape in shapes if shape.sequence_length % tokens})
        sizes = sorted({shape.batch_size for shape in shapes if shape.batch_size % rows})
        if lengths:
            yield (
                f"rows are split into {tokens} parts, and {name} makes some of {lengths[0]} tokens: set its start, stages "
                f"and multiple to multiples of {tokens}"
            )
        if sizes:
            yield f"microbatches is {rows}, which does not divide the batches of {sizes[0]} rows that {name} makes"


def _pipeline_errors(
    run: Run, given: Mapping[str, Any], network: Network, sizes: Mapping[str, int]
) -> Iterator[str]:
    if network.ends is None:
        yield f"{type(network).__name__} does not define where it can be split into stages: set pipeline to 1"
        return
    layout = Layout(given["schedule"], given["pipeline"], len(network.blocks))
    microbatches = layout.stages if given["microbatches"] is None else given["microbatches"]
    yield from layout.compatibility_errors(microbatches, run.argument("data.batch_size"))
    if (
        given["param_format"] not in (None, "fp32")
        and not sizes["data_shard"] * sizes["expert"] * sizes["context"] > 1
    ):
        yield (
            f"param_format is {given['param_format']}, and a pipeline without sharded data gathers no weights: set "
            "--trainer.precision=bf16-mixed in its place"
        )
    if run.accelerator == "cpu" and is_beyond_gloo(given["schedule"]):
        yield (
            f"schedule {given['schedule']} starts with messages of ranks to themselves in torch {torch.__version__}, "
            "which gloo cannot send: take InterleavedZeroBubble, or a newer torch"
        )
    if run.command == "fit" and given["schedule"] in SPLIT_BACKWARD:
        yield from _split_backward_errors(run, given["schedule"])
    selected = {item.name for item in run.selected}
    single = run.argument("trainer.accumulate_grad_batches") in (None, 1)
    if "GradientNoiseScale" in selected and single and not layout.half_of(microbatches):
        yield (
            f"microbatches is {microbatches}, and GradientNoiseScale compares halves of a batch, each in a {given['schedule']} of "
            "its own: set --trainer.accumulate_grad_batches=2, or microbatches to twice the stages"
        )
    if any(item.name == "MemoryMonitor" and item.arguments.get("at_step") != 0 for item in run.selected):
        yield (
            "pipeline above 1 interleaves forward and backward of several micro-batches, which MemoryMonitor does "
            "not distinguish: set its at_step to 0, which shows the allocator alone, or leave it out (--callbacks.-MemoryMonitor)"
        )


def _split_backward_errors(run: Run, schedule: str) -> Iterator[str]:
    """Yields what goes through a block's backward once, where the schedule does so twice."""
    for item in run.selected:
        if item.name == "Compile":
            yield (
                f"schedule {schedule} computes gradients of inputs and of weights apart, and a block that Compile has compiled "
                "both at once: set schedule to 1F1B or Interleaved1F1B"
            )
        kept = [name for name in ("keep", "memory_budget") if item.arguments.get(name) not in (None, [])]
        if item.name == "ActivationCheckpointing" and kept:
            yield (
                f"schedule {schedule} computes gradients of inputs and of weights apart, and what ActivationCheckpointing keeps "
                f"is there for one of them: set its {kept[0]} to null, or schedule to Interleaved1F1B"
            )


def check_stages(network: Network, layout: Layout, pipeline: int) -> None:
    """Raises a ConfigError on every rank if an adapter leaves one of them nothing to train."""
    trained = [any(p.requires_grad for p in block.parameters()) for block in network.blocks]
    ranks = {layout.rank_of(s) for s in range(layout.stages) if any(trained[i] for i in layout.span_of(s))}
    if idle := sorted(set(range(pipeline)) - ranks):
        raise ConfigError(
            f"HybridParallel: pipeline is {pipeline}, and all blocks of stage {idle[0]} are frozen: each stage has to train "
            "some of its own.\nSet pipeline to 1, or let the adapter train something in every block."
        )


def _network(run: Run) -> Network | None:
    """Returns the run's network on the meta device, or None if it cannot be built."""
    from plugins.checkpoints.stored_network import build_network

    try:
        with torch.device("meta"):
            network: Network = build_network(run.argument("model.network"))
    except Exception:  # building it later in the run reports the error
        return None
    return network
