"""What batches of one token store have in common: their options and their cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch

from core.contracts import Batch
from datamodules.packing.prefetching import Prefetching
from datamodules.packing.token_store import TokenStore
from toolkit.document_places import Place
from toolkit.sources import SOURCES


@dataclass(eq=False)
class StoredBatches(Prefetching):
    """One rank's batches of the tokens of one store.

    Args:
        store: The tokens.
        sequence_length: T, in tokens; this and the following as in :class:`core.contracts.Packing`.
    """

    store: TokenStore
    sequence_length: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = False
    seed: int = 0
    pad: bool = False

    document_sources: ClassVar[np.ndarray | None] = None

    def mark_documents(self, sources: np.ndarray) -> bool:
        """Adds the source of each token to all batches: see :class:`toolkit.sources.MarksDocuments`."""
        known = len(sources) == self.store.number_of_documents
        if known:
            vars(self)["document_sources"] = sources
        return known

    def cache_bytes(self) -> int:
        """Returns the size of the cache in bytes; 0 for a local store."""
        return self.store.cache_bytes

    def places_in(self, rows: Sequence[Sequence[tuple[int, int]]]) -> list[Place]:
        """Returns the documents in rows that consist of parts of the store, (first token, tokens) each."""
        found = []
        for row, parts in enumerate(rows):
            column = 0
            for first, size in parts:
                for document, offset, tokens in self.store.parts_between(first, first + size):
                    found.append(Place(row, column, tokens, document, offset))
                    column += tokens
        return found

    def marked(self, batch: Batch, rows: Sequence[Sequence[tuple[int, int]]]) -> Batch:
        """Returns a batch with the source of each token, where that is asked for: see :class:`toolkit.sources.MarksDocuments`."""
        if self.document_sources is None:
            return batch
        sources, of = np.full(batch["input_ids"].shape, -1, np.int64), self.document_sources
        for place in self.places_in(rows):
            sources[place.row, place.column : place.column + place.tokens] = of[place.document]
        cast(Any, batch)[SOURCES] = torch.from_numpy(sources)
        return batch
