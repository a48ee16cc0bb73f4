"""One rank's batches, as a :class:`core.contracts.Packing` makes them. Part of `core.contracts`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    from core.contracts.modules import Batch


class PackedBatches(IterableDataset, ABC):
    """One rank's batches from a cursor on, from each worker in turn; what :class:`Packing` returns.

    Training rows never end, they continue over the ends of epochs; padded ones end with the last token. Which rows come
    depends on the cursor, `sequence_length` and the global batch alone: not on how ranks and workers share it.

    Attributes:
        cursor: Where the next batch begins, as JSON values; set before a pass.
        sequence_length: Tokens in a row; may be changed between two passes.
        batch_size: Rows of this rank's batch; may be changed between two passes.
        rank: This rank among the data-parallel ones.
        world_size: Number of data-parallel ranks.
        pad: Whether the batches are padded and end.
    """

    cursor: Any
    sequence_length: int
    batch_size: int
    rank: int
    world_size: int
    pad: bool

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches that an epoch is worth, the same on every rank; exact where padded."""

    @abstractmethod
    def take(self, cursor: Any, count: int) -> tuple[Sequence[Any], Any]:
        """Returns the next rows from a cursor on, and the cursor after them.

        The packing decides what represents a row; nothing is read yet. There are fewer than `count` only where
        padded rows end.
        """

    @abstractmethod
    def read(self, rows: Sequence[Any], own: slice) -> Batch:
        """Returns a slice of the rows of a global batch as `batch_size` rows; what is missing is padding."""

    @abstractmethod
    def order(self) -> dict[str, Any]:
        """Returns what the meaning of a cursor depends on, such as the seed, as JSON values."""

    @abstractmethod
    def epochs(self, cursor: Any) -> dict[str, float]:
        """Returns how often the data has been gone through up to a cursor, by the name of the source."""

    def padding(self) -> dict[str, float]:
        """Returns about what share of the training rows is padding, by the name of the source, for a message to users."""
        return {}

    def width(self, rows: Sequence[Any]) -> int:
        """Returns the length of the rows of a global batch with their padding, in tokens."""
        return self.sequence_length

    def __iter__(self) -> Iterator[tuple[Any, Batch]]:
        """Yields the cursor after each batch, and the batch."""
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        own = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        cursor = self.cursor
        for number in count():
            rows, cursor = self.take(cursor, self.batch_size * self.world_size)
            if not rows:
                return
            if number % workers == turn:
                yield cursor, self.read(rows, own)
