"""Drops documents that have items of evaluation sets, or cuts the items out."""

from __future__ import annotations

import hashlib
import re
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow

from core.contracts import Transform
from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.transforms.compared_words import FUNCTION_WORDS, word_pattern, words_of
from datamodules.preparation.transforms.evaluation_sets import EvaluationSet, read_sets
from toolkit.arrow_columns import flags, strings

_LEAST_CHARACTERS = 16
"""Letters and digits of an item that is looked for: a word of Chinese or Thai is one character."""

_COMMON_ITEMS = 10
"""An n-gram of more items than this is their common wording (or 1% of the items, if that is more, for a word)."""

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: of the words' random codes it makes a polynomial modulo 2^64

Span = tuple[int, int]
"""A range: its begin, and what is behind its end."""


class Match(NamedTuple):
    """A passage of a text that is of an item.

    Attributes:
        set: Name of its evaluation set.
        item: Its number in the set, from 0.
        start: The passage's first character.
        end: The character behind its last one.
        share: Share of the item's words that is in the text, 0 to 1.
    """

    set: str
    item: int
    start: int
    end: int
    share: float


class _Grams(NamedTuple):
    """The n-grams of one length, sorted by hash: `items` and `offsets` say where each is from."""

    hashes: np.ndarray
    items: np.ndarray
    offsets: np.ndarray


