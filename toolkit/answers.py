"""Answers that a network samples to prompts, and the rows that they are trained on as."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from core.contracts import IGNORED_LABEL, Network
from core.errors import ConfigError
from toolkit.generation.decoding import Decoding
from toolkit.rollouts import ROOM, SAMPLED, Part

__all__ = ["Answer", "Sampler", "as_part", "check_answers", "sample_answers"]


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


class Sampler(ABC):
    """What samples answers in place of the network in training, such as an engine for generation or a copy in bf16.

    Weights and arithmetic may differ from those of the trainer: objectives correct for that by truncated importance weights, for
    which each token has the log-probability with which it was drawn.
    """

    @abstractmethod
    def sample(
        self,
        network: Network,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        seeds: Sequence[int],
        stop_ids: Collection[int],
    ) -> list[Answer]:
        """Samples at temperature 1 from all tokens; arguments and result are those of :func:`sample_answers`.

        Called once for a rollout, on each rank with prompts of its own, maybe none. The network has the weights of now (under
        tensor parallelism as DTensors, on ranks that have the same prompts), is in eval mode and must not be changed. What is drawn follows from seeds, prompts and weights alone: a resumed
        run draws the same.
        """


def check_answers(answers: Sequence[Answer], name: str, count: int, max_new_tokens: int) -> None:
    """Checks what a sampler returned.

    Args:
        answers: What it returned.
        name: Its name.
        count: How many answers it was asked for.
        max_new_tokens: The most tokens of an answer.

    Raises:
        ConfigError: If answers are missing, or one has no tokens, too many, or log-probabilities that do not fit them.
    """
    if len(answers) != count:
        raise ConfigError(
            f"The sampler {name} gave {len(answers)} answers of {count}: one for each seed, in their order."
        )
    for number, (ids, logs, _) in enumerate(answers, 1):
        if not 0 < len(ids) <= max_new_tokens:
            fault = f"with {len(ids)} tokens; it has 1 to {max_new_tokens}, the one that ends it included"
        elif len(logs) != len(ids) or not all(math.isfinite(one) and one <= 1e-3 for one in logs):
            fault = "with log-probabilities that are not one number of at most 0 for each token"
        else:
            continue
        raise ConfigError(f"The sampler {name} gave answer {number} of {count} {fault}.")


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
