"""Contracts of the kind `data`: readers, transforms, tokenizers, writers, packings. Part of `core.contracts`.

Imports no torch: `prepare` does not need it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from core.errors import ConfigError, deprecated

if TYPE_CHECKING:
    import pyarrow

    from core.contracts.packed_batches import PackedBatches

__all__ = [
    "DocumentSource",
    "Engine",
    "Packing",
    "Reader",
    "Reject",
    "TokenFolder",
    "TokenPreparer",
    "TokenWriter",
    "Tokenizer",
    "Transform",
    "raise_reject",
]


class Tokenizer(ABC):
    """Turns text into token ids; a data part that is trained or loaded before the run.

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

    def encoder(self) -> Callable[[Sequence[str]], list[list[int]]] | None:
        """Returns a picklable function that encodes in worker processes; None: the
        `tokenizers` library encodes, with :meth:`to_json`.
        """
        return None


class DocumentSource(ABC):
    """A data part that yields documents in a fixed order."""

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """Returns what identifies the text (files, sizes, digests, options), as JSON values."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """Yields each document's text, always in the same order."""


Reject = Callable[..., None]
"""Called with input that cannot be used: its source, its place, the reason (one of few), details; and how many bytes of
the source's files are lost with it, where that is more than one document."""


class Reader(DocumentSource):
    """A document source that is read in pieces, which any process may read in any order.

    An instance is sent to worker processes: it is picklable, and holds no open files.
    """

    @abstractmethod
    def tasks(self) -> list[dict[str, Any]]:
        """Returns the pieces in the order of their documents, as JSON values.

        They change when the source does (size and modification time of files), and do not depend on the number
        of workers. The first may list under `left_out` what of the source is not read, by reason (such as a file of
        another kind), for the report.
        """

    def options(self) -> Mapping[str, Any]:
        """Returns the arguments that decide what is read of a piece, such as a column's name, as JSON values."""
        return {}

    @abstractmethod
    def read(self, task: Mapping[str, Any], reject: Reject) -> Iterator[pyarrow.RecordBatch]:
        """Yields a piece's documents, columns `text`, `source` and `id` (strings), always the same ones.

        Further columns, the same ones for all pieces, are kept in documents.parquet beside the tokens: strings such as `url`,
        `date` (ISO 8601), `language` (ISO 639-1), `title`, `author`, `license`; null where it is not known.

        Args:
            task: One of :meth:`tasks`.
            reject: Called with what cannot be read, such as a broken line; may raise.
        """

    def documents(self) -> Iterator[str]:
        """Yields the text of each document that is not blank.

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
            raise ConfigError(f"{type(self).__name__}: there is no text, all documents are blank.")


def raise_reject(source: str, place: str, reason: str, details: str, lost: int = 0) -> None:
    """A :data:`Reject` that raises at once.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"{place}: {reason}{f': {details}' if details else '.'}\nMend it, or let some input be left out: "
        "data.max_reject_fraction=0.01 sets aside up to 1% and says which."
    )


FORMER_NAMES = {"surveys": "needs_all_documents", "survey": "map", "conclude": "reduce", "learn": "load"}
"""Names of methods and attributes of `Transform` up to core API 1.3."""


