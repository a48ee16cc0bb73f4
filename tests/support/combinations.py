"""The combinations of strategies that are held against one process, for the tests and the table of docs/cluster.md."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from plugins.cli.configuration.config_files import merge
from tests.support.same_run import FOUR_BLOCKS


@dataclass(frozen=True)
class Combination:
    """A strategy with arguments, on so many ranks.

    Attributes:
        strategy: Its registered name.
        name: What the table says of the arguments.
        ranks: Number of processes.
        init_args: The strategy's arguments.
        config: What is laid over the run besides, in one process too.
    """

    strategy: str
    name: str
    ranks: int
    init_args: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.strategy}, {self.name}, {self.ranks} ranks"

    @property
    def mark(self) -> str:
        """What leaves it out of the default tests: `slow`, `ci` or nothing."""
        if (self.strategy, self.name, self.ranks) not in OFTEN:
            return "slow"
        return "ci" if self.ranks > 2 or (self.strategy, self.name) in BESIDE else ""

    @property
    def overlay(self) -> dict[str, Any]:
        """What to lay over the run in one process."""
        chosen = {"class_path": self.strategy, "init_args": dict(self.init_args)}
        config = dict(self.config)
        return config | {"trainer": {**config.get("trainer", {}), "strategy": chosen}}


LLAMA = {
    "model": {
        "network": {
            "init_args": {
                "n_kv_head": 2,
                "position": "rotary",
                "norm": "rmsnorm",
                "activation": "swiglu",
                "tie_embeddings": False,
                "bias": False,
            }
        }
    }
}
DEEP_LLAMA = merge(deepcopy(LLAMA), FOUR_BLOCKS)
POST_NORM = {"model": {"network": {"init_args": {"norm_position": "post"}}}}
IN_CHUNKS = {
    "model": {
        "network": {"init_args": {"vocab_size": 65}},  # which two ranks share unevenly
        "objective": {
            "class_path": "CausalLM",
            "init_args": {"chunk_tokens": 7, "label_smoothing": 0.1, "z_loss": 1e-3},
        },
    }
}
DOCUMENTS = {"data": {"init_args": {"documents": True}}}
ULYSSES = {"context": 2, "context_method": "ulysses"}


CHECKPOINTED = {"trainer": {"callbacks": [{"class_path": "ActivationCheckpointing"}]}}
OFFLOADED = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Returns the arguments of a ZeRO stage, whose third cuts up the smallest parameter of a tiny network, too."""
    return {"stage": stage, "persistence_threshold": 0} | more


def pipeline(schedule: str, microbatches: int | None = None, **sizes: int) -> dict[str, Any]:
    """Returns the arguments of a pipeline of two ranks."""
    return {"pipeline": 2, "schedule": schedule, "microbatches": microbatches} | sizes


OFTEN = {
    ("DDP", "gradients averaged", 2),
    ("DeepSpeedZero", "stage 1", 2),
    ("DeepSpeedZero", "stage 2, optimizer on the CPU", 2),
    ("DeepSpeedZero", "stage 3, parameters and optimizer on the CPU", 2),
    ("FSDP", "stage 2", 2),
    ("FSDP", "stage 3", 2),
    ("HybridParallel", "tensor 2, sequence 2", 2),
    ("HybridParallel", "data_shard 2, tensor 2, sequence 2", 4),
    ("HybridParallel", "pipeline 2, 1F1B", 2),
    ("HybridParallel", "pipeline 2, ZBVZeroBubble", 2),
    ("HybridParallel", "tensor 2, pipeline 2, 1F1B", 4),
    ("HybridParallel", "context 2, ring, documents", 2),
    ("HybridParallel", "context 2, ulysses, documents", 2),
}
"""One of each kind: two ranks by default, four in CI; the others are slow."""

BESIDE = {
    ("DeepSpeedZero", "stage 1"),
    ("DeepSpeedZero", "stage 3, parameters and optimizer on the CPU"),
    ("FSDP", "stage 2"),
    ("HybridParallel", "pipeline 2, ZBVZeroBubble"),
    ("HybridParallel", "tensor 2, sequence 2"),
    ("HybridParallel", "context 2, ring, documents"),
    ("HybridParallel", "context 2, ulysses, documents"),
}
"""Those of them that are CI's on two ranks, too: they take 3 CPU seconds and more, and by default each strategy has one."""

