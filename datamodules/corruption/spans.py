"""Takes spans out of a row and puts them into a target, as T5's training does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from core.contracts import IGNORED_LABEL, Batch
from core.errors import ConfigError
from datamodules.corruption.corrupted_batches import Corruption, Tokens, padded


@dataclass(frozen=True)
class Spans(Corruption):
    """Replaces spans by sentinels; the target has each sentinel, followed by the tokens that it replaced.

    Args:
        sentinels: Ids, in the order in which they are used in a row.
        end_id: Token id that ends inputs and target.
        noise_density: Share of the tokens that are taken out.
        mean_span_length: Tokens in a span, on average.
        start_id: Token id that the decoder reads before the target.
    """

    sentinels: np.ndarray
    end_id: int
    noise_density: float
    mean_span_length: float
    start_id: int

    def raw_length(self, sequence_length: int) -> int:
        """Returns the most tokens, at least 2, of which at most `sequence_length` are left, sentinels and end counted."""
        raw = max(sequence_length - 1, 2)  # where all spans are single tokens, only the end is added
        while self.lengths(raw + 1)[0] <= sequence_length:
            raw += 1
        return raw

    def lengths(self, raw_length: int) -> tuple[int, int]:
        """Returns the lengths of inputs and target, with their end, of a row of so many tokens."""
        noise, spans = self.counts(raw_length)
        return raw_length - noise + spans + 1, noise + spans + 1

    def counts(self, raw_length: int) -> tuple[int, int]:
        """Returns how many tokens of a row of at least 2 are taken out, and in how many spans."""
        noise = min(max(round(raw_length * self.noise_density), 1), raw_length - 1)
        spans = min(max(round(noise / self.mean_span_length), 1), noise, raw_length - noise)
        return noise, spans

    def noise(self, length: int, generator: np.random.Generator) -> np.ndarray:
        """Returns which tokens are taken out, (length,) bool: kept and taken spans in turn, cut at random places."""
        noise, spans = self.counts(length)
        kept, taken = (_cut(size, spans, generator) for size in (length - noise, noise))
        sizes = np.stack([kept, taken], axis=1).flatten()
        return np.repeat(np.arange(2 * spans) % 2 == 1, sizes)

    def corrupt(self, ids: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and target of a row of at least 2 tokens."""
        noise = self.noise(len(ids), generator)
        inputs, target = (self._with_sentinels(ids, gone) for gone in (noise, ~noise))
        return np.append(inputs, self.end_id), np.append(target, self.end_id)

    def _with_sentinels(self, ids: np.ndarray, gone: np.ndarray) -> np.ndarray:
        """Returns the tokens that are not gone, and a sentinel for each span that is."""
        begins = gone & ~np.concatenate([[False], gone[:-1]])
        found = ids.astype(np.int64)
        if (spans := int(begins.sum())) > len(self.sentinels):
            raise ConfigError(
                f"A row has {spans} spans, and there are {len(self.sentinels)} sentinels: raise data.extra_ids."
            )
        found[begins] = self.sentinels[:spans]
        return found[~gone | begins]

    def batch(
        self, rows: Sequence[Tokens], generators: Sequence[np.random.Generator], raw_length: int
    ) -> Batch:
        """Returns inputs, decoder inputs and labels; document ids where rows are padded."""
        width, target_width = self.lengths(raw_length)
        inputs: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        for row, generator in zip(rows, generators, strict=True):
            if row.document_ids is not None and len(row.ids) and np.ptp(row.document_ids):
                raise ConfigError(
                    "Span corruption takes rows of one document, or of documents that see each other: set "
                    "data.packing to PaddedDocuments or Concatenate, without mask_documents."
                )
            if len(row.ids) < 2:  # nothing to predict from
                one, other = row.ids.astype(np.int64), np.zeros(0, np.int64)
            else:
                one, other = self.corrupt(row.ids, generator)
            inputs.append(one)
            targets.append(other)
        read = [np.append(self.start_id, target[:-1])[: len(target)] for target in targets]
        found = {
            "input_ids": padded(inputs, width, 0),
            "decoder_input_ids": padded(read, target_width, self.start_id),
            "labels": padded(targets, target_width, IGNORED_LABEL),
        }
        if any(len(row) < width for row in inputs) or any(len(row) < target_width for row in targets):
            for name, parts, size in (("", inputs, width), ("decoder_", targets, target_width)):
                found[f"{name}document_ids"] = padded([np.zeros(len(part)) for part in parts], size, -1)
        return cast(Batch, found)


def _cut(size: int, parts: int, generator: np.random.Generator) -> np.ndarray:
    """Returns the sizes of parts of at least 1, every way to cut being equally likely; (parts,)."""
    cuts = np.sort(generator.permutation(size - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [size]]))
