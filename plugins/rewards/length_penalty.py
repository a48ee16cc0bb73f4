"""Takes from long answers, more the nearer they come to the limit."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import ConfigError
from core.technique import technique
from toolkit.rewards import Reward, Sample


@technique(paper="DAPO, arXiv:2503.14476, equation 13: soft overlong punishment, 16,384 + 4,096 tokens")
class LengthPenalty(Reward):
    """Gives 0 to an answer of at most `longest` - `buffer` tokens, -1 to one longer than `longest`, evenly less in between.

    It is to be added to another reward, by WeightedRewards. An answer that was cut off has all tokens that the rollout
    allows: with `longest` at that number and a buffer, the network learns to end before it is cut off.

    Args:
        longest: Tokens of an answer from which on the penalty is whole.
        buffer: Tokens before `longest` over which it grows; 0: all at once.

    Raises:
        ConfigError: If not 0 <= `buffer` <= `longest`, or `longest` < 1.

    Example:
        trainer:
          callbacks+:
            - class_path: Rollouts
              init_args:
                reward:
                  class_path: LengthPenalty
                  init_args: {longest: 256, buffer: 64}
    """

    def __init__(self, longest: int, buffer: int = 0) -> None:
        if longest < 1 or not 0 <= buffer <= longest:
            raise ConfigError(
                f"LengthPenalty: longest is {longest} and buffer {buffer} tokens; 0 <= buffer <= longest and longest >= 1."
            )
        self.longest, self.buffer = longest, buffer

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns the penalty of each sample, -1 to 0."""
        return [self._penalty(len(sample.answer_ids)) for sample in samples]

    def _penalty(self, tokens: int) -> float:
        if tokens > self.longest:
            return -1.0
        over = tokens - (self.longest - self.buffer)
        return -over / self.buffer if over > 0 else 0.0
