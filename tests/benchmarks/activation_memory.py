"""Bytes of activations that wait for backward, by what is done to have fewer.

    python -m tests.benchmarks.activation_memory

MemTracker counts tensors, so that a CPU will do. For the offload a GPU is imagined (torch's fake tensors): what
lies where at the end of forward is counted, nothing is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from callbacks.activation_checkpointing import ActivationCheckpointing
from callbacks.activation_offload import ActivationOffload
from core.contracts import Network
from plugins.networks.gpt import GPT

NETWORK: dict[str, Any] = {
    "vocab_size": 512,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "max_sequence_length": 256,
    "position": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "dropout": 0.1,
    "tie_embeddings": False,
}
BATCH = 4
MIB = 2**20


def activation_bytes(*callbacks: Any, peak: bool = False) -> int:
    """Returns the bytes of activations at the end of forward, or the most of them up to the end of backward."""
    torch.manual_seed(0)
    network = GPT(**NETWORK)
    for callback in callbacks:
        callback.change_network(network)
    ids = torch.randint(NETWORK["vocab_size"], (BATCH, NETWORK["max_sequence_length"]))
    tracker = MemTracker()
    tracker.track_external(network)
    with tracker:
        loss = _loss(network, ids)
        found = tracker.get_tracker_snapshot("current")
        if peak:
            loss.backward()
            found = tracker.get_tracker_snapshot("peak")
    return _activations(found, "cpu")


def bytes_on_imagined_gpu(*callbacks: Any) -> tuple[int, int]:
    """Returns the bytes of activations at the end of forward on a GPU that need not be there, and on the host."""
    with torch.device("meta"):
        network = GPT(**NETWORK)
    with FakeTensorMode():
        for module in network.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(value.shape, device="cuda"))
            for name, value in module._buffers.items():
                module._buffers[name] = torch.empty(value.shape, device="cuda")
        for callback in callbacks:
            callback.change_network(network)
        ids = torch.empty(BATCH, NETWORK["max_sequence_length"], dtype=torch.int64, device="cuda")
        tracker = MemTracker()
        tracker.track_external(network)
        with tracker:
            loss = _loss(network, ids)
            found = tracker.get_tracker_snapshot("current")
        del loss
    return _activations(found, "cuda"), _activations(found, "cpu")


def _loss(network: Network, ids: torch.Tensor) -> torch.Tensor:
    return network.logits(network({"input_ids": ids})).float().logsumexp(-1).mean()


def _activations(snapshot: Any, device: str) -> int:
    """Returns what is neither parameter nor buffer nor gradient: tensors on the host are of no class of their own."""
    classes = ("Activation", "Temp", "Other")
    return sum(
        size
        for place, sizes in snapshot.items()
        for kind, size in sizes.items()
        if place.type == device and getattr(kind, "value", kind) in classes
    )


def main() -> None:
    """Prints the table."""
    ways = {
        "none": [],
        "ActivationCheckpointing, every 2nd block": [ActivationCheckpointing(2)],
        "ActivationCheckpointing, matmul and attention kept": [
            ActivationCheckpointing(keep=["matmul", "attention"])
        ],
        "ActivationCheckpointing": [ActivationCheckpointing()],
        "ActivationOffload": [ActivationOffload()],
        "both": [ActivationCheckpointing(), ActivationOffload()],
    }
    print("MiB of activations | at the end of forward | at most | on a GPU | beside it on the host")
    for name, callbacks in ways.items():
        figures = activation_bytes(*callbacks), activation_bytes(*callbacks, peak=True)
        columns = (*figures, *bytes_on_imagined_gpu(*callbacks))
        print(" | ".join([f"{name:50}", *(f"{size / MIB:.1f}" for size in columns)]))


if __name__ == "__main__":
    main()
