"""Rows of documents that are tokenised while they are read."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from core.contracts import Batch, PackedBatches, Reader, Transform
from core.errors import ConfigError
from datamodules.packing.concatenate import to_batch
from datamodules.packing.permutation import Permutation
from datamodules.packing.token_window import TokenWindow
from toolkit.skipped_input import SkipsInput

TOGETHER = 4
"""Pieces of the source that are read in turn where documents are shuffled, so that neighbours are not of one file."""

SHUFFLED = 1 << 25
"""Characters of the documents that are shuffled at a time."""

_ENCODED = 1 << 18
"""Characters that are encoded at a time."""

Place = tuple[int, int, int]
"""Epoch, group of pieces in the epoch's order, document in the group's order."""

Row = tuple[TokenWindow, int]
"""The tokens of a global batch, and the position of the row's first one."""


@dataclass
class HeldOut:
    """Which documents are no training data: each `every`th of some pieces, until there are `most`.

    Args:
        pieces: Number of each piece -> its first such document.
        every: Distance of the documents.
        most: How many of each piece.
    """

    pieces: Mapping[int, int] = field(default_factory=dict)
    every: int = 1
    most: int = 0

    def __contains__(self, place: tuple[int, int]) -> bool:
        piece, document = place
        if (first := self.pieces.get(piece)) is None or document < first:
            return False
        number, between = divmod(document - first, self.every)
        return not between and number < self.most


