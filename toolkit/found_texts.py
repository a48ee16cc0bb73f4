"""Texts of a kind, such as refusals: found by the user's word lists, or by a classifier that they trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.errors import ConfigError
from toolkit.quality_model import read_quality_model
from toolkit.word_lists import WordLists, comparable_words

__all__ = ["Detector"]


class Detector:
    """How sure it is that a text is of a kind, 0 to 1: 1 if a phrase of the lists is in it, else what the classifier says.

    Args:
        files: Lists of words and phrases, one on each line.
        model: File of `train-quality-filter`, of which texts of this kind were the bad examples; None: lists alone.
        owner: Name of the technique, for messages.

    Raises:
        ConfigError: If neither is given, or a file cannot be read.
    """

    def __init__(self, files: Sequence[str], model: str | None, owner: str) -> None:
        if not files and model is None:
            raise ConfigError(
                f"{owner} needs `files`, text files with a word or phrase on each line, or `model`, a file of\n"
                "`python -m core train-quality-filter`."
            )
        self._words = WordLists(files, f"{owner}.files") if files else None
        self._model = read_quality_model(Path(model)) if model is not None else None

    def __call__(self, text: str) -> float:
        """Returns how sure it is of a text."""
        if self._words and self._words.count(comparable_words(text)):
            return 1.0
        return 1 - self._model.score(text) if self._model else 0.0
