"""What HashChain costs: the time of its hooks over that of the steps, in the quickstart's run.

    python -m tests.benchmarks.hash_chain_cost [STEPS]

Both are measured in the same steps, on one thread of a CPU, where nothing is asynchronous: what else the machine does
falls on both.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback

from callbacks.hash_chain import HashChain
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.networks.gpt import GPT
from plugins.optimizers.adamw import AdamW
from tests.support.tiny_training import module, trainer
from tests.support.tokens import StoredTokens

HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")


class Timed(HashChain):
    """Adds up the time of its hooks."""

    spent = 0.0


def _timed(name: str) -> Any:
    plain = getattr(HashChain, name)

    def hook(self: Timed, *given: Any) -> None:
        began = time.perf_counter()
        plain(self, *given)
        self.spent += time.perf_counter() - began

    return hook


for _name in HOOKS:
    setattr(Timed, _name, _timed(_name))


class Clock(Callback):
    """Notes the time, and that of the hooks, at each step."""

    def __init__(self, chain: Timed) -> None:
        self.chain, self.points = chain, [(0.0, 0.0)]

    def on_train_batch_end(self, *_: Any) -> None:
        self.points.append((time.perf_counter(), self.chain.spent))


def network() -> GPT:
    """Returns the quickstart's network."""
    return GPT(
        vocab_size=2048, max_sequence_length=256, n_layer=4, n_head=4, n_embd=128,
        position="rotary", norm="rmsnorm", activation="swiglu", bias=False,
    )  # fmt: skip


def main(steps: int = 40) -> None:
    """Prints the share for several intervals."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split in ("train", "validation"):
            TokenShards(1 << 20).write(
                [np.random.default_rng(0).integers(0, 2048, 200_001)], folder / split, vocab_size=2048
            )
        for every in (1, 10):
            chain = Timed(every_n_steps=every)
            clock = Clock(chain)
            options = {"max_steps": steps, "limit_val_batches": 0, "use_distributed_sampler": False}
            runner = trainer(
                folder / f"run{every}", callbacks=[chain, clock], **options | {"log_every_n_steps": 10}
            )
            data = StoredTokens(str(folder), 256, 8, shuffle=True, vocab_size=2048)
            runner.fit(module(network, optimizer=lambda groups: AdamW(groups, lr=1e-3)), datamodule=data)
            (begin, before), (end, after) = clock.points[6], clock.points[-1]
            share, step = (after - before) / (end - begin), (end - begin) / (len(clock.points) - 7)
            print(f"every_n_steps {every}: {share:.2%} of a step of {step * 1e3:.0f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
