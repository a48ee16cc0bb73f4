"""Drops documents that have many words of the user's lists."""

from __future__ import annotations

import hashlib
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from toolkit.bounded import MOST_BYTES
from toolkit.document_filter import DocumentFilter

_MOST_WORDS = 32
"""Limit of a phrase, in words: so many are compared at each place at most."""

_UNSPACED = (  # Thai, Lao, Burmese, Khmer, kana, bopomofo, Han
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u3005-\u3007\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\ua9e0-\ua9ff\uaa60-\uaa7f\uf900-\ufaff\U00020000-\U0003ffff"
)


@technique(
    paper="C4, arXiv:1910.10683, section 2.2: pages with a word of a list are removed; whole words by Unicode's "
    "caseless matching, Unicode Standard, section 3.13"
)
class HarmfulContent(DocumentFilter):
    """Drops documents that have many words or phrases of lists.

    A list is a text file in UTF-8 with a word or phrase on each line; lines that begin with # are comments. Whole words are
    compared, without regard to case and compatibility forms (full width, ligatures); marks of Indic and other scripts
    belong to their word, and each character of a script without spaces is a word. A phrase is found with any spaces
    and punctuation between its words. Of matches that overlap the first counts, of those that begin together the
    longest; a phrase counts as many words as it has. The time is linear in the text's length.

    A document is dropped if both limits are reached; two of these transforms drop what reaches either.

    Args:
        files: The lists.
        min_count: Least number of words in matches for which a document is dropped.
        max_share: Largest share of words in matches that is kept, 0 to 1.

    Raises:
        ConfigError: If a list cannot be read or has no words, or a number is out of range.

    Example:
        data:
          init_args:
            transforms:
              - class_path: HarmfulContent
                init_args: {files: [words.txt], min_count: 3, max_share: 0.005}
    """

    def __init__(self, files: Sequence[str], min_count: int = 3, max_share: float = 0.005) -> None:
        if not files:
            raise ConfigError("HarmfulContent.files is empty: name a text file with a word on each line.")
        if min_count < 1:
            raise ConfigError(f"HarmfulContent.min_count is {min_count}; it is at least 1.")
        if not 0 <= max_share <= 1:
            raise ConfigError(f"HarmfulContent.max_share is {max_share}; it is between 0 and 1.")
        self.min_count, self.max_share = min_count, max_share
        self._phrases = {phrase for name in files for phrase in _listed(Path(name).expanduser())}
        lengths: dict[str, set[int]] = defaultdict(set)
        for phrase in self._phrases:
            lengths[phrase[0]].add(len(phrase))
        self._lengths = {first: sorted(some, reverse=True) for first, some in lengths.items()}

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the limits, a digest of the words, and the version of the Unicode tables."""
        words = "\n".join(sorted(" ".join(phrase) for phrase in self._phrases))
        digest = hashlib.sha256(words.encode()).hexdigest()
        return {**super().fingerprint(), "words": digest, "unicode": unicodedata.unidata_version}

    def reason(self, text: str) -> str | None:
        """Returns "harmful words" or None."""
        words = words_of(text)
        if self._lengths.keys().isdisjoint(words):
            return None
        count = self.matched(words)
        return "harmful words" if count >= self.min_count and count > self.max_share * len(words) else None

    def matched(self, words: Sequence[str]) -> int:
        """Returns how many of a text's words are part of a match."""
        count = at = 0
        while at < len(words):
            lengths = self._lengths.get(words[at], ())
            rest = len(words) - at
            length = next((n for n in lengths if n <= rest and tuple(words[at : at + n]) in self._phrases), 0)
            count += length
            at += length or 1
        return count


def words_of(text: str) -> list[str]:
    """Returns the words of a text, in the form in which they are compared."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _word().findall(_IGNORABLE.sub("", folded))


_ASCII_WORD = re.compile("[a-z0-9]+")
_IGNORABLE = re.compile(
    "[\u00ad\u200b-\u200d\u2060\ufe00-\ufe0f\ufeff]"
)  # soft hyphens, joiners, variation selectors


@cache
def _word() -> re.Pattern[str]:
    """A letter or digit with the marks behind it of a script without spaces, or a run of such of another script."""
    marks = [chr(n) for n in range(0x300, 0x1F000) if unicodedata.category(chr(n))[0] == "M"]
    mark = "".join(map(re.escape, marks))
    return re.compile(f"[{_UNSPACED}][{mark}]*|[^\\W_{_UNSPACED}](?:[^\\W_{_UNSPACED}]|[{mark}])*")


def _listed(path: Path) -> Iterator[tuple[str, ...]]:
    """Yields the phrases of a list."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"HarmfulContent.files: {path} has more than {MOST_BYTES >> 20} MiB.")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(
            f"HarmfulContent.files: {path}: {error.strerror}.\nGive a text file with a word on each line."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"HarmfulContent.files: {path} is not UTF-8, at byte {error.start}. Convert it."
        ) from error
    phrases = [
        (number, tuple(map(sys.intern, words_of(line))))
        for number, line in enumerate(lines, 1)
        if line[:1] != "#"
    ]
    if not any(phrase for _, phrase in phrases):
        raise ConfigError(f"HarmfulContent.files: {path} has no words.")
    for number, phrase in phrases:
        if len(phrase) > _MOST_WORDS:
            raise ConfigError(
                f"HarmfulContent.files: {path}, line {number} has {len(phrase)} words; a phrase has {_MOST_WORDS} at most."
            )
        if phrase:
            yield phrase
