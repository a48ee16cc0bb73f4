"""Masks tokens of a row, as BERT's training does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from core.contracts import IGNORED_LABEL, Batch
from datamodules.corruption.corrupted_batches import Corruption, Tokens, padded
from datamodules.corruption.vocabulary import Vocabulary
from toolkit.label_positions import LABEL_POSITIONS, label_positions


@dataclass(frozen=True)
class Masking(Corruption):
    """Chooses tokens, and puts the mask, a random token or the token itself in their place.

    Args:
        vocabulary: The tokens.
        mask_id: Token id of the mask.
        share: Share of the tokens that are chosen, from 0 to 1.
        masked: Share of the chosen ones that become the mask.
        random: Share of the chosen ones that become any token that is not special; the rest stay.
        whole_words: Whether all pieces of a word are chosen together, or each by itself.
    """

    vocabulary: Vocabulary
    mask_id: int
    share: float
    masked: float
    random: float
    whole_words: bool

    def raw_length(self, sequence_length: int) -> int:
        """Returns the length without the tokens before and behind a row, at least 1."""
        return max(sequence_length - 2 * (self.vocabulary.row_ends() is not None), 1)

    def batch(
        self, rows: Sequence[Tokens], generators: Sequence[np.random.Generator], raw_length: int
    ) -> Batch:
        """Returns inputs, labels where a token was chosen, and where that is."""
        width = raw_length + 2 * (self.vocabulary.row_ends() is not None)
        whole = [self._with_ends(row, raw_length) for row in rows]
        pairs = [self.masks(row.ids, generator) for row, generator in zip(whole, generators, strict=True)]
        found = {
            "input_ids": padded([ids for ids, _ in pairs], width, 0),
            "labels": padded([labels for _, labels in pairs], width, IGNORED_LABEL),
            LABEL_POSITIONS: label_positions([labels for _, labels in pairs], width),
        }
        if any(row.document_ids is not None or len(row.ids) < width for row in whole):
            documents = [_or(row.document_ids, np.zeros(len(row.ids), np.int64)) for row in whole]
            found["document_ids"] = padded(documents, width, -1)
        if any(row.position_ids is not None for row in whole):
            places = [_or(row.position_ids, np.arange(len(row.ids))) for row in whole]
            found["position_ids"] = padded(places, width, 0)
        return cast(Batch, found)

    def masks(self, ids: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels of a row, (n,) each; labels are ignored where no token was chosen."""
        words = self.vocabulary.words(ids) if self.whole_words else np.arange(len(ids))
        draws = generator.random((3, len(ids)))
        chosen = (draws[0] < self.share)[words] & ~self.vocabulary.special[ids]
        inputs = np.where(chosen & (draws[1] < self.masked), self.mask_id, ids)
        swapped = chosen & (draws[1] >= self.masked) & (draws[1] < self.masked + self.random)
        plain = np.flatnonzero(~self.vocabulary.special)
        inputs = np.where(swapped, plain[(draws[2] * len(plain)).astype(np.int64)], inputs)
        return inputs, np.where(chosen, ids, IGNORED_LABEL)

    def _with_ends(self, row: Tokens, raw_length: int) -> Tokens:
        """Returns a row between its first and last token; a short row that ends with the last one gets no second."""
        ends = self.vocabulary.row_ends()
        if ends is None or not len(row.ids):
            return row
        more = int(len(row.ids) == raw_length or row.ids[-1] != ends[1])
        ids = np.concatenate([[ends[0]], row.ids, [ends[1]] * more]).astype(np.int64)
        documents = row.document_ids
        if documents is None:
            return Tokens(ids)
        places = _or(row.position_ids, np.arange(len(row.ids))) + (documents == documents[0])
        documents = np.pad(documents, (1, more), mode="edge")
        return Tokens(ids, documents, np.concatenate([[0], places, [places[-1] + 1] * more]))


def _or(values: np.ndarray | None, otherwise: np.ndarray) -> np.ndarray:
    return otherwise if values is None else values
