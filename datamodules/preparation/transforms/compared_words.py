"""Words of texts in the form in which they are compared: without case, accents, punctuation and white space."""

from __future__ import annotations

import re
import unicodedata
from functools import cache, lru_cache

FUNCTION_WORDS = frozenset(
    [
        "a",
        "about",
        "above",
        "after",
        "again",
        "against",
        "all",
        "also",
        "am",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "because",
        "been",
        "before",
        "being",
        "below",
        "between",
        "both",
        "but",
        "by",
        "can",
        "cannot",
        "could",
        "did",
        "do",
        "does",
        "done",
        "down",
        "during",
        "each",
        "few",
        "for",
        "from",
        "further",
        "get",
        "got",
        "had",
        "has",
        "have",
        "having",
        "he",
        "her",
        "here",
        "hers",
        "him",
        "his",
        "how",
        "i",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "just",
        "let",
        "like",
        "made",
        "make",
        "many",
        "may",
        "me",
        "might",
        "more",
        "most",
        "much",
        "must",
        "my",
        "no",
        "nor",
        "not",
        "now",
        "of",
        "off",
        "on",
        "once",
        "one",
        "only",
        "or",
        "other",
        "our",
        "out",
        "over",
        "own",
        "same",
        "she",
        "should",
        "so",
        "some",
        "such",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "those",
        "three",
        "through",
        "to",
        "too",
        "two",
        "under",
        "until",
        "up",
        "us",
        "very",
        "was",
        "we",
        "were",
        "what",
        "when",
        "where",
        "which",
        "while",
        "who",
        "whom",
        "whose",
        "why",
        "will",
        "with",
        "would",
        "yes",
        "you",
        "your",
        "answer",
        "answers",
        "best",
        "choose",
        "choice",
        "choices",
        "correct",
        "describe",
        "explain",
        "following",
        "given",
        "question",
        "questions",
        "read",
        "select",
        "sentence",
        "statement",
        "statements",
        "text",
        "true",
        "false",
        "use",
        "used",
        "using",
        "whats",
        "dont",
        "doesnt",
        "isnt",
        "im",
        "ive",
        "id",
        "youre",
        "thats",
    ]
)
"""Words that say nothing of what a text is about."""

_UNSPACED = (  # Thai, Lao, Burmese, Khmer, kana, bopomofo, Han
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u3005-\u3007\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\ua9e0-\ua9ff\uaa60-\uaa7f\uf900-\ufaff\U00020000-\U0003ffff"
)
_UNSEEN = "\u00ad\u200b-\u200d\u2060\ufe00-\ufe0f\ufeff"  # soft hyphens, joiners, variation selectors
_APOSTROPHES = "'\u2019\u02bc\uff07"
_LEFT_OUT = re.compile(f"[{_UNSEEN}{_APOSTROPHES}\u0300-\u036f]")


def words_of(text: str) -> list[str]:
    """Returns the words of a text, in the form in which they are compared."""
    if text.isascii():
        words = word_pattern(True).findall(text.lower())
        return [word.replace("'", "") for word in words] if "'" in text else words
    return [
        word.lower() if word.isalpha() and word.isascii() else _form(word)
        for word in word_pattern(False).findall(text)
    ]


@cache
def word_pattern(ascii_only: bool) -> re.Pattern[str]:
    """Returns the pattern of a word: letters and digits, with marks on them and apostrophes between; one character of a script without spaces."""
    if ascii_only:
        return re.compile("[A-Za-z0-9]+(?:'[A-Za-z0-9]+)*")
    marks = "".join(chr(n) for n in range(0x300, 0x1F000) if unicodedata.category(chr(n))[0] == "M")
    letter, mark = f"[^\\W_{_UNSPACED}]", f"[{_UNSEEN}{re.escape(marks)}]"
    return re.compile(f"[{_UNSPACED}]{mark}*|{letter}+(?:(?:{mark}+|[{_APOSTROPHES}](?={letter})){letter}*)*")


@lru_cache(1 << 16)
def _form(word: str) -> str:
    """Returns a word without case, compatibility forms, accents and apostrophes."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", word).casefold())
    return unicodedata.normalize("NFC", _LEFT_OUT.sub("", folded))