@dataclass
class TextStream:
    """The documents of a reader as ids, in a seeded order for each epoch, from any place on.

    In each epoch the pieces of the source come in another order, in groups of :data:`TOGETHER`. The pieces of a group are read
    in turn, and the documents of :data:`SHUFFLED` characters of what was read are put into another order. Nothing else is kept.

    Args:
        reader: Reads the pieces.
        tasks: The pieces, as the reader gives them.
        transforms: What is done with documents, each by itself.
        encode: Returns the ids of texts.
        end_of_text_id: What ends a document.
        held_out: Documents that are left out.
    """

    reader: Reader
    tasks: Sequence[dict[str, Any]]
    transforms: Sequence[Transform]
    encode: Callable[[Sequence[str]], list[list[int]]]
    end_of_text_id: int
    held_out: HeldOut

    def texts_of(self, piece: int) -> Iterator[tuple[int, str]]:
        """Yields number and text of the documents of a piece that are not blank."""
        number = 0
        for batch in self.reader.read(self.tasks[piece], self._reject):
            for transform in self.transforms:
                batch = transform.apply(batch, _ignore)
            for text in batch["text"].to_pylist():
                if text and not text.isspace():
                    yield number, text
                    number += 1

    def _reject(self, source: str, place: str, reason: str, details: str, lost: int = 0) -> None:
        if not (isinstance(self.reader, SkipsInput) and reason in self.reader.skipped):
            raise ConfigError(
                f"{place}: {reason}{f': {details}' if details else '.'}\nMend it, or `prepare` the source, which sets aside what "
                "cannot be used, and train on that folder."
            )

    def documents(
        self, place: Place, shuffle: bool, seed: int
    ) -> Generator[tuple[Place, np.ndarray], None, None]:
        """Yields documents from a place on without end, each with its place, ids and the end of the text.

        What is before the place in its group is read, but not encoded.
        """
        epoch, group, document = place
        size = TOGETHER if shuffle else 1
        groups = -(-len(self.tasks) // size)
        empty = False
        while not empty:
            empty = group == 0 and document == 0
            order = (
                Permutation(len(self.tasks), (seed, epoch)) if shuffle else range(len(self.tasks)).__getitem__
            )
            for number in range(group, groups):
                pieces = [order(at) for at in range(number * size, min((number + 1) * size, len(self.tasks)))]
                key = (seed, epoch, number) if shuffle else None
                texts = islice(self._ordered(pieces, key), document, None)
                for ids in self.encoded(texts):
                    yield (epoch, number, document), ids
                    empty = False
                    document += 1
                document = 0
            epoch, group = epoch + 1, 0
        raise ConfigError(
            "data.source: no document is left for training; all are blank, dropped or held out for validation."
        )

    def encoded(self, texts: Iterator[str]) -> Iterator[np.ndarray]:
        """Yields the ids of texts, each with the end of the text."""
        held: list[str] = []
        size = 0
        for text in texts:
            held.append(text)
            size += len(text)
            if size >= _ENCODED:
                yield from self._ids(held)
                held, size = [], 0
        yield from self._ids(held)

    def _ids(self, texts: list[str]) -> Iterator[np.ndarray]:
        for ids in self.encode(texts):
            yield np.array([*ids, self.end_of_text_id], np.int64)

    def _ordered(self, pieces: Sequence[int], key: tuple[int, ...] | None) -> Iterator[str]:
        """Yields the training documents of a group; with a key, in an order that it decides."""
        texts = self._in_turn(pieces)
        if key is None:
            yield from texts
            return
        window = 0
        while held := list(_up_to(texts, SHUFFLED)):
            order = Permutation(len(held), (*key, window))
            yield from (held[order(at)] for at in range(len(held)))
            held.clear()  # before the next ones are read
            window += 1

    def _in_turn(self, pieces: Sequence[int]) -> Iterator[str]:
        waiting = deque((piece, self.texts_of(piece)) for piece in pieces)
        while waiting:
            piece, texts = waiting.popleft()
            if (found := next(texts, None)) is not None:
                waiting.append((piece, texts))
                if (piece, found[0]) not in self.held_out:
                    yield found[1]


def _up_to(texts: Iterator[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text
        if (characters := characters - len(text)) <= 0:
            return


def _ignore(*_: Any) -> None:
    """Takes note of nothing: what is called with the documents that a transform drops."""


class _Held(NamedTuple):
    place: Place
    ids: np.ndarray


class _Reading:
    """Reads on from a cursor.

    Args:
        documents: Documents from the cursor's place on.
        cursor: Where to begin.
    """

    def __init__(
        self, documents: Generator[tuple[Place, np.ndarray], None, None], cursor: dict[str, int]
    ) -> None:
        weakref.finalize(self, documents.close)  # before the interpreter takes its modules apart
        self._documents, self.cursor, self.process = documents, cursor, os.getpid()
        self._held: deque[_Held] = deque()
        self._begin = cursor["token"]  # of what is held
        self._size = -self._begin

    def take(self, count: int) -> TokenWindow:
        """Returns the next tokens and the one behind them, and moves the cursor by `count`."""
        while self._size <= count:
            self._held.append(_Held(*next(self._documents)))
            self._size += len(self._held[-1].ids)
        pieces, starts, at = [], [], -self._begin
        for _, ids in self._held:
            if at >= 0:
                starts.append(at)
            pieces.append(ids[max(0, -at) : count + 1 - at])
            at += len(ids)
        window = TokenWindow(np.concatenate(pieces), np.array(starts, np.int64))
        self._begin += count
        self._size -= count
        while self._begin >= len(self._held[0].ids):
            self._begin -= len(self._held.popleft().ids)
        epoch, group, document = self._held[0].place
        self.cursor = {
            "epoch": epoch,
            "group": group,
            "document": document,
            "token": self._begin,
            "tokens": self.cursor["tokens"] + count,
        }
        return window


@dataclass(eq=False)
class StreamedBatches(PackedBatches):
    """One rank's batches of a stream of documents that is tokenised as it is read, and continues across epochs.

    The position is an epoch, a document of it and a token of that. A global batch is `batch_size * world_size` successive rows of the one
    stream, of which each rank takes its slice and each worker its turn. How many tokens a document has is known when it is tokenised:
    each process tokenises all documents.

    Args:
        stream: The documents.
        tokens: About how many tokens an epoch has.
        source: What identifies documents and their order.
        mask_documents: See :class:`datamodules.packing.concatenate.Concatenate`.
    """

    stream: TextStream
    tokens: int
    source: str
    sequence_length: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = False
    seed: int = 0
    pad: bool = False
    mask_documents: bool = False

    def __post_init__(self) -> None:
        self.cursor = dict.fromkeys(("epoch", "group", "document", "token", "tokens"), 0)
        self._reading: _Reading | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_reading": None}

    def __len__(self) -> int:
        return self.tokens // (self.sequence_length * self.batch_size * self.world_size)

    def order(self) -> dict[str, Any]:
        """Returns what a cursor depends on."""
        return {"source": self.source, "shuffle": self.shuffle, "seed": self.seed}

    def epochs(self, cursor: dict[str, int]) -> dict[str, float]:
        """Returns about how many epochs there are up to a cursor."""
        return {"all": cursor["tokens"] / self.tokens}

    def take(self, cursor: dict[str, int], count: int) -> tuple[list[Row], dict[str, int]]:
        """Returns the next rows, tokenised, and the cursor after them."""
        reading = self._reading
        # A forked worker shares the open files of its parent, and their positions.
        if reading is None or reading.cursor != cursor or reading.process != os.getpid():
            place = (cursor["epoch"], cursor["group"], cursor["document"])
            reading = _Reading(self.stream.documents(place, self.shuffle, self.seed), cursor)
            self._reading = reading
        window = reading.take(count * self.sequence_length)
        return [(window, row * self.sequence_length) for row in range(count)], reading.cursor

    def read(self, rows: Sequence[Row], own: slice) -> Batch:
        """Returns the rows of a slice as a batch."""
        parts = [[(first, self.sequence_length)] for _, first in rows[own]]
        return to_batch(rows[0][0], parts, self.sequence_length, self.mask_documents)
