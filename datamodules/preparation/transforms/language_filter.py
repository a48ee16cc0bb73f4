"""Keeps documents of given languages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from core.errors import ConfigError, nearest
from core.technique import Package, technique
from toolkit.document_filter import DocumentFilter


@technique(
    paper="langid.py, Lui and Baldwin 2012, aclanthology.org/P12-3005: naive Bayes on byte n-grams; py3langid. "
    "Least confidence: FineWeb, arXiv:2406.17557, section 3.3, there of fastText",
    needs=(Package("py3langid>=0.4", extra="language"),),
)
class LanguageFilter(DocumentFilter):
    """Keeps documents that are written in one of some languages.

    The language is the most likely one of about 140; its confidence is its probability, after the log-likelihoods are
    divided by the square root of the text's length in bytes, as py3langid does. A document in another language is dropped
    as "language fr", one below the least confidence as "uncertain language". The report counts the kept ones by language.

    Args:
        languages: ISO 639 codes of what is kept, such as `en`.
        min_confidence: Least confidence that is kept, 0 to 1.
        characters: How many characters at the beginning of a document decide; None: all. The time is linear in it.

    Raises:
        ConfigError: If a language is not known, or a number is out of range.

    Example:
        data:
          init_args:
            transforms:
              - class_path: LanguageFilter
                init_args: {languages: [en], min_confidence: 0.65, characters: 4000}
    """

    def __init__(
        self, languages: Sequence[str], min_confidence: float = 0.65, characters: int | None = 4000
    ) -> None:
        if not languages:
            raise ConfigError("LanguageFilter.languages is empty: name what is kept, such as [en].")
        known = _identifier().labels
        for code in languages:
            if code not in known:
                advice = (
                    nearest(code, known)
                    or f" It is one of {', '.join(known[:60])} and {len(known) - 60} more."
                )
                raise ConfigError(f"LanguageFilter.languages: {code!r} is no language that is known.{advice}")
        if not 0 <= min_confidence <= 1:
            raise ConfigError(f"LanguageFilter.min_confidence is {min_confidence}; it is between 0 and 1.")
        if characters is not None and characters < 1:
            raise ConfigError(
                f"LanguageFilter.characters is {characters}; it is at least 1, or None for all."
            )
        self.languages = sorted(set(languages))
        self.min_confidence, self.characters = min_confidence, characters
        self._counts: Counter[str] = Counter()

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options and the version of the model."""
        return {**super().fingerprint(), "model": f"py3langid {version('py3langid')}"}

    def take_counts(self) -> Mapping[str, int]:
        """Returns how many documents were kept since the last call, by language."""
        counts, self._counts = self._counts, Counter()
        return counts

    def reason(self, text: str) -> str | None:
        """Returns "language" with its code, "uncertain language", or None."""
        language, confidence = _identifier().classify(text[: self.characters])
        if confidence < self.min_confidence:
            return "uncertain language"
        if language not in self.languages:
            return f"language {language}"
        self._counts[f"language {language} kept"] += 1
        return None


@cache  # once for each process
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
