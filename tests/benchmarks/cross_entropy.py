"""Cross-entropy of a large vocabulary: CPU time, memory and error, by how the logits are computed.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.cross_entropy [--positions 3072] [--rounds 3]

Width 768, GPT-2's 50,257 tokens, forward and backward. MemTracker counts tensors: the most there are at once beyond hidden
states and weight. The error is that of the weight's gradient from all logits in float64, as a whole. Rounds go through the ways in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from core.contracts import Network
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import cross_entropy
from plugins.objectives.chunked import ChunkTokens, sums_over_positions
from toolkit.aligned_logits import first_columns, padded

VOCAB, WIDTH = 50257, 768
Way = Callable[[Network, Tensor, Tensor], Tensor]


def ours(network: Network, hidden: Tensor, labels: Tensor, chunk_tokens: ChunkTokens) -> Tensor:
    """Returns the loss as CausalLM computes it."""
    return sums_over_positions(cross_entropy, network, hidden, labels, chunk_tokens)[0]


def aligned(network: Network, hidden: Tensor, labels: Tensor) -> Tensor:
    """Returns it from all logits at once, with a copy of the weight that has more rows, as on CUDA."""
    weight: Any = network.output_weight
    logits = first_columns(F.linear(hidden.flatten(0, 1), padded(weight)), VOCAB)
    return cross_entropy(logits, labels.flatten())[0]


def torchs(network: Network, hidden: Tensor, labels: Tensor) -> Tensor:
    """Returns that of torch's function with chunks, of torch 2.13 and later."""
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions")()  # noqa: B009  # older ones lack it
    function: Any = getattr(F, "linear_cross_entropy")  # noqa: B009
    weight: Any = network.output_weight
    if torch.is_autocast_enabled("cpu"):  # the function does not know autocast
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    found: Tensor = function(hidden[0], weight, labels[0], reduction="sum", options=options)
    return found


def measure(way: Way, network: Any, hidden: Tensor, labels: Tensor, mixed: bool, counts: bool) -> float:
    """Runs forward and backward once; returns CPU seconds, or MiB."""
    network.zero_grad()
    hidden = hidden.clone().requires_grad_()
    tracker, start = MemTracker(), time.process_time()
    with tracker if counts else torch.enable_grad():
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = way(network, hidden, labels)
        loss.backward()
    if not counts:
        return time.process_time() - start
    peak: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak / 2**20


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--positions", type=int, default=3072)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.manual_seed(0)
    network: Any = GPT(vocab_size=VOCAB, n_layer=1, n_head=12, n_embd=WIDTH, max_sequence_length=8)
    hidden, labels = torch.randn(1, asked.positions, WIDTH), torch.randint(VOCAB, (1, asked.positions))
    ways: dict[str, Way] = {"all at once": partial(ours, chunk_tokens=None)}
    ways["all at once, rows padded"] = aligned
    ways["chunks of 1,024"] = partial(ours, chunk_tokens=1024)
    if hasattr(F, "linear_cross_entropy"):
        ways["F.linear_cross_entropy"] = torchs
    exact = torch.nn.Parameter(network.output_weight.detach().double())
    F.cross_entropy(F.linear(hidden[0].double(), exact), labels[0], reduction="sum").backward()
    expected: Any = exact.grad
    print(f"{asked.positions} positions | CPU s | ratio | MiB at most | relative error of the gradient")
    for mixed in (False, True):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(asked.rounds):
            for name, way in ways.items():
                times[name].append(measure(way, network, hidden, labels, mixed, False))
        for name, way in ways.items():
            mib = measure(way, network, hidden, labels, mixed, True)
            error = float((network.output_weight.grad.double() - expected).norm() / expected.norm())
            ratio = median(a / b for a, b in zip(times[name], times["all at once"], strict=True))
            columns = f"{median(times[name]):.2f} | {ratio:.2f} | {mib:.0f} | {error:.1e}"
            print(f"{'bf16-mixed' if mixed else '32-true'} | {name} | {columns}", flush=True)


if __name__ == "__main__":
    main()
