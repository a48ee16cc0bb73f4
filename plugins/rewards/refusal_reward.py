"""Rewards answers that refuse where they should, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import ConfigError
from core.technique import technique
from toolkit.found_texts import Detector
from toolkit.rewards import Reward, Sample, field


@technique(
    paper="Llama 2, arXiv:2307.09288, section 4.2: safety and false refusals; phrases of refusals: Zou et al., "
    "arXiv:2307.15043, appendix B"
)
class RefusalReward(Reward):
    """Gives 1 to an answer that refuses a prompt that should be refused, or answers any other; else 0.

    A refusal is an answer with a phrase of the lists, such as "I cannot help with", in its first words, or to which the
    classifier gives at least 0.5.

    Args:
        files: Lists, text files in UTF-8 with a phrase on each line, compared as whole words in any case.
        model: File of `python -m core train-quality-filter --good ANSWERS --bad REFUSALS`; None: lists alone.
        field: The record's field that is true where the prompt should be refused; None: no prompt should be.
        characters: How much of an answer is looked at.

    Raises:
        ConfigError: If neither lists nor a classifier are given, a file cannot be read, `characters` < 1, or a record
            lacks the field or it is neither true nor false.

    Example:
        trainer:
          callbacks+:
            - class_path: Rollouts
              init_args:
                reward:
                  class_path: RefusalReward
                  init_args: {files: [refusals.txt], field: harmful}
    """

    def __init__(
        self,
        files: Sequence[str] = (),
        model: str | None = None,
        field: str | None = None,
        characters: int = 200,
    ) -> None:
        if characters < 1:
            raise ConfigError(f"RefusalReward.characters is {characters}; it is at least 1.")
        self._refuses = Detector(files, model, "RefusalReward")
        self.field, self.characters = field, characters

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns 1 or 0 for each sample."""
        return [float(self._should_refuse(sample) == self._is_refused(sample)) for sample in samples]

    def _is_refused(self, sample: Sample) -> bool:
        return self._refuses(sample.answer[: self.characters]) >= 0.5

    def _should_refuse(self, sample: Sample) -> bool:
        if self.field is None:
            return False
        value = field(sample, self.field, "RefusalReward.field")
        if not isinstance(value, bool):
            raise ConfigError(
                f"RefusalReward.field: {self.field!r} of a record is {value!r:.60}; it has to be true or false.\n"
                f"  prompt: {sample.prompt[:60]!a}"
            )
        return value
