"""The text of tokens as they come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from core.errors import ConfigError

__all__ = ["TextStream", "printable", "split_stops", "texts"]


class TextStream:
    """Turns tokens into text that never changes once it is given out.

    A character that consists of several tokens comes with the last of them. Tokens are decoded together with those
    before them: a SentencePiece token at the start of a text loses its space. What may be the beginning of a stop string
    is held back.

    Args:
        tokenizer: A tokenizer of the library `tokenizers`.
        after: The tokens before the first.
        stops: The text ends before the first occurrence of one of these.

    Attributes:
        text: All of it, without the stop string.
        stopped: Whether a stop string came; what is added afterwards is ignored.
    """

    def __init__(self, tokenizer: Any, after: Sequence[int] = (), stops: Sequence[str] = ()):
        self.text, self.stopped = "", False
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._shown, self._pending = list(after), list[int]()
        self._given = 0

    def add(self, token: int) -> str:
        """Returns the text that a token completes; may be empty."""
        self._pending.append(token)
        before = self._decoded(self._shown)
        piece = self._decoded([*self._shown, *self._pending])[len(before) :]
        if piece.endswith("\N{REPLACEMENT CHARACTER}") and len(self._pending) < 8:
            return ""
        self._shown, self._pending = self._pending, []
        return self._append(piece)

    def end(self) -> str:
        """Returns the rest, when no further token comes."""
        rest, self._pending = self._decoded(self._pending), []
        return self._append(rest) + self._give(len(self.text))

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _append(self, piece: str) -> str:
        if self.stopped:
            return ""
        start = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += piece
        places = [place for stop in self._stops if (place := self.text.find(stop, start)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True
        return self._give(len(self.text) - (0 if self.stopped else self._held()))

    def _held(self) -> int:
        """Returns how many of the last characters may begin a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        ends = (self.text[-size:] for size in range(min(longest, len(self.text)), 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)

    def _give(self, end: int) -> str:
        piece, self._given = self.text[self._given : end], max(self._given, end)
        return piece


def texts(tokenizer: Any, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
    """Yields, for each token id, the text that it completes, and last the rest; see :class:`TextStream`."""
    stream = TextStream(tokenizer, after)
    for token in ids:
        yield stream.add(token)
    yield stream.end()


def split_stops(tokenizer: Any, stops: Sequence[str]) -> tuple[list[str], list[int]]:
    """Returns which stop strings are looked for in the text, and the ids of those that are special tokens.

    Raises:
        ConfigError: If one is empty, or has a character that the tokenizer cannot write.
    """
    special = {one.content: id for id, one in tokenizer.get_added_tokens_decoder().items() if one.special}
    strings, ids = [], []
    for stop in stops:
        if stop in special:
            ids.append(special[stop])
        elif not stop or stop not in tokenizer.decode(tokenizer.encode(stop, add_special_tokens=False).ids):
            what = "is empty" if not stop else "cannot be written by the checkpoint's tokenizer"
            raise ConfigError(f"The stop string {stop[:50]!r} {what}: it would never end a text.")
        else:
            strings.append(stop)
    return strings, ids


def printable(text: str) -> str:
    """Replaces control characters, which a terminal might interpret."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
