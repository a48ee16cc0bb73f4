"""Answers that a network samples to prompts, and the rows that they are trained on as."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from core.contracts import IGNORED_LABEL, Network
from toolkit.generation.decoding import Decoding
from toolkit.rollouts import ROOM, SAMPLED, Part

__all__ = ["Answer", "as_part", "sample_answers"]


class Answer(NamedTuple):
    """An answer.

    Attributes:
        ids: Its tokens, with the one that ended it.
        log_probabilities: Theirs, in nats, as the decoder computed them.
        ended: Whether the network ended it; False: it was cut off at the most tokens.
    """

    ids: list[int]
    log_probabilities: list[float]
    ended: bool

    @property
    def content(self) -> list[int]:
        """Its tokens without the one that ended it."""
        return self.ids[:-1] if self.ended else self.ids


def sample_answers(
    network: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seeds: Sequence[int],
    stop_ids: Collection[int],
) -> list[Answer]:
    """Samples from the network's distribution as it is: temperature 1, all tokens.

    Args:
        network: Whose answers they are.
        prompts: Token ids of each.
        max_new_tokens: The most tokens of an answer.
        seeds: As many for each prompt, one for each answer.
        stop_ids: Tokens that end an answer.

    Returns:
        The answers to the first prompt, then those to the second, and so on.
    """
    if not prompts:
        return []
    answers = [Answer([], [], False) for _ in seeds]
    decoding = Decoding(
        network,
        prompts,
        max_new_tokens=max_new_tokens,
        seeds=seeds,
        samples=len(seeds) // len(prompts),
        log_probabilities=True,
        inference_mode=False,
    )
    stops = frozenset(stop_ids)  # not the decoder's, which leaves the ending token out
    for token in decoding:
        answer = answers[token.row]
        answer.ids.append(token.id)
        answer.log_probabilities.append(token.log_probability or 0.0)
        if token.id in stops:
            answers[token.row] = answer._replace(ended=True)
            decoding.finish(token.row)
    return answers


def as_part(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    width: int,
    room: int,
    device: torch.device,
) -> Part:
    """Returns rows of prompts with their answers, whose labels are the answers; filled with token 0 behind them.

    Args:
        prompts: Of each answer.
        answers: The answers.
        width: T; at least a prompt with its answer, less one.
        room: The most tokens that an answer could have.
        device: Where the rows are made.
    """
    shape = len(answers), width
    ids = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED_LABEL)
    sampled = torch.zeros(shape)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        whole = torch.tensor([*prompt, *answer.ids])
        begin, end = len(prompt) - 1, len(whole) - 1
        ids[row, :end] = whole[:-1]
        labels[row, begin:end] = whole[begin + 1 :]
        sampled[row, begin:end] = torch.tensor(answer.log_probabilities)
    part = {"input_ids": ids, "labels": labels, SAMPLED: sampled, ROOM: torch.full((len(answers),), room)}
    return {name: values.to(device) for name, values in part.items()}
