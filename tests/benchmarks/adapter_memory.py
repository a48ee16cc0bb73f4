"""Bytes of a training step with each adapter: parameters, gradients, optimizer states, activations.

    python -m tests.benchmarks.adapter_memory

MemTracker counts the tensors of the second step of AdamW on a CPU. The size of a checkpoint's weights is beside it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.hooks import RemovableHandle

from callbacks.activation_checkpointing import ActivationCheckpointing
from plugins.adapters.freeze import Freeze
from plugins.adapters.ia3 import IA3
from plugins.adapters.lora import LoRA
from plugins.networks.llama import Llama
from plugins.precision.bitsandbytes_weights import BitsandbytesWeights
from toolkit.adapters import Adapter

NETWORK: dict[str, Any] = {
    "vocab_size": 4096,
    "n_layer": 8,
    "n_head": 8,
    "n_kv_head": 4,
    "n_embd": 512,
    "intermediate_size": 1408,
    "max_sequence_length": 128,
}
BATCH, LENGTH = 2, 128
MIB = 2**20
CLASSES = {
    "parameters": ("Parameter", "Buffer"),
    "gradients": ("Gradient",),
    "optimizer": ("Optstate",),
    "activations, rest": ("Activation", "Temp", "Other"),
}


def step_bytes(*changes: Any) -> tuple[int, int, list[int]]:
    """Returns how many parameters train, the bytes of a checkpoint's weights, and the peak bytes: of all, of each class."""
    torch.manual_seed(0)
    network = Llama(**NETWORK)
    for change in changes:
        if isinstance(change, Adapter):
            change.base_is_elsewhere = True
        change.change_network(network)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    ids = torch.randint(NETWORK["vocab_size"], (BATCH, LENGTH))
    _step(network, optimizer, ids)  # from here on there are optimizer states
    tracker = MemTracker()
    for parameter in network.parameters():
        if not parameter.requires_grad:  # MemTracker would wait for a gradient
            handles = RemovableHandle(OrderedDict()), RemovableHandle(OrderedDict())
            tracker._param_to_grad_hook_handles[parameter] = handles
    tracker.track_external(network, optimizer, ids)
    with tracker:
        _step(network, optimizer, ids)
    [peak] = [sizes for device, sizes in tracker.get_tracker_snapshot("peak").items() if device.type == "cpu"]
    named = {getattr(kind, "value", kind): size for kind, size in peak.items()}
    stored = sum(value.nbytes for value in network.state_dict().values())
    each = [sum(named.get(name, 0) for name in names) for names in CLASSES.values()]
    return sum(p.numel() for p in trained), stored, [named["Total"], *each]


def _step(network: Any, optimizer: Any, ids: torch.Tensor) -> None:
    network.logits(network({"input_ids": ids})).float().logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Prints the table."""
    qlora = [BitsandbytesWeights("nf4", compute_dtype="float32"), LoRA(rank=16)]
    ways: dict[str, list[Any]] = {
        "full fine-tuning": [],
        "Freeze, last block": [Freeze(last_blocks=1)],
        "LoRA, rank 16": [LoRA(rank=16)],
        "DoRA, rank 16": [LoRA(rank=16, use_dora=True)],
        "IA3": [IA3()],
        "QLoRA, rank 16": qlora,
        "LoRA and ActivationCheckpointing": [LoRA(rank=16), ActivationCheckpointing()],
        "QLoRA and ActivationCheckpointing": [*qlora, ActivationCheckpointing()],
    }
    print(f"| MiB | trained parameters | checkpoint | at most | {' | '.join(CLASSES)} |")
    print("| --- |" + " --- |" * (3 + len(CLASSES)))
    for name, changes in ways.items():
        trained, stored, peaks = step_bytes(*changes)
        cells = [f"{size / MIB:.1f}" for size in (stored, *peaks)]
        print(f"| {name} | {trained:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
