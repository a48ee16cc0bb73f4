"""Encodes exactly as SentencePiece does with a Unigram model: its normalization, and its sums in single precision.

Many segmentations are about equally likely ("*****" into "**" and "***"). Which one SentencePiece chooses depends on the
rounding of its sums, which run through the full document: at the end of a page they are exact to 0.01 nats. The
`tokenizers` library adds in double precision, and chooses others.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from datamodules.preparation.tokenizers.sentencepiece_model import (
    BYTE,
    NORMAL,
    SPACE,
    USER_DEFINED,
    SentencePieceModel,
    any_of,
)

_SINGLE = struct.Struct("f")

_UNKNOWN_PENALTY, _OWN_BONUS = 10, 0.1
"""In nats: how much less likely an unknown character is than the least likely piece; score of a user-defined piece for
each byte but the first.
"""

_LEAST_SUM = -100_000.0
"""Below this sum SentencePiece 0.2.3 restarts from 0, at any character (unigram_model.cc, kScoreResetThreshold)."""

_MOST_REMEMBERED, _LONGEST_REMEMBERED = 1 << 17, 64
_WINDOW = 1024
"""Words whose sums are computed together; after a word that rounding decides, they are computed again."""

_USUAL = "\t\n" + "".join(map(chr, range(32, 127)))
_USUAL_RUN = re.compile(r"[\t\n -~]+(?![^\t\n -~])")  # a following character may combine with the last one


class Word(NamedTuple):
    """A part of a text that no piece crosses the ends of, and its segmentation without rounding.

    Attributes:
        text: The part.
        ids: Ids of its pieces.
        scores: Scores of its pieces, in nats.
        margin: Least difference, in nats, between the best and the second best choice; below 0: rounding decides.
    """

    text: str
    ids: list[int]
    scores: list[float]
    margin: float


@dataclass
class UnigramEncoder:
    """Encodes texts to the ids of `SentencePieceProcessor.encode`.

    Args:
        model: A Unigram model.
    """

    model: SentencePieceModel

    def __post_init__(self) -> None:
        scores = [score for _, score, kind in self.model.pieces if kind == NORMAL]
        self._unknown = float(np.float32(min(scores)) - np.float32(_UNKNOWN_PENALTY))
        self._pieces: dict[str, tuple[int, float] | None] = {}  # None: a prefix of a piece
        for number, (piece, score, kind) in enumerate(self.model.pieces):
            if kind in (NORMAL, USER_DEFINED):
                own = float(np.float32(_OWN_BONUS * (len(piece.encode()) - 1)))
                self._pieces[piece] = number, own if kind == USER_DEFINED else score
        for piece in list(self._pieces):
            for end in range(1, len(piece)):
                self._pieces.setdefault(piece[:end])
        self._bytes = {
            piece: number for number, (piece, _, kind) in enumerate(self.model.pieces) if kind == BYTE
        }
        self._own = self.model.types[USER_DEFINED]
        self._crossing = any(SPACE in piece.lstrip(SPACE) for piece, found in self._pieces.items() if found)
        self._words: dict[str, Word] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return UnigramEncoder, (self.model,)

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text.

        Each distinct word is segmented once, without rounding. If rounding may decide, which depends on the sum
        before the word, the word is segmented again as SentencePiece does.
        """
        text = self._normalise(text)
        if self._crossing:
            return self._fused(self._rounded(text, 0.0)[0])
        words = [self._word(part) for part in re.findall(f"{SPACE}*[^{SPACE}]+|{SPACE}+", text)]
        scores = np.array([score for word in words for score in word.scores], np.float32)
        ends = np.cumsum([0, *(len(word.scores) for word in words)])
        slack = np.array([word.margin / (2 * len(word.text) + 2) for word in words])
        depth = np.array([self._unknown * len(word.text) for word in words])  # no sum within a word is lower
        ids: list[int] = []
        begin, total = 0, np.float32(0)
        while begin < len(words):
            stop = min(begin + _WINDOW, len(words))
            sums = np.cumsum(np.append(total, scores[ends[begin] : ends[stop]]), dtype=np.float32)
            sums = sums[ends[begin : stop + 1] - ends[begin]]  # before each word, and after the last
            rounding = np.spacing(2 * np.maximum(abs(sums[:-1]), abs(sums[1:])))
            other: list[int] = []
            restarts = sums[:-1] + depth[begin:stop] < _LEAST_SUM
            for at in np.flatnonzero((slack[begin:stop] <= rounding) | restarts).tolist():
                word = words[begin + at]
                other, end = self._rounded(word.text, float(sums[at]))
                if other != word.ids or end != sums[at + 1]:
                    stop, sums = begin + at, np.array([end], np.float32)
                    break
                other = []
            for word in words[begin:stop]:
                ids += word.ids
            ids += other
            begin, total = stop + bool(other), sums[-1]
        return self._fused(ids)

    def _fused(self, ids: list[int]) -> list[int]:
        """Returns the ids with each run of unknown ids merged into one."""
        unknown = self.model.unknown_id
        if self.model.byte_fallback or unknown not in ids:
            return ids
        return [
            found for found, before in zip(ids, [None, *ids], strict=False) if not found == before == unknown
        ]

    def _word(self, text: str) -> Word:
        """Returns a word segmented without rounding."""
        if found := self._words.get(text):
            return found
        if len(text) > _LONGEST_REMEMBERED or any(piece in text for piece in self._own):
            return Word(text, [-1], [0.0], -1.0)
        best, second = [0.0] + [-math.inf] * len(text), [-math.inf] * (len(text) + 1)
        back: list[Any] = [None] * (len(text) + 1)
        for begin in range(len(text)):
            for end, number, score in self._edges(text, begin):
                total = best[begin] + score
                if total > best[end]:
                    best[end], second[end], back[end] = total, best[end], (begin, number, score)
                else:
                    second[end] = max(second[end], total)
        steps = self._steps(text, back)
        margin = min(best[end] - second[end] for _, end, _, _ in steps)
        word = Word(text, self._ids(text, steps), [score for *_, score in steps], margin)
        if len(self._words) >= _MOST_REMEMBERED:
            self._words.clear()
        self._words[text] = word
        return word

    def _rounded(self, text: str, total: float) -> tuple[list[int], float]:
        """Segments as SentencePiece does after a sum of `total`; returns the ids and the sum after the text."""
        best = [total] + [-math.inf] * len(text)
        back: list[Any] = [None] * (len(text) + 1)
        for begin in range(len(text)):
            if best[begin] < _LEAST_SUM:
                best[begin:] = [
                    _SINGLE.unpack(_SINGLE.pack(total - best[begin]))[0] for total in best[begin:]
                ]
            before = best[begin]
            for end, number, score in self._edges(text, begin):
                [total] = _SINGLE.unpack(_SINGLE.pack(before + score))
                if total > best[end]:
                    best[end], back[end] = total, (begin, number, score)
        return self._ids(text, self._steps(text, back)), best[-1]

    def _edges(self, text: str, begin: int) -> Iterator[tuple[int, int, float]]:
        """Yields (end, id, score) of the pieces that begin at a position, shortest first, the unknown piece last."""
        alone = False
        for end in range(begin + 1, len(text) + 1):
            part = text[begin:end]
            if part not in self._pieces:
                break
            if (found := self._pieces[part]) is not None:
                alone = alone or end == begin + 1
                yield end, *found
        if not alone:
            yield begin + 1, self.model.unknown_id, self._unknown

    def _steps(self, text: str, back: list[Any]) -> list[tuple[int, int, int, float]]:
        """Returns (begin, end, id, score) of the pieces of the best path."""
        steps, end = [], len(text)
        while end:
            begin, number, score = back[end]
            steps.append((begin, end, number, score))
            end = begin
        return steps[::-1]

    def _ids(self, text: str, steps: list[tuple[int, int, int, float]]) -> list[int]:
        """Returns the ids of pieces; unknown ones become bytes if the model has byte pieces."""
        if not self.model.byte_fallback:
            return [number for _, _, number, _ in steps]
        unknown, ids = self.model.unknown_id, []
        for begin, end, number, _ in steps:
            spelt = [f"<0x{byte:02X}>" for byte in text[begin:end].encode()] if number == unknown else []
            ids += [self._bytes[name] for name in spelt] or [number]
        return ids

    # Normalisation --------------------------------------------------------------------------------------

    def _normalise(self, text: str) -> str:
        """Returns the normalized text; see Normalizer::Normalize of SentencePiece."""
        if not text:
            return ""
        if self.model.character_map:
            if self._own:  # user-defined pieces are not normalized
                parts = re.split(f"({any_of(self._own)})", text)
                text = "".join(part if n % 2 else self._map(part) for n, part in enumerate(parts))
            else:
                text = self._map(text)
        if self.model.strip_spaces:
            text = re.sub(" {2,}", " ", text.lstrip(" "))
        text = text.replace(" ", SPACE)
        if self.model.dummy_prefix:
            text = SPACE + text
        return text.rstrip(SPACE) if self.model.strip_spaces else text

    def _map(self, text: str) -> str:
        if self._usual is None:
            return self._map_slowly(text)
        parts, begin = [], 0
        for run in _USUAL_RUN.finditer(text):
            parts += [self._map_slowly(text[begin : run.start()]), run[0].translate(self._usual)]
            begin = run.end()
        return "".join([*parts, self._map_slowly(text[begin:])])

    def _map_slowly(self, text: str) -> str:
        """Replaces the longest known sequence at each position."""
        data, found, at = text.encode(), bytearray(), 0
        while at < len(data):
            new, size = self._longest(data, at)
            found += new
            at += size
        return found.decode("utf-8", "replace")

    @cached_property
    def _usual(self) -> dict[int, str] | None:
        """Replacement of each usual character; None if pairs of them have replacements of their own."""
        alone = {letter: self._longest(letter.encode(), 0)[0].decode() for letter in _USUAL}
        if any(self._longest((a + b).encode(), 0)[1] > 1 for a in _USUAL for b in _USUAL):
            return None
        return {ord(letter): new for letter, new in alone.items()}

    @cached_property
    def _trie(self) -> tuple[list[int], bytes]:
        """The units of a Darts double array, and the strings that its values point into."""
        [size] = struct.unpack_from("<I", self.model.character_map)
        units = np.frombuffer(self.model.character_map, "<u4", size // 4, 4)
        return units.tolist(), self.model.character_map[4 + size :]

    def _longest(self, data: bytes, at: int) -> tuple[bytes, int]:
        """Returns the replacement and length of the longest known sequence at a position; else the character itself."""
        units, strings = self._trie
        found, size = -1, 0
        node = _offset(units[0])
        for end in range(at, len(data)):
            node ^= data[end]
            unit = units[node] if node < len(units) else 0
            if unit & 0x800000FF != data[end]:
                break
            node ^= _offset(unit)
            if unit >> 8 & 1:
                found, size = units[node] & 0x7FFFFFFF, end + 1 - at
        if found >= 0:
            return strings[found : strings.index(0, found)], size
        size = 1 + (data[at] >= 0xC0) + (data[at] >= 0xE0) + (data[at] >= 0xF0)
        return data[at : at + size], size


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 512) >> 6)
