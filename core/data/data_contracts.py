"""What a data stage must offer: readers, transforms, tokenizers, writers, packings. Part of `core.contracts`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from core.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow

    from core.contracts import Batch


class Tokenizer(ABC):
    """Turns text into token ids; a data stage that is trained or loaded before the run.

    Attributes:
        vocab_size: Number of ids, special tokens included.
        end_of_text_id: The id that ends every document.
    """

    vocab_size: int
    end_of_text_id: int

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options that decide the result, as JSON values: part of the data's cache key."""

    @abstractmethod
    def prepare(self, documents: Iterable[str]) -> None:
        """Trains on the documents, or loads from disk; called once before `encode_batch`."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without the end-of-text id."""

    @abstractmethod
    def to_json(self) -> str:
        """Returns the tokenizer in the `tokenizers` library's JSON format."""


class DocumentSource(ABC):
    """A data stage that yields documents in a fixed order."""

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """Returns what identifies the text (files, sizes, digests, options), as JSON values."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """Yields each document's text, always in the same order."""


Reject = Callable[[str, str, str, str], None]
"""Takes note of input that cannot be used: its source, its place, the reason (one of few), details."""


class Reader(DocumentSource):
    """A document source that is read in pieces, which any process may read in any order.

    An instance is sent to worker processes: it is picklable, and holds no open files.
    """

    @abstractmethod
    def tasks(self) -> list[dict[str, Any]]:
        """Returns the pieces in the order of their documents, as JSON values.

        They tell a changed source from an unchanged one (files with size and time of change), and do not
        depend on the number of workers.
        """

    def options(self) -> Mapping[str, Any]:
        """Returns the arguments that decide what is read of a piece, such as a column's name, as JSON values."""
        return {}

    @abstractmethod
    def read(self, task: Mapping[str, Any], reject: Reject) -> Iterator[pyarrow.RecordBatch]:
        """Yields a piece's documents, columns `text`, `source` and `id` (strings), always the same ones.

        Args:
            task: One of :meth:`tasks`.
            reject: Called with what cannot be read, such as a broken line; may raise.
        """

    def documents(self) -> Iterator[str]:
        """Yields each document's text that is not blank.

        Raises:
            ConfigError: At the first piece of input that cannot be read, or if there is no text at all.
        """
        empty = True
        for task in self.tasks():
            for batch in self.read(task, raise_reject):
                for text in batch["text"].to_pylist():
                    if text and not text.isspace():
                        empty = False
                        yield text
        if empty:
            raise ConfigError(
                f"{type(self).__name__}: all documents are blank; there is no text to train on."
            )


def raise_reject(source: str, place: str, reason: str, details: str) -> None:
    """A :data:`Reject` that lets nothing pass.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"{place}: {reason}{f': {details}' if details else '.'}\nMend it, or let some input be left out: "
        "data.max_reject_fraction=0.01 sets aside up to 1% and says which."
    )


class Transform(ABC):
    """A data stage between reader and tokenizer: changes or drops documents, depending on them alone.

    A stage that has to see all documents first (for duplicates, say) sets `surveys`: then :meth:`survey` is
    called once for each piece of the source, in any process, :meth:`conclude` once with all that they
    found, and :meth:`learn` in each process before it applies the stage. Others leave these three alone.

    Attributes:
        version: Raised whenever the same options give another result; part of the data's cache key.
        surveys: Whether the stage has to see all documents before it is applied.
    """

    version: int = 1
    surveys: bool = False

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options that decide the result, as JSON values."""

    @abstractmethod
    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[[str, int], None]) -> pyarrow.RecordBatch:
        """Returns the batch without the rows that are dropped, the others changed or not, in their order.

        Args:
            batch: Columns `text`, `source` and `id`.
            drop: Called with a reason (one of few) and the number of rows dropped for it.
        """

    def survey(self, batches: Iterator[pyarrow.RecordBatch], findings: Path) -> None:
        """Looks at all documents of one piece and writes what is to be known of them to a file."""
        raise NotImplementedError

    def conclude(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Draws together what was found, in the order of the pieces, and writes it to a file."""
        raise NotImplementedError

    def learn(self, conclusion: Path) -> None:
        """Reads what was concluded."""
        raise NotImplementedError


class Engine(ABC):
    """A data stage that says where the pieces of a preparation are worked on."""

    @abstractmethod
    def run(
        self, work: Callable[[dict[str, Any]], dict[str, Any]], tasks: Sequence[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Calls `work` for each task and yields what it returns, as they are done, in any order.

        Args:
            work: Picklable; may be called again for the same task if a process dies over it.
            tasks: JSON values.

        Raises:
            ConfigError: What `work` raised, or if processes die over a task again and again.
        """


class TokenWriter(ABC):
    """A data stage that stores token ids so that `PretrainDataModule` can stream them."""

    @abstractmethod
    def write(self, documents: Iterable[Sequence[int]], folder: Path, vocab_size: int) -> int:
        """Writes each document's ids in order; returns the number of tokens written."""

    def join(self, parts: Sequence[Path], folder: Path) -> dict[str, Path]:
        """Makes one folder of what :meth:`write` wrote to several, in their order; moves the files.

        After being interrupted it is called again with the same parts.

        Returns:
            Name of each file of tokens that is as it was -> where it was before.
        """
        raise ConfigError(f"{type(self).__name__} has no `join`, which preparing text in pieces needs.")


class PackedBatches(IterableDataset, ABC):
    """One rank's batches from a cursor on, each worker taking its turn; what :class:`Packing` returns.

    Training rows go on for ever, over the ends of epochs; padded ones end with the last token. Which rows come
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

        What stands for a row is the packing's own affair; nothing is read yet. There are fewer than `count`
        only where padded rows end.
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
        """Returns about what share of the training rows is padding, by the name of the source, to be told to users."""
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


class Packing(ABC):
    """A data stage that decides, when tokens are read, how documents are put into rows."""

    @abstractmethod
    def batches(
        self,
        folder: Path,
        *,
        sequence_length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        pad: bool = False,
    ) -> PackedBatches:
        """Returns one rank's batches of the tokens that a :class:`TokenWriter` wrote to a folder.

        Args:
            folder: The tokens.
            sequence_length: T, in tokens.
            batch_size: Rows of this rank's batch.
            rank: This rank among the data-parallel ones.
            world_size: Number of data-parallel ranks; the global order of rows depends on
                `batch_size * world_size` alone.
            shuffle: Whether an epoch's order is drawn from (seed, epoch), or the stored one.
            seed: Of the permutations; at least 0.
            pad: Whether the last, shorter row and the last, smaller global batch are filled up with
                labels that are ignored, or left out.

        Raises:
            ConfigError: If the folder is damaged.
        """
