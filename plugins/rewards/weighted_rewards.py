"""Adds several rewards, each with a weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from core.errors import ConfigError, nearest
from core.technique import technique
from toolkit.rewards import Reward, Sample, score


@technique(paper="Sparrow, arXiv:2209.14375, section 2.6: sums of rewards, each bounded or of one scale")
class WeightedRewards(Reward):
    """Gives the weighted sum of several rewards. The mean of each, before its weight, is logged by its name.

    Rewards are added as they are: bring them to one scale, or the one of the largest range decides.

    Args:
        rewards: The rewards by name; a name is the end of a figure's, `rollout/reward/NAME`.
        weights: Name -> weight; 1 where it is left out. A negative weight makes a penalty of a reward.

    Raises:
        ConfigError: If there is no reward, or a weight has no reward or is not finite.

    Example:
        trainer:
          callbacks+:
            - class_path: Rollouts
              init_args:
                reward:
                  class_path: WeightedRewards
                  init_args:
                    rewards:
                      right: {class_path: ExactAnswer}
                      short: {class_path: LengthPenalty, init_args: {longest: 256, buffer: 64}}
                    weights: {short: 0.5}
    """

    def __init__(self, rewards: dict[str, Reward], weights: dict[str, float] | None = None) -> None:
        weights = weights or {}
        if not rewards:
            raise ConfigError("WeightedRewards.rewards is empty: name at least one reward.")
        for name, weight in weights.items():
            if name not in rewards:
                raise ConfigError(
                    f"WeightedRewards.weights: there is no reward {name!r}.{nearest(name, list(rewards))}\n"
                    f"The rewards are {', '.join(rewards)}."
                )
            if not math.isfinite(weight):
                raise ConfigError(
                    f"WeightedRewards.weights: that of {name} is {weight}; it is a finite number."
                )
        self.rewards = rewards
        self.weights = {name: weights.get(name, 1.0) for name in rewards}

    def parts(self, samples: Sequence[Sample]) -> Mapping[str, list[float]]:
        """Returns the values of each reward by name, before weights."""
        return {name: score(reward, samples).values for name, reward in self.rewards.items()}

    def combine(self, parts: Mapping[str, list[float]]) -> list[float]:
        """Returns the weighted sum for each sample."""
        weighted = ([self.weights[name] * value for value in values] for name, values in parts.items())
        return [math.fsum(values) for values in zip(*weighted, strict=True)]

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns the weighted sum for each sample."""
        return self.combine(self.parts(samples))
