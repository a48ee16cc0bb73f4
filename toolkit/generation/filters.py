"""What changes the distribution of the next token. The order is that of transformers: repetition penalty, temperature,
top-k, top-p, min-p.

Shapes: B rows, V token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampling", "draw", "next_token_probabilities", "penalise_repetition"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: Divides the logits; 0 takes the likeliest token (greedy).
        top_k: Keeps the k likeliest tokens, arXiv:1805.04833; at least 1, or None.
        top_p: Of these, keeps the fewest likeliest that together reach p: nucleus sampling, arXiv:1904.09751.
            Above 0, at most 1, or None.
        min_p: Of these, keeps those of at least this share of the likeliest one's probability, arXiv:2407.01082.
            0 to 1, or None.
        repetition_penalty: Logits of tokens that are in the prompt or the text are divided by it where positive and
            multiplied where negative: CTRL, arXiv:1909.05858, section 4.1. Above 0; 1 changes nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def fault(self) -> str | None:
        """Returns which value is out of its range, or None."""
        top_k, top_p, min_p, inf = self.top_k, self.top_p, self.min_p, float("inf")
        problems = {
            f"temperature={self.temperature} must be 0 (greedy) or above.": not 0 <= self.temperature < inf,
            f"top_k={top_k} must be at least 1.": top_k is not None and top_k < 1,
            f"top_p={top_p} must be above 0 and at most 1.": top_p is not None and not 0 < top_p <= 1,
            f"min_p={min_p} must be 0 to 1.": min_p is not None and not 0 <= min_p <= 1,
            f"repetition_penalty={self.repetition_penalty} must be above 0.": not 0
            < self.repetition_penalty
            < inf,
        }
        return next((message for message, applies in problems.items() if applies), None)


def penalise_repetition(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Returns logits or log-probabilities (B, V) in which those of the `seen` tokens (B, V) are made smaller."""
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def next_token_probabilities(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Returns the distribution ([B,] V) from which the next token is drawn, given its `logits` ([B,] V).

    Args:
        logits: Logits of any floating type and device.
        temperature: As in :class:`Sampling`, like the others; 0 puts all probability on the largest.
        top_k: Applied first.
        top_p: Applied to what top-k has left.
        min_p: Applied last.
    """
    size = logits.shape[-1]
    # below 1e-38 the divisor would be 0 in float32
    scaled = (logits.float() - logits.amax(-1, keepdim=True)) / (
        max(temperature, 1e-30) if temperature else 1.0
    )
    if temperature > 0 and top_k is None and top_p is None:  # without the sort, which costs most of a draw
        probabilities = torch.softmax(scaled, dim=-1)
        if min_p is None:
            return probabilities
        probabilities[probabilities < min_p * probabilities.amax(-1, keepdim=True)] = 0
        return probabilities / probabilities.sum(-1, keepdim=True)
    kept, ids = torch.topk(scaled, 1 if temperature == 0 else min(top_k or size, size))
    kept = torch.softmax(kept, dim=-1)
    if top_p is not None:
        kept[kept.cumsum(-1) - kept >= top_p] = 0
    if min_p is not None:
        kept[kept < min_p * kept[..., :1]] = 0
    return torch.zeros_like(scaled).scatter(-1, ids, kept / kept.sum(-1, keepdim=True))


def draw(probabilities: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
    """Draws a token id for each row of (B, V), with its own generator: other rows do not change what it draws."""
    return [
        int(torch.multinomial(row.to(generator.device), 1, generator=generator))
        for row, generator in zip(probabilities, generators, strict=True)
    ]
