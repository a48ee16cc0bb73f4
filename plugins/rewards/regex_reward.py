"""Rewards an answer of a form."""

from __future__ import annotations

import re
from collections.abc import Sequence

from core.errors import ConfigError
from core.technique import technique
from toolkit.rewards import Reward, Sample

_MOST_CHARACTERS = 100_000
"""Limit of the characters of an answer that are searched."""


@technique(paper="DeepSeek-R1, arXiv:2501.12948, section 2.2.2: format rewards")
class RegexReward(Reward):
    """Gives `found` to an answer in which a regular expression is found, and `absent` to any other.

    It is Python's `re`, with "." for line breaks too. Some expressions, such as (a+)+b, take time that grows without bound
    with the length of what they do not match: avoid nested repetitions. The first 100,000 characters are searched.

    Args:
        pattern: The regular expression; (?i) at its beginning ignores case.
        whole: Whether all of the answer has to match, but for spaces around it, and not a part of it.
        found: Value of an answer that matches.
        absent: Value of any other.

    Raises:
        ConfigError: If `pattern` is no regular expression.

    Example:
        trainer:
          callbacks+:
            - class_path: Rollouts
              init_args:
                reward:
                  class_path: RegexReward
                  init_args: {pattern: "<think>.+</think>.+", whole: true}
    """

    def __init__(self, pattern: str, whole: bool = False, found: float = 1.0, absent: float = 0.0) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"RegexReward.pattern {pattern[:200]!r} is no regular expression of Python: {error}."
            ) from error
        self.whole, self.found, self.absent = whole, found, absent

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns `found` or `absent` for each sample."""
        return [self.found if self._matches(sample.answer) else self.absent for sample in samples]

    def _matches(self, answer: str) -> bool:
        text = answer[:_MOST_CHARACTERS]
        found = self._pattern.fullmatch(text.strip()) if self.whole else self._pattern.search(text)
        return found is not None
