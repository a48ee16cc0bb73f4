"""Rewards that each break a promise."""

from toolkit.rewards import Reward


class Comparing(Reward):
    """Gives each answer its length in proportion to the longest of those that come with it.

    Example:
        trainer: {callbacks+: [{class_path: Rollouts, init_args: {reward: {class_path: Comparing}}}]}
    """

    def score(self, samples):
        longest = max((len(sample.answer) for sample in samples), default=1)
        return [len(sample.answer) / max(longest, 1) for sample in samples]


class Counting(Reward):
    """Gives each answer one more than the last.

    Example:
        trainer: {callbacks+: [{class_path: Rollouts, init_args: {reward: {class_path: Counting}}}]}
    """

    def __init__(self):
        self.count = 0

    def score(self, samples):
        self.count += len(samples)
        return [float(self.count - len(samples) + number) for number in range(len(samples))]


class Averaging(Reward):
    """Gives each answer the mean number of characters of a word.

    Example:
        trainer: {callbacks+: [{class_path: Rollouts, init_args: {reward: {class_path: Averaging}}}]}
    """

    def score(self, samples):
        return [
            sum(map(len, words)) / len(words) if (words := sample.answer.split()) else float("nan")
            for sample in samples
        ]


class Whole(Reward):
    """Gives each answer the same share of one.

    Example:
        trainer: {callbacks+: [{class_path: Rollouts, init_args: {reward: {class_path: Whole}}}]}
    """

    def score(self, samples):
        return [sample.answer.count("a") * 1.0 for sample in samples] or [0.0]


class Sound(Reward):
    """Gives each answer its number of words.

    Example:
        trainer: {callbacks+: [{class_path: Rollouts, init_args: {reward: {class_path: Sound}}}]}
    """

    def score(self, samples):
        return [float(len(sample.answer.split())) for sample in samples]
