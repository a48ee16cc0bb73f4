"""Beam search: the texts of highest probability that a few beams find.

Shapes: P prompts, K beams of each, V token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from core.contracts import Network
from core.errors import ConfigError
from toolkit.generation.decoding import check_prompts, finite, seen_tokens
from toolkit.generation.filters import penalise_repetition
from toolkit.generation.rows import Rows, evaluating

__all__ = ["Hypothesis", "beam_search"]


class Hypothesis(NamedTuple):
    """A text that beam search found.

    Attributes:
        ids: Its new tokens, without the one that ended it.
        score: The sum of their log-probabilities divided by their number (with the end) to the length penalty.
    """

    ids: list[int]
    score: float


@dataclass
class _Search:
    """The beams of one prompt."""

    prompt: list[int]
    beams: list[list[int]] = field(default_factory=lambda: [[]])
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list)


def beam_search(
    network: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float = 1.0,
    repetition_penalty: float = 1.0,
    stop_ids: Collection[int] = (),
    cached: bool = True,
) -> list[list[Hypothesis]]:
    """Returns for each prompt the K texts of highest score, the best first: those of transformers' `generate`.

    A search ends when K texts have ended and the best of the running ones, if it ended now, would score less than
    all of them (transformers' `early_stopping=False`).

    Args:
        network: On any device.
        prompts: Token ids of each, at least one.
        max_new_tokens: The most tokens of a text.
        num_beams: K, at least 1.
        length_penalty: Above 0 favours long texts, below 0 short ones.
        repetition_penalty: As in :class:`toolkit.generation.filters.Sampling`, of log-probabilities.
        stop_ids: Token ids that end a text.
        cached: False computes each text again for each token.

    Raises:
        ConfigError: If a value is out of range or logits are not finite.
    """
    check_prompts(network, prompts, max_new_tokens)
    candidates = max(2, 1 + len(set(stop_ids))) * num_beams
    if num_beams < 1 or candidates > network.vocab_size:
        raise ConfigError(
            f"generate: num_beams={num_beams} must be at least 1, and at most the vocabulary's half."
        )
    if not repetition_penalty > 0:
        raise ConfigError(f"generate: repetition_penalty={repetition_penalty} must be above 0.")
    searches = [_Search(list(ids)) for ids in prompts]
    if not max_new_tokens or not searches:
        return [[Hypothesis([], 0.0)] for _ in searches]
    with evaluating(network), torch.inference_mode():
        rows = Rows(network, prompts, max_new_tokens, cached)
        logits, active = rows.first(), searches
        for length in range(1, max_new_tokens + 1):
            best = _best(logits, active, candidates, repetition_penalty)
            last = length == max_new_tokens
            parents, going = [], []
            row = 0
            for search, found in zip(active, best, strict=True):
                first, row = row, row + len(search.beams)
                kept = _advance(search, found, num_beams, stop_ids, length**length_penalty, last)
                if not last and _may_improve(search, num_beams, length**length_penalty):
                    parents += [first + beam for beam in kept]
                    going.append(search)
            if not going:
                break
            active = going
            logits = rows.step(parents, [ids[-1] for search in active for ids in search.beams])
    return [search.finished for search in searches]


Candidate = tuple[float, int, int]
"""Sum of log-probabilities, beam, token."""


def _best(
    logits: Tensor, searches: Sequence[_Search], count: int, repetition_penalty: float
) -> list[list[Candidate]]:
    """Returns for each search its best continuations by one token, the best first."""
    logs = finite(logits).float().log_softmax(-1)
    if repetition_penalty != 1:
        texts = [search.prompt + ids for search in searches for ids in search.beams]
        logs = penalise_repetition(logs, seen_tokens(texts, logs), repetition_penalty)
    sums = torch.tensor([score for search in searches for score in search.scores], device=logs.device)
    pieces = (logs + sums[:, None]).split([len(search.beams) for search in searches])
    found = []
    for piece in pieces:
        scores, places = piece.flatten().topk(count)
        size = piece.shape[1]
        found.append(
            [
                (score, place // size, place % size)
                for score, place in zip(scores.tolist(), places.tolist(), strict=True)
            ]
        )
    return found


def _advance(
    search: _Search,
    found: Sequence[Candidate],
    num_beams: int,
    stop_ids: Collection[int],
    divisor: float,
    last: bool,
) -> list[int]:
    """Moves what has ended to `finished`, and the others to the beams; returns which beam each of them continues."""
    for score, beam, token in found[:num_beams]:  # those behind them only replace what has ended
        if token in stop_ids:
            search.finished.append(Hypothesis(search.beams[beam], score / divisor))
        elif last:
            search.finished.append(Hypothesis([*search.beams[beam], token], score / divisor))
    search.finished = sorted(search.finished, key=lambda one: -one.score)[:num_beams]
    kept = [one for one in found if one[2] not in stop_ids][:num_beams]
    search.beams = [[*search.beams[beam], token] for _, beam, token in kept]
    search.scores = [score for score, _, _ in kept]
    return [beam for _, beam, _ in kept]


def _may_improve(search: _Search, num_beams: int, divisor: float) -> bool:
    worst = search.finished[-1].score if len(search.finished) == num_beams else float("-inf")
    return search.scores[0] / divisor > worst
