"""How likely a network finds continuations of texts, and whether it would choose them itself.

Shapes: B rows, T positions, C features, N tokens that are scored, V token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from core.training.shards import full_tensor
from toolkit.evaluation import EvaluatedModel
from toolkit.log_probabilities import CHUNK_TOKENS

__all__ = ["WINDOW", "Continuation", "Score", "encode_pair", "score", "split"]

WINDOW = 2048
"""Tokens that a network without a limit sees at once, as in lm-eval."""


class Continuation(NamedTuple):
    """Token ids `ids` behind the ids of `context`, of which there is at least one."""

    context: Sequence[int]
    ids: Sequence[int]


class Score(NamedTuple):
    """What the network says of a continuation.

    Attributes:
        log_probability: Natural logarithm of its probability behind its context: the sum over its tokens.
        greedy: Whether each of its tokens is the likeliest one in its place.
    """

    log_probability: float
    greedy: bool


def encode_pair(
    encode: Callable[[str], list[int]], context: str, continuation: str, beginning: Sequence[int]
) -> Continuation:
    """Returns the ids of two texts that are encoded together, as lm-eval does: spaces between them belong to the second.

    Args:
        encode: Returns the ids of a text, with what stands in front of it.
        context: The first text.
        continuation: The second text.
        beginning: Takes the place of a context without tokens.
    """
    before = encode(context.rstrip())
    return Continuation(before or beginning, encode(context + continuation)[len(before) :])


def score(model: EvaluatedModel, continuations: Sequence[Continuation]) -> list[Score]:
    """Returns the score of each continuation.

    What does not fit into the network's `max_sequence_length` is cut off in front of the context. A continuation that is itself
    longer is cut into parts, each with all the context that fits.

    Args:
        model: With a causal network.
        continuations: In any order; those that differ in their last token alone are computed once.
    """
    window = model.network.max_sequence_length or WINDOW
    rows: dict[tuple[int, ...], list[tuple[int, Sequence[int]]]] = {}
    for number, (context, ids) in enumerate(continuations):
        for before, new in split(context, ids, window):
            whole = (*before, *new)[-window - 1 :]
            rows.setdefault(whole[:-1], []).append((number, new))
    totals = torch.zeros(len(continuations), dtype=torch.float64)
    greedy = torch.ones(len(continuations), dtype=torch.bool)
    order = sorted((row for row in rows), key=lambda row: (-len(row), row))
    for start in range(0, len(order), model.batch_size):
        inputs = order[start : start + model.batch_size]
        wanted = [
            (place, len(row) - len(new) + offset, id, number)
            for place, row in enumerate(inputs)
            for number, new in rows[row]
            for offset, id in enumerate(new)
        ]
        values, chosen = _at(model, inputs, torch.tensor(wanted, dtype=torch.int64).view(-1, 4))
        numbers = torch.tensor([one[-1] for one in wanted], dtype=torch.int64)
        totals.index_add_(0, numbers, values)
        greedy[numbers[~chosen]] = False
    return [Score(*pair) for pair in zip(totals.tolist(), greedy.tolist(), strict=True)]


def split(context: Sequence[int], ids: Sequence[int], window: int) -> Iterator[Continuation]:
    """Yields parts that predict each of the ids once, of at most `window` ids each; one part if they fit.

    A further part has all the context that fits into the window.
    """
    whole, first = [*context, *ids], len(context)
    done = 0
    while done < len(ids):
        end = min(len(ids), done + window)
        begin = 0 if done == 0 else max(0, first + end - window - 1)
        yield Continuation(whole[begin : first + done], whole[first + done : first + end])
        done = end


def _at(model: EvaluatedModel, inputs: Sequence[Sequence[int]], wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-probability (N,) of tokens in float64, and whether each is the likeliest one; on the CPU.

    Args:
        model: Whose network is called once.
        inputs: Token ids of each of B rows; they are filled up behind their end, where a causal network does not look.
        wanted: (N, 4): row, position whose logits are used, and the token; the fourth is not used.
    """
    ids = torch.zeros(len(inputs), max(map(len, inputs)), dtype=torch.int64)
    for place, row in enumerate(inputs):
        ids[place, : len(row)] = torch.tensor(row)
    hidden = model.network({"input_ids": ids.to(model.device)})
    values, chosen = [], []
    for part in wanted.to(model.device).split(CHUNK_TOKENS):
        rows, positions, tokens, _ = part.unbind(1)
        logits = full_tensor(model.network.logits(hidden[rows, positions]))
        logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        values.append(logs.gather(-1, tokens[:, None])[:, 0].cpu().double())
        chosen.append((logs.argmax(-1) == tokens).cpu())
    return torch.cat(values), torch.cat(chosen)