COMBINATIONS = [
    Combination("DDP", "gradients averaged", 2),
    Combination("DDP", "gradients averaged", 4),
    Combination("DDP", "static_graph, bucket_mb 0.001", 2, {"static_graph": True, "bucket_mb": 0.001}),
    Combination("DeepSpeedZero", "stage 1", 2, zero(1)),
    Combination("DeepSpeedZero", "stage 1, optimizer on the CPU", 2, zero(1, offload_optimizer="cpu")),
    Combination("DeepSpeedZero", "stage 2", 2, zero(2)),
    Combination("DeepSpeedZero", "stage 2", 4, zero(2)),
    Combination("DeepSpeedZero", "stage 2, optimizer on the CPU", 2, zero(2, offload_optimizer="cpu")),
    Combination("DeepSpeedZero", "stage 3", 2, zero(3)),
    Combination("DeepSpeedZero", "stage 3", 4, zero(3)),
    Combination(
        "DeepSpeedZero", "stage 3, small parameters replicated", 2, zero(3, persistence_threshold=64), LLAMA
    ),
    Combination("DeepSpeedZero", "stage 3, blocks recomputed", 2, zero(3), CHECKPOINTED),
    Combination(
        "DeepSpeedZero", "stage 3, parameters and optimizer on the CPU", 2, zero(3, **OFFLOADED), DOCUMENTS
    ),
    Combination("DeepSpeedZero", "stage 3, parameters and optimizer on the CPU", 1, zero(3, **OFFLOADED)),
    Combination("FSDP", "stage 3", 2),
    Combination("FSDP", "stage 2", 2, {"stage": 2}),
    Combination("FSDP", "stage 3, offload", 2, {"offload": True}),
    Combination("FSDP", "stage 3, 2 replicas of 2", 4, {"replicas": 2}),
    Combination("FSDP", "stage 2", 4, {"stage": 2}),
    Combination("HybridParallel", "data_shard 2", 2),
    Combination("HybridParallel", "tensor 2, full head", 2, {"tensor": 2, "loss_parallel": False}),
    Combination("HybridParallel", "tensor 2", 2, {"tensor": 2}),
    Combination("HybridParallel", "tensor 2, untied rotary Llama", 2, {"tensor": 2}, LLAMA),
    Combination("HybridParallel", "tensor 2, sequence 2", 2, {"tensor": 2, "sequence": 2}, IN_CHUNKS),
    Combination(
        "HybridParallel",
        "tensor 2, sequence 2, norms last",
        2,
        {"tensor": 2, "sequence": 2},
        POST_NORM,
    ),
    Combination("HybridParallel", "data_shard 2, tensor 2, sequence 2", 4, {"tensor": 2, "sequence": 2}),
    Combination(
        "HybridParallel",
        "data_replicate 2, tensor 2",
        4,
        {"data_replicate": 2, "tensor": 2},
        LLAMA,
    ),
    Combination("HybridParallel", "data_replicate 2, data_shard 2", 4, {"data_replicate": 2}),
    Combination("HybridParallel", "tensor 4", 4, {"tensor": 4}),
    Combination("HybridParallel", "pipeline 2, 1F1B", 2, {"pipeline": 2}, IN_CHUNKS),
    Combination("HybridParallel", "pipeline 2, GPipe, 4 micro-batches", 2, pipeline("GPipe", 4)),
    Combination("HybridParallel", "pipeline 2, Interleaved1F1B", 2, pipeline("Interleaved1F1B"), DEEP_LLAMA),
    Combination(
        "HybridParallel",
        "pipeline 2, InterleavedZeroBubble",
        2,
        pipeline("InterleavedZeroBubble"),
        FOUR_BLOCKS,
    ),
    Combination("HybridParallel", "pipeline 2, ZBVZeroBubble", 2, pipeline("ZBVZeroBubble"), FOUR_BLOCKS),
    Combination("HybridParallel", "pipeline 2, DualPipeV", 2, pipeline("DualPipeV"), FOUR_BLOCKS),
    Combination("HybridParallel", "data_shard 2, pipeline 2, 1F1B", 4, {"pipeline": 2}),
    Combination("HybridParallel", "data_shard 2, pipeline 2, GPipe", 4, pipeline("GPipe"), LLAMA),
    Combination(
        "HybridParallel",
        "data_shard 2, pipeline 2, Interleaved1F1B",
        4,
        pipeline("Interleaved1F1B"),
        FOUR_BLOCKS,
    ),
    Combination(
        "HybridParallel",
        "data_shard 2, pipeline 2, InterleavedZeroBubble",
        4,
        pipeline("InterleavedZeroBubble"),
        FOUR_BLOCKS,
    ),
    Combination(
        "HybridParallel",
        "data_shard 2, pipeline 2, ZBVZeroBubble",
        4,
        pipeline("ZBVZeroBubble"),
        FOUR_BLOCKS,
    ),
    Combination(
        "HybridParallel",
        "data_shard 2, pipeline 2, DualPipeV",
        4,
        pipeline("DualPipeV"),
        DEEP_LLAMA,
    ),
    Combination(
        "HybridParallel",
        "data_replicate 2, pipeline 2, ZBVZeroBubble",
        4,
        pipeline("ZBVZeroBubble", data_replicate=2),
        FOUR_BLOCKS,
    ),
    Combination("HybridParallel", "tensor 2, pipeline 2, 1F1B", 4, pipeline("1F1B", tensor=2)),
    Combination(
        "HybridParallel",
        "tensor 2, pipeline 2, ZBVZeroBubble",
        4,
        pipeline("ZBVZeroBubble", tensor=2),
        FOUR_BLOCKS,
    ),
    Combination(
        "HybridParallel",
        "tensor 2, pipeline 2, DualPipeV, full head",
        4,
        pipeline("DualPipeV", tensor=2, loss_parallel=False),
        FOUR_BLOCKS,
    ),
    Combination(
        "HybridParallel",
        "tensor 2, sequence 2, pipeline 2, ZBVZeroBubble, full head",
        4,
        pipeline("ZBVZeroBubble", tensor=2, sequence=2, loss_parallel=False),
        FOUR_BLOCKS,
    ),
    Combination(
        "HybridParallel",
        "tensor 2, sequence 2, pipeline 2, 1F1B",
        4,
        pipeline("1F1B", tensor=2, sequence=2),
    ),
    Combination(
        "HybridParallel",
        "tensor 2, sequence 2, pipeline 2, ZBVZeroBubble",
        4,
        pipeline("ZBVZeroBubble", tensor=2, sequence=2),
        FOUR_BLOCKS,
    ),
    Combination(
        "HybridParallel", "data_shard 2, tensor 2, pipeline 2, 1F1B", 8, {"tensor": 2, "pipeline": 2}
    ),
    Combination("HybridParallel", "pipeline 4, 1F1B", 4, {"pipeline": 4}, FOUR_BLOCKS),
    Combination("HybridParallel", "context 2, ring", 2, {"context": 2}),
    Combination("HybridParallel", "context 2, ring, documents", 2, {"context": 2}, LLAMA | DOCUMENTS),
    Combination("HybridParallel", "context 2, ulysses, documents", 2, ULYSSES, LLAMA | DOCUMENTS),
    Combination("HybridParallel", "context 2, ulysses", 2, ULYSSES),
    Combination("HybridParallel", "context 4, ring, documents", 4, {"context": 4}, DOCUMENTS),
    Combination("HybridParallel", "data_shard 2, context 2, ring", 4, {"context": 2}),
    Combination("HybridParallel", "tensor 2, context 2, ring", 4, {"context": 2, "tensor": 2}),
    Combination("HybridParallel", "context 2, ring, pipeline 2, 1F1B", 4, {"context": 2, "pipeline": 2}),
    Combination(
        "HybridParallel",
        "context 2, ring, pipeline 2, ZBVZeroBubble",
        4,
        pipeline("ZBVZeroBubble", context=2),
        DEEP_LLAMA,
    ),
]
