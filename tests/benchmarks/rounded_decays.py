"""What it changes that FSDP gathers a state-space layer's decay, step and skip weights in bf16, as all weights of a block.

    python -m tests.benchmarks.rounded_decays
    python -m tests.benchmarks.rounded_decays --steps 50 --seeds 1

A small Mamba2 learns the bytes of Python's help topics, in float32. In each forward `A_log`, `dt_bias` and `D`, all weights, or all but those,
are rounded to bf16, and gradients go to weights in float32, as under a bf16 policy. Losses are those of 32 batches that were not trained on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pydoc_data import topics

import torch
from torch import Tensor
from torch.func import functional_call

from plugins.networks.mamba2 import Mamba2

LENGTH, ROWS = 64, 8
ROUNDED: dict[str, Callable[[str], bool]] = {
    "nothing": lambda name: False,
    "A_log, dt_bias, D": lambda name: name.endswith(("A_log", "dt_bias", ".D")),
    "all but these": lambda name: not name.endswith(("A_log", "dt_bias", ".D")),
    "all weights": lambda name: True,
}


def loss(network: Mamba2, rounds: Callable[[str], bool], rows: Tensor) -> Tensor:
    """Returns the cross-entropy of rows, (B, T + 1), nats per byte."""
    weights = {
        name: weight + (weight.bfloat16().float() - weight).detach() if rounds(name) else weight
        for name, weight in network.named_parameters()
    }
    hidden = functional_call(network, weights, ({"input_ids": rows[:, :-1]},))
    logits = hidden @ weights["embed_tokens.weight"].T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def trained(rounds: Callable[[str], bool], seed: int, steps: int, text: Tensor) -> float:
    """Returns the loss of a network on the last tenth of the text."""
    torch.manual_seed(seed)
    network = Mamba2(vocab_size=256, n_layer=3, n_embd=96, head_dim=24, state_size=16, n_groups=1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    cut = len(text) * 9 // 10

    def batch(begin: int, end: int) -> Tensor:
        starts = torch.randint(begin, end - LENGTH - 1, (ROWS,), generator=generator)
        return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])

    for _ in range(steps):
        optimizer.zero_grad()
        loss(network, rounds, batch(0, cut)).backward()
        optimizer.step()
    generator.manual_seed(0)
    with torch.no_grad():
        return sum(float(loss(network, rounds, batch(cut, len(text)))) for _ in range(32)) / 32


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    text = torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8).long()
    found = {
        what: [trained(rounds, seed, options.steps, text) for seed in range(options.seeds)]
        for what, rounds in ROUNDED.items()
    }
    print("| rounded to bf16 | loss, nats per byte | beside no rounding, of each seed |\n| --- | --- | --- |")
    for what, losses in found.items():
        apart = ", ".join(f"{one - other:+.4f}" for one, other in zip(losses, found["nothing"], strict=True))
        print(f"| {what} | {sum(losses) / len(losses):.4f} | {apart} |", flush=True)


if __name__ == "__main__":
    main()
