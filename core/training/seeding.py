"""Seeds for torch's generators that follow from the position in a run, so that none has to be saved."""

from __future__ import annotations

import torch

__all__ = ["mix", "seed_generators"]


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the generators that a step on this device draws from, without waiting for it."""
    # Not torch.manual_seed: where a device type is not in use it queues a call with a stack trace, each time.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def mix(*numbers: int) -> int:
    """Hashes integers to 32 bits (splitmix64's finaliser); the CPU generator uses no more of its seed."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 32
