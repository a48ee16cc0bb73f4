"""What bf16 by policy changes beside autocast: bytes between ranks, and the loss curve beside those of one process.

    LEYDEN_TRUST=tests python -m tests.benchmarks.mesh_precision
    LEYDEN_TRUST=tests python -m tests.benchmarks.mesh_precision --steps 100

Gloo ranks, four micro-batches a step. Bytes are those of one rank's second step, of messages of more than 64 elements. Losses are held
against the run in float32 in one process, of the same batches: the root mean square of their differences over all steps, and the last one.
"""

from __future__ import annotations

import argparse
from typing import Any

from conformance.runs import Run
from tests.support.same_run import fit
from tests.support.sent import sent

WAYS: list[tuple[str, int, dict[str, Any], str]] = [
    ("auto", 1, {}, "32-true"),
    ("auto", 1, {}, "bf16-mixed"),
    ("DDP", 2, {}, "bf16-mixed"),
    ("FSDP", 2, {"param_format": "fp32"}, "bf16-mixed"),
    ("FSDP", 2, {"reduce_format": "fp32"}, "bf16-mixed"),
    ("FSDP", 2, {}, "bf16-mixed"),
    ("FSDP", 2, {"stage": 2}, "bf16-mixed"),
    ("FSDP", 4, {"replicas": 2}, "bf16-mixed"),
    ("HybridParallel", 2, {"tensor": 2, "sequence": 2, "param_format": "fp32"}, "bf16-mixed"),
    ("HybridParallel", 2, {"tensor": 2, "sequence": 2}, "bf16-mixed"),
    ("HybridParallel", 4, {"data_replicate": 2, "tensor": 2}, "bf16-mixed"),
]
SIZES = {
    "n_layer": 4,
    "n_embd": 64,
    "position": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
}


def trained(strategy: str, ranks: int, arguments: dict[str, Any], precision: str, steps: int) -> Run:
    """Returns a run."""
    trainer = {
        "strategy": {"class_path": strategy, "init_args": arguments} if arguments or ranks > 1 else strategy,
        "precision": precision,
        "max_steps": steps,
        "accumulate_grad_batches": 4,
        "limit_val_batches": 0,
        "callbacks": ["tests.support.sent.SentInAStep"] if ranks > 1 else [],
    }
    optimizer = {"class_path": "AdamW", "init_args": {"lr": 3e-3}}
    model = {"network": {"init_args": SIZES}, "optimizer": optimizer}
    return fit({"trainer": trainer, "model": model}, ranks).succeeded(f"{strategy} {arguments}")


def losses(found: Run) -> list[float]:
    """Returns the training loss of each step."""
    return [figures["train/loss"] for figures in found.record["figures"].values()]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    print(
        "| strategy | ranks | precision | KB a step: gathered | scattered | reduced | rms of loss differences | last loss |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    expected: list[float] = []
    for strategy, ranks, arguments, precision in WAYS:
        found = trained(strategy, ranks, arguments, precision, steps)
        curve = losses(found)
        expected = expected or curve
        squares = [(own - other) ** 2 for own, other in zip(curve, expected, strict=True)]
        bytes_of = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
        for kind, (_, size) in (sent(found.stdout) if ranks > 1 else {}).items():
            if kind.split()[0] in bytes_of:  # DDP broadcasts buffers too
                bytes_of[kind.split()[0]] += size
        options = ", ".join(f"{name} {value}" for name, value in arguments.items())
        cells = [
            f"{strategy} {options}".strip(),
            ranks,
            precision,
            *(f"{size / 1000:,.0f}" for size in bytes_of.values()),
            f"{(sum(squares) / len(squares)) ** 0.5:.1e}",
            f"{curve[-1]:.4f}",
        ]
        print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