class Transform(ABC):
    """A data part between reader and tokenizer: changes or drops documents, each independently of the others.

    A transform that has to see all documents first (for duplicates, say) sets `needs_all_documents`: then :meth:`map` is
    called once for each piece of the source, in any process, :meth:`reduce` once with all that was
    found, and :meth:`load` in each process before it applies the transform. Others leave these three alone.

    Attributes:
        version: Raised whenever the same options give another result; part of the data's cache key.
        needs_all_documents: Whether the transform has to see all documents before it is applied.
    """

    version: int = 1
    needs_all_documents: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in FORMER_NAMES.items():
            if old in vars(cls):
                deprecated(f"{cls.__name__}.{old}", new)
                setattr(cls, new, vars(cls)[old])

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options that decide the result, as JSON values."""

    @abstractmethod
    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Returns the batch without the rows that are dropped, the others changed or not, in their order.

        Args:
            batch: Columns `text`, `source` and `id`, and those of the reader and of transforms before it, which it leaves
                as they are. It may add one, such as a score; always the same one.
            drop: Called with a reason (one of few) and the rows dropped for it: their indices in the batch, of which
                the report shows examples, or their number; with the rows also, if wanted, a text for each that is shown
                in place of the document's beginning, such as what was found in it.
        """

    def map(self, batches: Iterator[pyarrow.RecordBatch], findings: Path) -> None:
        """Reads all documents of one piece and writes what is found to a file."""
        raise NotImplementedError

    def reduce(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Combines what was found in the pieces, in their order, and writes it to a file."""
        raise NotImplementedError

    def load(self, conclusion: Path) -> None:
        """Reads the combined result."""
        raise NotImplementedError


class Engine(ABC):
    """A data part that decides where the pieces of a preparation are processed."""

    @abstractmethod
    def run(
        self, work: Callable[[dict[str, Any]], dict[str, Any]], tasks: Sequence[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Calls `work` for each task and yields what it returns, as they are done, in any order.

        Args:
            work: Picklable; may be called again for the same task if a process dies.
            tasks: JSON values.

        Raises:
            ConfigError: What `work` raised, or if processes die repeatedly at the same task.
        """

    def describe(self, tasks: int) -> str:
        """Returns what `prepare --dry-run` prints: a line, or the script that would be submitted for so many tasks."""
        return type(self).__name__


class TokenWriter(ABC):
    """A data part that stores token ids so that `PretrainDataModule` can stream them."""

    @abstractmethod
    def write(self, documents: Iterable[Sequence[int]], folder: Path, vocab_size: int) -> int:
        """Writes each document's ids in order; returns the number of tokens written."""

    def join(self, parts: Sequence[Path], folder: Path) -> dict[str, Path]:
        """Makes one folder of what :meth:`write` wrote to several, in their order; moves the files.

        After being interrupted it is called again with the same parts.

        Returns:
            Name of each file of tokens that was moved unchanged -> where it was before.
        """
        raise ConfigError(f"{type(self).__name__} has no `join`, which preparing text in pieces needs.")


class TokenFolder(NamedTuple):
    """What a prepared folder holds.

    Attributes:
        vocab_size: Number of token ids.
        end_of_text_id: The id that ends every document.
        train_tokens: Tokens of the training split.
        unigram_loss: Nats per validation token under the training tokens' frequencies.
        tokenizer_json: The tokenizer, for `tokenizers.Tokenizer.from_str`.
        test_tokens: Tokens of the test split; 0: there is none.
    """

    vocab_size: int
    end_of_text_id: int
    train_tokens: int
    unigram_loss: float
    tokenizer_json: str
    test_tokens: int = 0


class TokenPreparer(ABC):
    """A data part that turns documents into folders of tokens, and finds and describes such folders.

    `PretrainDataModule` takes the one whose technique declares `offers=("token_preparation",)`, and builds it with the
    documents, the tokenizer, the writer and, by keyword, its own arguments `validation_fraction`, `transforms`,
    `max_reject_fraction` and `engine`, and `test_fraction` where it is not 0.
    """

    @staticmethod
    @abstractmethod
    def check_shares(validation_fraction: float, max_reject_fraction: float) -> None:
        """Raises a ConfigError if one of the shares that `data` takes is out of range."""

    @staticmethod
    @abstractmethod
    def vocab_size_of(source: Any) -> int | None:
        """Returns the number of token ids of the folder that `data.source` names; None: it is text, 0: not known yet."""

    @staticmethod
    @abstractmethod
    def find(
        source: str, cache_dir: Path, cache_bytes: int | None, storage_options: Mapping[str, Any] | None
    ) -> Path | None:
        """Returns the finished folder that `data.source` names, or the local copy of a remote one; None for text.

        Raises:
            ConfigError: If the folder is not finished or cannot be read.
        """

    @staticmethod
    @abstractmethod
    def describe(folder: Path) -> TokenFolder:
        """Returns what is stored in a finished folder.

        Raises:
            ConfigError: If it is damaged.
        """

    @staticmethod
    @abstractmethod
    def split_folder(folder: Path, split: str) -> Path:
        """Returns the folder of the tokens of "train", "validation" or "test".

        Raises:
            ConfigError: If it is outside of the finished folder.
        """

    @abstractmethod
    def cached(self, cache_dir: Path, label: str) -> Path:
        """Returns the finished folder of this text and these options in a cache, written now if it was not there.

        Args:
            cache_dir: Where the folder is.
            label: A name of the text, for messages.

        Raises:
            ConfigError: If the source cannot be read or has too few documents, or nothing can be written.
        """


class Packing(ABC):
    """A data part that decides, when tokens are read, how documents are put into rows."""

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
                `batch_size * world_size` only.
            shuffle: Whether an epoch's order is drawn from (seed, epoch), or the stored one.
            seed: Seed of the permutations; at least 0.
            pad: Whether the last, shorter row and the last, smaller global batch are filled up with
                labels that are ignored, or left out.

        Raises:
            ConfigError: If the folder is damaged.
        """
