"""What a reward is: a number for each answer that a network gave to a prompt; and the names of a rollout's figures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from core.errors import ConfigError, nearest

__all__ = [
    "KL",
    "LENGTH",
    "REPETITION",
    "REWARD",
    "HasParts",
    "Reward",
    "Sample",
    "Scores",
    "field",
    "repetition",
    "score",
]

REWARD = "rollout/reward"
"""Figure: mean reward of the answers. A part's is `rollout/reward/NAME`."""

KL = "rollout/kl"
"""Figure: mean KL divergence from the reference, nats per token of an answer."""

LENGTH = "rollout/length"
"""Figure: mean length of the answers, tokens."""

REPETITION = "rollout/repetition"
"""Figure: mean :func:`repetition` of the answers, 0 to 1."""

_SHOWN = 60


class Sample(NamedTuple):
    """One answer to a prompt.

    Attributes:
        prompt: Text of the prompt, as the record has it: of a chat the last message of the user.
        answer: Text of the answer, without special tokens.
        answer_ids: Its token ids, without the token that ended it.
        ended: Whether the network ended it; False: it was cut off at the most tokens.
        record: The record that the prompt came from, with all of its fields.
    """

    prompt: str
    answer: str
    answer_ids: Sequence[int]
    ended: bool
    record: Mapping[str, Any]


def field(sample: Sample, name: str, option: str) -> Any:
    """Returns a field of a sample's record.

    Args:
        sample: The sample.
        name: The field.
        option: Which argument of the reward names it, such as "ExactAnswer.field".

    Raises:
        ConfigError: If the record has none, or it is empty: names the nearest.
    """
    value = sample.record.get(name)
    if value is None or value in ("", []):
        fields = [str(key) for key in sample.record]
        what = "is empty." if name in fields else f"is missing.{nearest(name, fields)}"
        raise ConfigError(
            f"{option}: the field {name!r} of a record {what}\n"
            f"  prompt: {_shown(sample.prompt)}\n  fields: {', '.join(fields)[:100]}\n"
            "The reward compares answers with it: add it to the data, or name another field."
        )
    return value


class Reward(ABC):
    """A number for each answer; higher is better.

    The value of a sample depends on this sample alone: not on the others, their order, or earlier calls. Each rank scores
    its own samples. A value that cannot be given because of the user's data is a ConfigError that says where and what to
    do; an answer that cannot be read is a bad answer and gets a low value.
    """

    @abstractmethod
    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns the finite value of each sample, in their order."""


@runtime_checkable
class HasParts(Protocol):
    """A reward that consists of several, whose means are logged by name."""

    def parts(self, samples: Sequence[Sample]) -> Mapping[str, list[float]]:
        """Returns the values of each part by its name, before weights."""

    def combine(self, parts: Mapping[str, list[float]]) -> list[float]:
        """Returns the value of each sample from those of the parts; `score` is both in one."""


class Scores(NamedTuple):
    """What a reward gave.

    Attributes:
        values: The value of each sample.
        parts: Part's name -> its values; empty if the reward has no parts.
    """

    values: list[float]
    parts: Mapping[str, list[float]]


def score(reward: Reward, samples: Sequence[Sample]) -> Scores:
    """Asks a reward for the values of samples and checks them.

    Raises:
        ConfigError: If it gives another number of values than there are samples, or one that is not finite: names
            the reward and the sample.
    """
    parts = reward.parts(samples) if isinstance(reward, HasParts) else {}
    values = reward.combine(parts) if isinstance(reward, HasParts) else reward.score(samples)
    name = type(reward).__name__
    for part, found in parts.items():
        _check(f"{part} of {name}", found, samples)
    return Scores(_check(name, values, samples), parts)


def _check(name: str, values: Any, samples: Sequence[Sample]) -> list[float]:
    """Returns the values as floats, once there is a finite one for each sample."""
    if not isinstance(values, Sequence) or len(values) != len(samples):
        found = f"{len(values)} values" if isinstance(values, Sequence) else type(values).__name__
        raise ConfigError(
            f"The reward {name} gave {found} for {len(samples)} samples.\n"
            "Its `score` has to return a list with one number for each sample, in their order."
        )
    checked = [_number(value) for value in values]
    for number, (value, sample) in enumerate(zip(checked, samples, strict=True), 1):
        if not math.isfinite(value):
            raise ConfigError(
                f"The reward {name} gave {values[number - 1]!r:.40} for sample {number} of {len(samples)}:\n"
                f"  prompt: {_shown(sample.prompt)}\n  answer: {_shown(sample.answer)}\n"
                "A reward has to be a finite number. Mend its `score`: for an answer that it cannot judge, such as an\n"
                "empty one, let it return its lowest value."
            )
    return checked


def _number(value: Any) -> float:
    """Returns a value as a float; nan for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _shown(text: str) -> str:
    """Returns the beginning of a text, as one printable line."""
    return ascii(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else "")


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Returns the share of an answer's n-grams that occurred in it before, 0 to 1; 0 if it is shorter than n."""
    count = len(ids) - n + 1
    if count < 1:
        return 0.0
    return 1 - len({tuple(ids[at : at + n]) for at in range(count)}) / count
