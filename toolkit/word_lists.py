"""Lists of words and phrases in the user's files, and where they occur in a text."""

from __future__ import annotations

import hashlib
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from core.errors import ConfigError
from toolkit.bounded import MOST_BYTES

__all__ = ["WordLists", "comparable_words"]

_MOST_WORDS = 32
"""Limit of a phrase, in words: so many are compared at each place at most."""

_UNSPACED = (  # Thai, Lao, Burmese, Khmer, kana, bopomofo, Han
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u3005-\u3007\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\ua9e0-\ua9ff\uaa60-\uaa7f\uf900-\ufaff\U00020000-\U0003ffff"
)


class WordLists:
    """The words and phrases of text files in UTF-8, one on each line; lines that begin with # are comments.

    Whole words are compared, without regard to case and compatibility forms (full width, ligatures); marks of Indic and
    other scripts belong to their word, and each character of a script without spaces is a word. A phrase is found with
    any spaces and punctuation between its words.

    Args:
        files: The lists.
        option: How messages name them, such as "HarmfulContent.files".

    Raises:
        ConfigError: If there is no list, or one cannot be read or has no words.
    """

    def __init__(self, files: Sequence[str], option: str) -> None:
        if not files:
            raise ConfigError(f"{option} is empty: name a text file with a word on each line.")
        self._phrases = {phrase for name in files for phrase in _listed(Path(name).expanduser(), option)}
        lengths: dict[str, set[int]] = defaultdict(set)
        for phrase in self._phrases:
            lengths[phrase[0]].add(len(phrase))
        self._lengths = {first: sorted(some, reverse=True) for first, some in lengths.items()}

    def digest(self) -> str:
        """Returns a SHA-256 of the words, whatever their order and files."""
        words = "\n".join(sorted(" ".join(phrase) for phrase in self._phrases))
        return hashlib.sha256(words.encode()).hexdigest()

    def count(self, words: Sequence[str]) -> int:
        """Returns how many of a text's :func:`comparable_words` are part of a match.

        Of matches that overlap the first counts, of those that begin together the longest.
        """
        if self._lengths.keys().isdisjoint(words):
            return 0
        count = at = 0
        while at < len(words):
            lengths = self._lengths.get(words[at], ())
            rest = len(words) - at
            length = next((n for n in lengths if n <= rest and tuple(words[at : at + n]) in self._phrases), 0)
            count += length
            at += length or 1
        return count


def comparable_words(text: str) -> list[str]:
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


def _listed(path: Path, option: str) -> Iterator[tuple[str, ...]]:
    """Yields the phrases of a list."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{option}: {path} has more than {MOST_BYTES >> 20} MiB.")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{option}: {path}: {error.strerror}.\nGive a text file with a word on each line."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path} is not UTF-8, at byte {error.start}. Convert it.") from error
    phrases = [
        (number, tuple(map(sys.intern, comparable_words(line))))
        for number, line in enumerate(lines, 1)
        if line[:1] != "#"
    ]
    if not any(phrase for _, phrase in phrases):
        raise ConfigError(f"{option}: {path} has no words.")
    for number, phrase in phrases:
        if len(phrase) > _MOST_WORDS:
            raise ConfigError(
                f"{option}: {path}, line {number} has {len(phrase)} words; a phrase has {_MOST_WORDS} at most."
            )
        if phrase:
            yield phrase
