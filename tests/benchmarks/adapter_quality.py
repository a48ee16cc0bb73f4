"""Held-out loss after full fine-tuning and after LoRA with 1% of the parameters: `python -m tests.benchmarks.adapter_quality`.

A GPT of 0.4 million parameters is trained to write four letters forwards (`c`) or backwards (`r`), each letter replaced by a random
one with probability 0.2. It is then fine-tuned, by each method from the same weights on the same batches, on a word that it has not
seen (`n`): backwards, and replaced with probability 0.05. The least possible loss is known in closed form. Rates are chosen for each method,
that of LoRA ten times the other. Prints trained share and losses in nats per token of the answers, for three seeds.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules.instruction_datamodule import InstructionDataModule
from plugins.adapters.lora import LoRA
from plugins.objectives.supervised_fine_tuning import SupervisedFineTuning
from tests.support.records import build
from tests.support.tiny_training import module, tiny_gpt, trainer

LETTERS, LENGTH = "abcdefgh", 4
METHODS: dict[str, dict[str, Any]] = {"full": {"lr": 1e-3}, "LoRA, rank 1": {"lr": 1e-2, "rank": 1}}


def records(words: str, noise: float, count: int, seed: int) -> list[dict[str, str]]:
    """Returns prompts with answers; the last word of the task is its name."""
    random, found = np.random.default_rng(seed), []
    for _ in range(count):
        text, word = "".join(random.choice(list(LETTERS), LENGTH)), random.choice(list(words))
        turned = text if word == "c" else text[::-1]
        answer = [random.choice(list(LETTERS)) if random.random() < noise else letter for letter in turned]
        found.append({"prompt": f"{word} {text}: ", "completion": "".join(answer)})
    return found


def floor(noise: float) -> float:
    """Returns the least loss: that of the letters, and none of the token that ends an answer."""
    other = noise / len(LETTERS)
    right = 1 - noise + other
    entropy = -right * math.log(right) - (len(LETTERS) - 1) * other * math.log(other)
    return entropy * LENGTH / (LENGTH + 1)


def trained(folder: Path, words: str, noise: float, steps: int, seed: int, start: Any = None, rank: int = 0, lr: float = 3e-3) -> Any:  # fmt: skip
    """Trains from weights, or from none; returns the module and the validation loss."""
    folder.mkdir(parents=True)
    data = build(
        InstructionDataModule, folder, records(words, noise, 32 * steps, seed),
        template="plain", sequence_length=128, batch_size=8, validation_fraction=0.05,
    )  # fmt: skip

    def network() -> Any:
        made = tiny_gpt(vocab_size=300, n_embd=128, n_head=4, max_sequence_length=128)
        if start is not None:
            made.load_state_dict(start)
        return made

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 20, (steps - n) / (steps / 2)))  # fmt: skip

    torch.manual_seed(seed)
    made = module(
        network,
        objective=SupervisedFineTuning(),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=lr, weight_decay=0.0),
        lr_scheduler=schedule,
    )
    callbacks = [LoRA(rank=rank, alpha=2 * rank)] if rank else []
    runner = trainer(
        folder, max_steps=steps, callbacks=callbacks, log_every_n_steps=steps, limit_val_batches=0
    )
    runner.fit(made, datamodule=data)
    [result] = trainer(folder).validate(made, datamodule=data, verbose=False)
    return made, result["val/loss"]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--base_steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"least loss: {floor(0.05):.4f}\n| method | seed | trained | loss | over full | CPU s |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as name:
        for seed in options.seeds:
            begun = time.process_time()
            base, loss = trained(Path(name, f"base-{seed}"), "cr", 0.2, options.base_steps, seed)
            print(
                f"| base ({floor(0.2):.4f}) | {seed} | | {loss:.4f} | | {time.process_time() - begun:.0f} |",
                flush=True,
            )
            start, full = {k: v.clone() for k, v in base.network.state_dict().items()}, math.nan
            for method, arguments in METHODS.items():
                begun = time.process_time()
                made, loss = trained(
                    Path(name, f"{method}-{seed}"), "n", 0.05, options.steps, 100 + seed, start, **arguments
                )
                full = loss if method == "full" else full
                sizes = [(p.numel(), p.requires_grad) for p in made.network.parameters()]
                share = sum(size for size, is_trained in sizes if is_trained) / sum(size for size, _ in sizes)
                print(
                    f"| {method} | {seed} | {share:.2%} | {loss:.4f} | {loss / full - 1:+.1%} | {time.process_time() - begun:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
