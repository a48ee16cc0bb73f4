"""Runs of the command line on stored tokens, in forked processes: what techniques that try things out leave behind."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest

from conformance.runs import Run
from conformance.workshop import workshop
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.cli.configuration.config_files import merge
from plugins.networks.gpt import GPT
from tests.support import same_run
from tests.support.stored_networks import lively_network, store
from toolkit.memory_limits import drops_steps

NEEDS_DROPPED_STEPS = pytest.mark.skipif(not drops_steps(), reason="it is refused with this torch")
"""Of tests in which steps break off under FSDP2."""


@cache
def tokens() -> str:
    """Returns a folder of tokens of which each follows from the one before it, but for some noise."""
    folder = workshop() / "stored-tokens"
    random = np.random.default_rng(0)
    for split, count in (("train", 8001), ("validation", 300)):
        steps = np.where(random.random(count) < 0.3, random.integers(0, 64, count), 1)
        TokenShards(2000).write([np.cumsum(steps) % 64], folder / split, vocab_size=64)
    return str(folder)


@cache
def taught() -> dict[str, Any]:
    """Returns the overlay of a run that learns from a teacher of three blocks."""
    arguments = {"vocab_size": 64, "n_layer": 3, "n_head": 2, "n_embd": 16, "max_sequence_length": 128}
    path = store(lively_network(GPT, arguments), arguments, workshop() / "teacher-of-tokens.ckpt", data=False)
    return {"model": {"objective": {"class_path": "Distillation", "init_args": {"teacher": str(path)}}}}


def overlay(*parts: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts, laid over 6 steps of 2 x 4 rows of 12 tokens."""
    init_args = {
        "folder": tokens(),
        "sequence_length": 12,
        "batch_size": 4,
        "shuffle": True,
        "vocab_size": 64,
    }
    values: dict[str, Any] = {
        "trainer": {"max_steps": 6, "val_check_interval": 3, "limit_val_batches": 4},
        "data": {"class_path": "tests.support.tokens.StoredTokens", "init_args": init_args},
    }
    for part in parts:
        values = {**values, "data": {}} if "class_path" in part.get("data", {}) else values
        merge(values, deepcopy(part))
    return values


def fit(
    *parts: dict[str, Any], ranks: int = 1, words: tuple[str, ...] = (), code: int = 0, **how: Any
) -> Run:
    """Trains; see :func:`tests.support.same_run.fit`."""
    done = same_run.fit(overlay(*parts), ranks, *words, save_at=4, **how)
    assert done.code == code, done.error_text
    return done


def ended_alike(found: Run, expected: Run) -> None:
    """Asserts that two runs took the same steps and ended with the same weights, state and rates, bit by bit."""
    assert found.record["losses"] == expected.record["losses"]
    assert found.record["figures"] == expected.record["figures"]
    one, other = found.checkpoint(), expected.checkpoint()
    assert one is not None
    assert other is not None
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "language_module"):
        assert same_run.same_bits(one.get(part), other.get(part)), part
    position = "datamodule", "position"
    assert _position(one) == _position(other) != {}, position


def _position(checkpoint: dict[str, Any]) -> Any:
    return next(
        (
            value["position"]
            for value in checkpoint.values()
            if isinstance(value, dict) and "position" in value
        ),
        {},
    )


def callback(name: str, **init_args: Any) -> dict[str, Any]:
    """Returns the overlay that adds a callback."""
    return {"trainer": {"callbacks": [{"class_path": name, "init_args": init_args}]}}


def strategy(name: str, **init_args: Any) -> dict[str, Any]:
    """Returns the overlay that chooses a strategy."""
    return {"trainer": {"strategy": {"class_path": name, "init_args": init_args}}}


def state_of(done: Run, name: str) -> dict[str, Any]:
    """Returns a callback's state in the last checkpoint."""
    found = done.checkpoint()
    assert found is not None
    return dict(found["callbacks"][name])
