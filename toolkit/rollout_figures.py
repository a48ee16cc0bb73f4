"""Figures of a rollout as sums, by the names that they are logged under."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL
from toolkit.answers import Answer
from toolkit.rewards import KL, LENGTH, REPETITION, REWARD, Scores, repetition
from toolkit.rollouts import OLD, REFERENCE, SAMPLED, Part

__all__ = ["BEST", "ENDED", "ENTROPY", "GAP", "rollout_figures"]

BEST = "rollout/best"
"""Figure: mean over prompts of the largest reward of their answers."""

ENDED = "rollout/ended"
"""Figure: share of the answers that the network ended."""

ENTROPY = "rollout/entropy"
"""Figure: mean of minus the log-probabilities of the tokens, whose expectation is the entropy of the next token, in nats."""

GAP = "rollout/gap"
"""Figure: mean difference between the log-probabilities of decoder and trainer, in nats."""

BY_TOKEN: dict[str, Callable[[Part], Tensor]] = {
    ENTROPY: lambda part: -part[OLD],
    GAP: lambda part: (part[OLD] - part[SAMPLED]).abs(),
    KL: lambda part: part[OLD] - part[REFERENCE],
}
"""Figure -> its value for each label, 0 elsewhere."""


def rollout_figures(
    answers: Sequence[Answer], scores: Scores, parts: Sequence[Part], samples: int
) -> dict[str, tuple[float, float]]:
    """Returns name -> sum and what it is divided by, of this rank.

    Args:
        answers: The answers, `samples` to each prompt in turn.
        scores: Their rewards.
        parts: The answers as rows, with their log-probabilities.
        samples: Answers to each prompt.
    """
    rows = len(answers)
    groups = torch.tensor(scores.values, dtype=torch.float64).view(-1, samples)
    found: dict[str, tuple[float, float]] = {
        REWARD: (float(groups.sum()), rows),
        BEST: (float(groups.amax(1).sum()), len(groups)),
        LENGTH: (sum(len(answer.ids) for answer in answers), rows),
        ENDED: (sum(answer.ended for answer in answers), rows),
        REPETITION: (sum(repetition(answer.content) for answer in answers), rows),
    }
    found |= {f"{REWARD}/{name}": (sum(values), rows) for name, values in scores.parts.items()}
    tokens = sum(int((part["labels"] != IGNORED_LABEL).sum()) for part in parts)
    for name, of in BY_TOKEN.items():
        if name != KL or all(REFERENCE in part for part in parts):
            sums = [of(part).sum(dtype=torch.float32).item() for part in parts]
            found[name] = sum(sums), tokens
    return found