@technique(
    paper="n-grams of 13 words, shorter for shorter items: GPT-3, arXiv:2005.14165, appendix C; a share of 70% of an item's "
    "words: PaLM, arXiv:2204.02311, section 8"
)
class Decontaminate(Transform):
    """Drops documents that have items of evaluation sets, or cuts these out.

    Words are compared without regard to case, accents, punctuation and white space. An item of at least `ngram` words is found
    where n-grams of that length cover `min_share` of its words, in any places of the document; a shorter item only
    where all of its words stand behind each other. n-grams that more than ten items share (instructions, templates) do not
    count. Items with too few words, or with too few distinctive ones, are common phrases and are not looked
    for: distinctive are words that are no function words, have three letters, and are not in more than 1% of the items
    (ten, of few items).

    Time is linear in the text's length: a rolling hash over the words' codes is looked up in a table of the items'
    n-grams. Memory is some 30 bytes for each word of the sets in each process, 300 while they are read, whatever the corpus.

    Of a folder, each .yaml file with `task` is a set, with its data beside it or named by `dataset_kwargs.data_files`, of its
    `test_split` (or `validation_split`). Templates are not executed: the fields are those whose names begin a `{{...}}` in
    `doc_to_decontamination_query` or `doc_to_text`; functions need `fields`. Nothing is downloaded.

    The report counts documents and items for each set, and shows passages with the number of their item.

    Args:
        sets: Files with items (.jsonl, .parquet), or folders with tasks of lm-evaluation-harness.
        fields: Fields with the items' text, in all sets; `a.b` is field b of the object in a. Tasks name their own.
        joined: Whether the fields of an item are one text; otherwise each is looked for alone.
        action: "drop" documents with an item, or "cut" the items out of them.
        ngram: Words of the longest n-gram.
        min_words: Words of the shortest item that is looked for.
        min_distinctive: Least number of distinctive words of an item of `min_words` words; two further words of any kind
            make up for one.
        min_share: Share of an item's words, 0 to 1, from which it counts as found.

    Raises:
        ConfigError: If a set cannot be read, has none of the fields or no item that can be looked for, or a number is out
            of range.

    Example:
        data:
          init_args:
            transforms:
              - class_path: Decontaminate
                init_args: {sets: [gsm8k.jsonl, tasks/arc], fields: [question]}
    """

    def __init__(
        self,
        sets: Sequence[str],
        fields: Sequence[str] = (),
        joined: bool = False,
        action: Literal["drop", "cut"] = "drop",
        ngram: int = 13,
        min_words: int = 5,
        min_distinctive: int = 2,
        min_share: float = 0.7,
    ) -> None:
        if not sets:
            raise ConfigError(
                "Decontaminate.sets is empty: name files with evaluation items, or task folders."
            )
        if action not in ("drop", "cut"):
            raise ConfigError(f"Decontaminate.action is {action!r}; it is drop or cut.")
        if not 3 <= min_words <= ngram:
            raise ConfigError(
                f"Decontaminate: min_words is {min_words}, ngram {ngram}; it takes 3 <= min_words <= ngram."
            )
        if min_distinctive < 0 or not 0 <= min_share <= 1:
            raise ConfigError(
                f"Decontaminate: min_distinctive is {min_distinctive} (at least 0), min_share {min_share} (between 0 and 1)."
            )
        self.action, self.ngram, self.min_words = action, ngram, min_words
        self.min_distinctive, self.min_share = min_distinctive, min_share
        found = read_sets(sets, fields, joined)
        self._options = {"fields": list(fields), "joined": joined}
        self._digests = [[one.name, *one.digests] for one in found]
        self._counts: Counter[str] = Counter()
        self._index(found)

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options, the digests of the sets' files, and the version of the Unicode tables."""
        options = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**options, **self._options, "sets": self._digests, "unicode": unicodedata.unidata_version}

    def take_counts(self) -> Mapping[str, int]:
        """Returns since the last call, for each set, the documents with items of it, and the items in them."""
        counts, self._counts = self._counts, Counter()
        return counts

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Drops the documents with items, or cuts these out and drops what becomes empty."""
        texts = batch["text"].to_pylist()
        found = {row: matches for row, text in enumerate(texts) if (matches := self.matches(text))}
        if not found:
            return batch
        reasons: dict[str, list[int]] = defaultdict(list)
        shown = {row: _shown(texts[row], matches[0]) for row, matches in found.items()}
        for row, matches in found.items():
            self._count(matches)
            if self.action == "cut":
                texts[row] = without(texts[row], matches)
            if self.action == "drop" or not texts[row]:
                reasons[f"has items of {matches[0].set}"].append(row)
        for reason, rows in reasons.items():
            drop(reason, rows, [shown[row] for row in rows])
        if self.action == "cut":
            batch = batch.set_column(batch.schema.get_field_index("text"), "text", strings(texts))
        gone = {row for rows in reasons.values() for row in rows}
        return batch.filter(flags([row not in gone for row in range(len(texts))])) if gone else batch

    def _count(self, matches: Sequence[Match]) -> None:
        for name in {match.set for match in matches}:
            self._counts[f"{name}: documents"] += 1
            self._counts[f"{name}: items in them"] += len(
                {match.item for match in matches if match.set == name}
            )

    def matches(self, text: str) -> list[Match]:
        """Returns the passages of a text that are of items, in the order of sets, items and places."""
        places = self._places(words_of(text))
        if not places:
            return []
        spans = [match.span() for match in word_pattern(text.isascii()).finditer(text)]
        found = sorted(
            (origin, spans[first][0], spans[last - 1][1], share)
            for item, (passages, share) in places.items()
            for origin in self._origins[item]
            for first, last in passages
        )
        return [
            Match(self._digests[index][0], item, start, end, share)
            for (index, item), start, end, share in found
        ]

    def _places(self, words: Sequence[str]) -> dict[int, tuple[list[Span], float]]:
        """Returns of each item that is there its passages, as ranges of words, and its share."""
        if len(words) < self._least:
            return {}
        codes = self._codes[np.fromiter(map(self._words.get, words, repeat(0)), np.int32, len(words))]
        hashes = _rolled(codes, self._least)
        at = np.flatnonzero(self._table[hashes >> self._shift])  # few: where an n-gram may begin
        hashes, length = hashes[at], self._least
        hits: dict[int, list[tuple[int, int, int]]] = defaultdict(
            list
        )  # item -> (offset in it, place, words)
        for size, grams in self._grams.items():  # from the shortest
            inside = at <= len(codes) - size
            at, hashes = at[inside], hashes[inside]
            for further in range(length, size):
                hashes = hashes * _BASE + codes[at + further]
            length = size
            for place, low, high in _equal(grams.hashes, hashes, at):
                for item, offset in zip(grams.items[low:high], grams.offsets[low:high], strict=True):
                    hits[int(item)].append((int(offset), place, size))
        return {item: judged for item, some in hits.items() if (judged := self._judged(item, some))}

    def _judged(self, item: int, hits: Sequence[tuple[int, int, int]]) -> tuple[list[Span], float] | None:
        """Returns passages and share of an item, if enough of it is there."""
        share = _covered({(offset, offset + size) for offset, _, size in hits}) / int(self._coverable[item])
        if share < self.min_share:
            return None
        return _merged({(place, place + size) for _, place, size in hits}), share

    # --- the index ----------------------------------------------------------------------------------------------------

    def _index(self, found: Sequence[EvaluationSet]) -> None:
        """Makes the tables of the items' n-grams."""
        origins: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
        for index, one in enumerate(found):
            for number, text in one.texts:
                origins[tuple(words_of(text))].append((index, number))
        items = self._looked_for(origins)
        self._check_looked_for(found, origins, items)
        self._origins = [origins[item] for item in items]
        self._words = {word: number for number, word in enumerate({w: 0 for item in items for w in item}, 1)}
        self._codes = np.array(
            [_code(word) for word in ("", *self._words)], np.uint64
        )  # the first: any other word
        numbers = [self._codes[[self._words[word] for word in item]] for item in items]
        sizes = sorted({min(len(item), self.ngram) for item in items})
        self._least = sizes[0]
        self._coverable = np.zeros(len(items), np.int64)
        self._grams, begins = {}, []
        for size in sizes:
            of_size = [n for n, item in enumerate(items) if min(len(item), self.ngram) == size]
            self._grams[size], firsts = self._grams_of(numbers, of_size, size)
            begins.append(firsts)
        bits = max(16, min(28, 4 + int(sum(map(len, begins))).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, np.bool_)
        self._table[np.concatenate(begins) >> self._shift] = True

    def _grams_of(
        self, numbers: Sequence[np.ndarray], of_size: Sequence[int], size: int
    ) -> tuple[_Grams, np.ndarray]:
        """Returns the table of the n-grams of one length, and the hashes of their first words."""
        hashes = np.concatenate([_rolled(numbers[item], size) for item in of_size])
        windows = [len(numbers[item]) - size + 1 for item in of_size]
        items = np.repeat(np.array(of_size, np.int32), windows)
        offsets = np.concatenate([np.arange(n, dtype=np.int32) for n in windows])
        firsts = np.concatenate(
            [_rolled(numbers[item], self._least)[:n] for item, n in zip(of_size, windows, strict=True)]
        )
        order = np.lexsort((offsets, items, hashes))
        hashes, items, offsets, firsts = hashes[order], items[order], offsets[order], firsts[order]
        again = (
            np.flatnonzero((hashes[1:] == hashes[:-1]) & (items[1:] == items[:-1])) + 1
        )  # the first place counts
        hashes, items, offsets, firsts = (
            np.delete(column, again) for column in (hashes, items, offsets, firsts)
        )
        _, group, number = np.unique(hashes, return_inverse=True, return_counts=True)
        own = number[group] <= _COMMON_ITEMS
        keep = own | ~np.isin(items, items[own])  # of an item without n-grams of its own all count
        hashes, items, offsets, firsts = hashes[keep], items[keep], offsets[keep], firsts[keep]
        by_item: dict[int, set[Span]] = defaultdict(set)
        for item, offset in zip(items.tolist(), offsets.tolist(), strict=True):
            by_item[item].add((offset, offset + size))
        for item, spans in by_item.items():
            self._coverable[item] = _covered(spans)
        return _Grams(hashes, items, offsets), firsts

    def _looked_for(self, items: Mapping[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
        """Returns the items that are long and distinctive enough."""
        frequency = Counter(word for item in items for word in set(item))
        most = max(_COMMON_ITEMS, len(items) // 100)

        def is_distinctive(word: str) -> bool:
            long_enough = len(word) >= 3 or not word.isascii()
            return long_enough and word not in FUNCTION_WORDS and frequency[word] <= most

        return [
            item
            for item in items
            if len(item) >= self.min_words
            and sum(map(len, item)) >= _LEAST_CHARACTERS
            and 2 * sum(map(is_distinctive, set(item))) + len(item)
            >= 2 * self.min_distinctive + self.min_words
        ]

    def _check_looked_for(
        self,
        found: Sequence[EvaluationSet],
        origins: Mapping[tuple[str, ...], Sequence[tuple[int, int]]],
        items: Sequence[tuple[str, ...]],
    ) -> None:
        """Says how many texts of each set are not looked for; refuses a set of which none is."""
        looked = Counter(index for item in items for index, _ in origins[item])
        for index, one in enumerate(found):
            total = len(one.texts)
            what = f"fewer than {self.min_words} words, or too few distinctive ones"
            if not looked[index]:
                raise ConfigError(
                    f"Decontaminate: none of the {total:,} texts of {one.name} can be looked for: they have {what}.\n"
                    "Give `fields` with longer texts, or joined: true."
                )
            if looked[index] < total:
                missing = total - looked[index]
                warnings.warn(
                    f"Decontaminate: {missing:,} of the {total:,} texts of {one.name} are not looked for: {what}.",
                    stacklevel=5,
                )


def _code(word: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


def _rolled(codes: np.ndarray, size: int) -> np.ndarray:
    """Returns the hash of each n-gram of a size."""
    number = max(0, len(codes) - size + 1)
    hashes = np.zeros(number, np.uint64)
    for further in range(size):
        hashes *= _BASE
        hashes += codes[further : further + number]
    return hashes


def _equal(table: np.ndarray, hashes: np.ndarray, at: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields each place whose hash is in a sorted table, with the range of its entries there."""
    low, high = np.searchsorted(table, hashes, "left"), np.searchsorted(table, hashes, "right")
    for index in np.flatnonzero(high > low).tolist():
        yield int(at[index]), int(low[index]), int(high[index])


def _merged(spans: set[Span]) -> list[Span]:
    """Returns the union of ranges as ranges that do not touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _covered(spans: set[Span]) -> int:
    return sum(end - start for start, end in _merged(spans))


def _shown(text: str, match: Match) -> str:
    return f"item {match.item} ({match.share:.0%}): {text[match.start : match.end]}"


_CLOSING = re.compile(r"[^\w\s]*")


def without(text: str, matches: Sequence[Match]) -> str:
    """Returns a text without passages and the punctuation behind them; "" if no letter or digit is left."""
    spans = {(one.start, one.end + len(_CLOSING.match(text, one.end)[0])) for one in matches}  # type: ignore[index]
    left, at = "", 0
    for start, end in _merged(spans):
        left += text[at:start]
        at = end + (text[end : end + 1] == " " and left[-1:] in ("", " ", "\n"))
    left += text[at:]
    return left if any(map(str.isalnum, left)) else ""
