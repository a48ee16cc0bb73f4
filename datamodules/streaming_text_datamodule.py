"""Trains on text that is tokenised while it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from core.contracts import DocumentSource, PackedBatches, Reader, Tokenizer, Transform
from core.data.token_datamodule import TokenDataModule
from core.errors import ConfigError
from core.technique import technique
from datamodules.packing.concatenate import ConcatenatedBatches
from datamodules.packing.streamed import HeldOut, StreamedBatches, TextStream
from datamodules.packing.token_store import TokenStore
from datamodules.packing.token_window import TokenWindow
from datamodules.preparation.readers.file_reader import SingleTaskReader
from datamodules.preparation.tokenizers.json_encoder import JSONEncoder
from datamodules.preparation.tokenizers.library_tokenizer import TrainedTokenizer, threads

_PIECES = 16
"""Pieces of the source that validation documents are taken from at most."""


@technique(
    paper="MosaicML's StreamingDataset, docs.mosaicml.com/projects/streaming; litdata's, github.com/Lightning-AI/litdata",
    offers=("exact_resume",),
)
class StreamingTextDataModule(TokenDataModule):
    """Trains on raw text, tokenised while it is read, without `prepare`.

    Any reader of documents gives the text: `LitdataDocuments`, `MDSDocuments`, `ParquetDocuments`, `JSONLinesDocuments`. Documents follow each other, each
    with an end of text, and the stream is cut into rows. In each epoch they come in another order: pieces of the source
    (files, chunks, row groups) are shuffled, four of them are read in turn, and the documents of 32 Mi characters at a time are
    shuffled: those and what the readers of four pieces hold are in memory, which does not grow with the source.

    The position is a document and a token of it: a resumed run gets exactly the batches that would have come, for any number of ranks
    and workers. To find it, up to four pieces are read again, without being tokenised; a piece is a 64th of the source, at
    least 1 MiB and at most 1 GiB. How many tokens a document has is only known when it is tokenised, so each rank and each worker tokenises
    all documents: one worker is enough, and for several machines, or several epochs, `prepare` is cheaper.

    Duplicates and unusable input are not looked for: the first document that cannot be read stops the run.

    Args:
        source: What the reader reads.
        reader: Makes the reader from `source`.
        tokenizer: A finished one, such as PretrainedTokenizer.
        sequence_length: Tokens in a row.
        batch_size: Rows in a micro-batch, on each rank.
        mask_documents: Whether documents in a row are separate; see Concatenate.
        transforms: What is done with documents before they are encoded, such as Normalise; none that has to see all documents first.
        validation_source: What the reader reads for validation. None: documents of `source` are held out, spread over it.
        validation_fraction: Share of the documents that is held out, of up to 16 pieces of the source.
        validation_documents: Most documents for validation. They are tokenised when a run begins, and kept in memory.
        shuffle: Whether each epoch takes the documents in a new order.
        seed: Seed of these orders.
        num_workers: Processes that read ahead, on each rank.

    Attributes:
        train_tokens: About how many tokens the training documents have, by a piece of the source and the documents for validation.

    Raises:
        ConfigError: If the source cannot be read, the tokenizer is not finished, or a transform has to see all documents.

    Example:
        data:
          class_path: StreamingTextDataModule
          init_args:
            source: mds/train
            reader: MDSDocuments
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
    """

    def __init__(
        self,
        source: str,
        reader: Callable[[str], DocumentSource],
        tokenizer: Tokenizer,
        sequence_length: int = 256,
        batch_size: int = 8,
        mask_documents: bool = False,
        transforms: Sequence[Transform] = (),
        validation_source: str | None = None,
        validation_fraction: float = 0.05,
        validation_documents: int = 1000,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(sequence_length, batch_size, shuffle, seed, num_workers)
        if not 0 < validation_fraction <= 0.5:
            raise ConfigError(
                f"data.validation_fraction is {validation_fraction}; it is above 0 and at most 0.5."
            )
        if validation_documents < 1:
            raise ConfigError(f"data.validation_documents is {validation_documents}; it is at least 1.")
        if isinstance(tokenizer, TrainedTokenizer):
            raise ConfigError(
                f"data.tokenizer is a {type(tokenizer).__name__}, which is trained on all text first, as `prepare` does. Name a "
                "finished one:\n--data.tokenizer=PretrainedTokenizer --data.tokenizer.path=FILE"
            )
        for transform in transforms:
            if transform.needs_all_documents:
                raise ConfigError(
                    f"data.transforms: {type(transform).__name__} has to see all documents before the first one is used. Use it in "
                    "`prepare`."
                )
        self.source, self.validation_source, self.reader = source, validation_source, reader
        self.tokenizer, self.transforms, self.mask_documents = tokenizer, transforms, mask_documents
        self.validation_every = max(2, round(1 / validation_fraction))
        self.validation_documents = validation_documents
        self.vocab_size = tokenizer.vocab_size

    def setup(self, stage: str | None = None) -> None:
        """Lists the pieces of the source, and tokenises the documents for validation: the same ones on every rank.

        Raises:
            ConfigError: If the source cannot be read, or has too few documents.
        """
        super().setup(stage)
        self.tokenizer.prepare(())
        self.vocab_size, self.end_of_text_id = self.tokenizer.vocab_size, self.tokenizer.end_of_text_id
        self.tokenizer_json = self.tokenizer.to_json()
        self._stream = self._open(self.source)
        pieces = range(len(self._stream.tasks))
        if self.validation_source is None:
            count = min(len(pieces), _PIECES, self.validation_documents)
            every = self.validation_every
            # Each piece begins with another document: pieces may have one each.
            chosen = {len(pieces) * number // count: every * number // count for number in range(count)}
            held = HeldOut(chosen, every, self.validation_documents // count)
            self._stream.held_out = held
            texts = (text for piece in chosen for text in _held(self._stream, piece))
        else:
            other = self._open(self.validation_source)
            texts = (text for piece in range(len(other.tasks)) for _, text in other.texts_of(piece))
        self._validation, share = self._encoded(islice(texts, self.validation_documents))
        sizes = [_bytes(task) for task in self._stream.tasks]
        typical = sorted(pieces, key=lambda piece: sizes[piece])[len(pieces) // 2]
        characters = sum(len(text) for _, text in self._stream.texts_of(typical))
        whole = sum(sizes) / sizes[typical] if sizes[typical] else len(sizes)
        self.train_tokens = max(1, round(share * characters * whole))

    def _open(self, source: str) -> TextStream:
        found = self.reader(source)
        reader = found if isinstance(found, Reader) else SingleTaskReader(found)
        encode = self.tokenizer.encoder() or _Encoder(
            self.tokenizer_json, getattr(self.tokenizer, "special_tokens_in_text", False)
        )
        end = self.tokenizer.end_of_text_id
        return TextStream(reader, reader.tasks(), self.transforms, encode, end, HeldOut())

    def _encoded(self, texts: Iterator[str]) -> tuple[TokenWindow, float]:
        """Returns documents as tokens, and how many tokens they have for each character."""
        characters = 0

        def counted() -> Iterator[str]:
            nonlocal characters
            for text in texts:
                characters += len(text)
                yield text

        ids = list(self._stream.encoded(counted()))
        if not ids:
            raise ConfigError(
                f"data.source={self.validation_source or self.source}: there is no document for validation, all are blank or "
                "dropped."
            )
        starts = np.cumsum([0, *map(len, ids)])[:-1]
        return TokenWindow(np.concatenate(ids), starts, ends=True), sum(map(len, ids)) / characters

    def packed(self, split: str, **order: Any) -> PackedBatches:
        """Returns the batches of a split."""
        if split != "train":
            store = cast(TokenStore, self._validation)
            return ConcatenatedBatches(store, mask_documents=self.mask_documents, **order)
        return StreamedBatches(
            self._stream, self.train_tokens, self._digest(), mask_documents=self.mask_documents, **order
        )

    def _digest(self) -> str:
        """Returns what identifies the training documents: names, sizes and options, not where the files lie."""
        stream = self._stream
        parts = [type(stream.reader).__name__, dict(stream.reader.options()), _relative(list(stream.tasks))]
        parts += [[type(part).__name__, part.version, dict(part.fingerprint())] for part in stream.transforms]
        held = [sorted(stream.held_out.pieces.items()), stream.held_out.every, stream.held_out.most]
        text = json.dumps([*parts, held], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Encoder(JSONEncoder):
    """Encodes with a tokenizer in memory, on all cores where this process may use threads.

    Args:
        content: The tokenizer.json.
        special_tokens: See :class:`JSONEncoder`.
    """

    def __init__(self, content: str, special_tokens: bool) -> None:
        super().__init__(Path("tokenizer.json"), special_tokens, content)

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        with threads():
            return super().__call__(texts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Encoder, (self.content, self.special_tokens)


def _held(stream: TextStream, piece: int) -> Iterator[str]:
    """Yields the held-out documents of a piece; reads no further than the last one."""
    held = stream.held_out
    first = held.pieces[piece]
    texts = islice(stream.texts_of(piece), first, first + held.every * held.most, held.every)
    return (text for _, text in texts)


def _bytes(task: dict[str, Any]) -> int:
    """Returns the bytes of a piece, where its reader reads files; else 0."""
    return sum(part["bytes"] for part in task.get("pieces", ()))


def _relative(value: Any) -> Any:
    """Returns a reader's pieces without what changes when files are copied: their folder and times."""
    if isinstance(value, dict):
        kept = {
            name: _relative(part) for name, part in value.items() if name not in ("changed_ns", "left_out")
        }
        return kept | {"path": Path(value["path"]).name} if "path" in value else kept
    return [_relative(part) for part in value] if isinstance(value, list) else value
