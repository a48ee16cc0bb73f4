"""Takes from answers that are toxic."""

from __future__ import annotations

from collections.abc import Sequence

from core.technique import technique
from toolkit.found_texts import Detector
from toolkit.rewards import Reward, Sample


@technique(
    paper="RealToxicityPrompts, arXiv:2009.11462: scores of generated texts; the classifier: DataComp-LM, "
    "arXiv:2406.11794, section 4.4"
)
class ToxicityReward(Reward):
    """Gives minus the probability that an answer is toxic, -1 to 0.

    An answer in which a word or phrase of the lists occurs has -1; any other has what the classifier says. Lists and
    classifier are the user's: what is toxic depends on use and language. A small classifier is soon deceived by a network
    that is trained on it: watch the reward (RewardWatch) and read answers.

    Args:
        files: Lists, text files in UTF-8 with a word or phrase on each line, compared as whole words in any case.
        model: File of `python -m core train-quality-filter --good HARMLESS --bad TOXIC`; None: lists alone.

    Raises:
        ConfigError: If neither is given, or a file cannot be read.

    Example:
        trainer:
          callbacks+:
            - class_path: Rollouts
              init_args:
                reward:
                  class_path: ToxicityReward
                  init_args: {files: [words.txt]}
    """

    def __init__(self, files: Sequence[str] = (), model: str | None = None) -> None:
        self._is_toxic = Detector(files, model, "ToxicityReward")

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns the value of each sample, -1 to 0."""
        return [0.0 - self._is_toxic(sample.answer) for sample in samples]
