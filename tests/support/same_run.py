"""One tiny run with any strategy on real gloo ranks, and how far it is from the same run in one process.

The run has what a strategy could get wrong: accumulation, clipping that bites in every step, rows with very
different numbers of labels, tied embeddings, validation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import torch

from conformance.runs import Run, run
from conformance.workshop import workshop, write_config
from plugins.cli.configuration.config_files import merge

STEPS, SAVED, CLIP = 4, 2, 0.25
"""Optimizer steps; behind which a checkpoint is written; the limit of the gradient norm. More steps repeat these."""

TOLERANCE = 1e-5
"""Relative, in float32: sums of a few hundred terms in another order (6e-8 each), which the steps let grow."""

CONFIG: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "log_every_n_steps": 1,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": CLIP,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "logger": False,
        "plugins": [{"class_path": "AtomicCheckpoint"}],
    },
    "model": {
        "network": {
            "class_path": "GPT",
            "init_args": {
                "vocab_size": 64,
                "n_layer": 2,
                "n_head": 4,
                "n_embd": 16,
                "max_sequence_length": 16,
            },
        },
        "objective": "CausalLM",
        # gradient noise of 1e-8 would flip the sign of Adam's first steps where a gradient is zero in theory
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5, "momentum": 0.9}},
    },
    "data": {"class_path": "tests.support.uneven.UnevenData"},
}

FOUR_BLOCKS: dict[str, Any] = {"model": {"network": {"init_args": {"n_layer": 4}}}}
"""For schedules with two stages on each of two ranks, and for four ranks."""


def fit(
    overlay: Mapping[str, Any],
    ranks: int,
    *words: str,
    kill_at: int | None = None,
    name: str = "",
    save_at: int = SAVED,
) -> Run:
    """Trains; the label of the folder follows from the configuration unless there is a name."""
    values = merge(deepcopy(CONFIG), deepcopy(dict(overlay)))
    label = name or f"same-{abs(hash(json.dumps(values, sort_keys=True))):x}-{ranks}"
    folder = workshop() / label
    recorder = {"folder": str(folder), "kill_at": kill_at}
    callbacks = [
        {"class_path": "conformance.recorder.Recorder", "init_args": recorder},
        *values["trainer"].pop("callbacks", []),
        {
            "class_path": "conformance.recorder.Saver",
            "init_args": {"folder": str(folder), "save_at": save_at},
        },
    ]
    merge(values, {"trainer": {"devices": ranks, "default_root_dir": str(folder), "callbacks": callbacks}})
    return run(["fit", f"--config={write_config(label, values)}", *words], folder, ranks=ranks)


@cache
def _one(text: str) -> Run:
    done = fit(json.loads(text), 1)
    assert done.code == 0, done.error_text
    return done


def one_process(overlay: Mapping[str, Any]) -> Run:
    """Returns the run in one process; `overlay` is without the strategy."""
    return _one(json.dumps(overlay, sort_keys=True))


def differences(found: Run, expected: Run) -> dict[str, float]:
    """Returns the largest relative difference of losses, gradient norms and final weights.

    Raises:
        AssertionError: If a run failed, or has other steps, or its clipping did not bite.
    """
    assert found.code == 0, found.error_text
    one, other = found.record["figures"], expected.record["figures"]
    assert len(one) == len(other) == STEPS
    assert all(figures["train/grad_norm"] > CLIP for figures in other.values())
    apart = {"loss": 0.0, "gradient norm": 0.0, "weights": 0.0}
    for step, figures in other.items():
        assert one[step].keys() == figures.keys()
        assert one[step]["train/tokens"] == figures["train/tokens"]
        for name, kind in {
            "train/loss": "loss",
            "val/loss": "loss",
            "train/grad_norm": "gradient norm",
        }.items():
            if name in figures:
                apart[kind] = max(apart[kind], abs(one[step][name] / figures[name] - 1))
    apart["weights"] = weights_apart(found, expected)
    return apart


def weights_apart(found: Run, expected: Run) -> float:
    """Returns the largest difference of final weights, relative to the largest weight of the same tensor."""
    one, other = found.checkpoint(), expected.checkpoint()
    assert one is not None
    assert other is not None
    assert list(one["state_dict"]) == list(other["state_dict"])
    return max(
        float((one["state_dict"][name] - weight).abs().max() / weight.abs().max().clamp(min=1e-6))
        for name, weight in other["state_dict"].items()
    )


def same_bits(found: Any, expected: Any) -> bool:
    """Returns whether two nested states are the same to the last bit."""
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
        )
    if isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(
            same_bits(found[key], expected[key]) for key in expected
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same_bits, found, expected))
    return bool(found == expected)
