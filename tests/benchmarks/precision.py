"""The loss after some steps in each precision, beside float32's: the same network, batches and rate.

    python -m tests.benchmarks.precision

A network as the quickstart's, smaller, on the words of Python's own documentation, byte by byte. Quantised weights are
frozen, so that their run is another one: beside it stands float32 with the same layers frozen.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from core.language_module import LanguageModule
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from plugins.optimizers.adamw import AdamW
from plugins.precision.bitsandbytes_weights import BitsandbytesWeights
from plugins.precision.float8 import Float8
from plugins.precision.fp16_mixed import FP16Mixed
from plugins.schedules.warmup_cosine import WarmupCosine

STEPS, BATCH, LENGTH, LAST = 50, 8, 64, 10
NETWORK: dict[str, Any] = {
    "vocab_size": 256,
    "max_sequence_length": LENGTH,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 64,
    "position": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
}


class FrozenFloat32(Callback):
    """Freezes what BitsandbytesWeights quantises, in float32."""

    def change_network(self, network: GPT) -> None:
        """Freezes the blocks' projections."""
        for block in network.blocks:
            for parameter in block.parameters():
                parameter.requires_grad_(parameter.ndim < 2)


def ways() -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns precision -> the one that it is held against, and what to give to the Trainer."""
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "32": ("32", {}),
        "bf16-mixed": ("32", {"precision": "bf16-mixed"}),
        "bf16-true": ("32", {"precision": "bf16-true"}),
        "FP16Mixed": ("32", {"plugins": [FP16Mixed()]}),
    }
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        found[f"Float8 {recipe}"] = "32", {"plugins": [Float8(recipe)]}
    found["32, blocks frozen"] = "32, blocks frozen", {"callbacks": [FrozenFloat32()]}
    for kind in ("nf4", "fp4", "int8"):
        found[f"BitsandbytesWeights {kind}"] = "32, blocks frozen", {"plugins": [BitsandbytesWeights(kind)]}
    return found


class Losses(Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Takes the loss of the step."""
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    """Returns batches of consecutive bytes."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    tokens = torch.tensor(list(text[: steps * BATCH * (LENGTH + 1)])).view(steps, BATCH, LENGTH + 1)
    return [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]


def losses(options: dict[str, Any], steps: int = STEPS) -> list[float]:
    """Returns the loss of each step, in nats per token."""
    torch.manual_seed(0)
    schedule = partial(WarmupCosine, warmup_steps=10)
    module = LanguageModule(partial(GPT, **NETWORK), CausalLM(), partial(AdamW, lr=5e-3), schedule)
    kept = Losses()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, default_root_dir=folder, log_every_n_steps=1, max_epochs=1,
            gradient_clip_val=1.0, **{**options, "callbacks": [*options.get("callbacks", ()), kept]},
        ).fit(module, torch.utils.data.DataLoader(batches(steps), batch_size=None))  # fmt: skip
    return kept.losses


def last(found: list[float]) -> float:
    """Returns the mean of the last steps."""
    return sum(found[-LAST:]) / LAST


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    found: dict[str, list[float]] = {}
    print(
        f"| precision | loss, mean of steps {steps - LAST + 1} to {steps} | beside | difference | largest of a step |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name, (reference, options) in ways().items():
        found[name] = losses(options, steps)
        difference = last(found[name]) - last(found[reference])
        most = max(abs(a - b) for a, b in zip(found[name], found[reference], strict=True))
        print(
            f"| {name} | {last(found[name]):.4f} | {reference} | {difference:+.4f} | {most:.4f} |", flush=True
        )


if __name__ == "__main__":
    main()
