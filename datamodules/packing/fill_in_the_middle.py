"""Documents whose middle comes last, so that a causal model learns to fill gaps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from core.contracts import IGNORED_LABEL, Batch, PackedBatches, Packing
from core.errors import ConfigError, nearest
from core.technique import technique
from datamodules.packing.prefetching import Chunk, Prefetching
from toolkit.bounded import parse_json
from toolkit.prepared import read_manifest, read_tokenizer

LEAST = 6
"""Tokens of the shortest document that is rearranged: three that are replaced, and one for each part."""


class Sentinels(NamedTuple):
    """Token ids: what is put before each part, and what ends a document."""

    prefix: int
    suffix: int
    middle: int
    end_of_text: int


def rearranged(
    tokens: np.ndarray, marks: Sentinels, rate: float, spm_rate: float, seed: int
) -> np.ndarray | None:
    """Returns a document, or the part of one that is in a row, with its middle last; None: it stays as it is.

    Three tokens from the beginning give way to the sentinels. What happens, and where the two cuts are, depends on `seed`
    and the tokens alone.

    Args:
        tokens: (n,); the last one may be the end-of-text id, which stays there.
        marks: The ids of the sentinels.
        rate: Probability of being rearranged.
        spm_rate: Share of these that have the suffix first.
        seed: Seed of the random numbers.
    """
    end = len(tokens) - int(len(tokens) > 0 and tokens[-1] == marks.end_of_text)
    body = tokens[3:end]
    if end < LEAST:
        return None
    key = hashlib.blake2b(tokens.tobytes(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    random = np.random.default_rng(int.from_bytes(key, "little"))
    if random.random() >= rate:
        return None
    suffix_first = random.random() < spm_rate
    first, second = np.sort(random.integers(0, len(body) + 1, 2))
    prefix, middle, suffix = body[:first], body[first:second], body[second:]
    p, s, m = (np.array([mark]) for mark in marks[:3])
    parts = (p, s, suffix, m, prefix, middle) if suffix_first else (p, prefix, s, suffix, m, middle)
    return np.concatenate((*parts, tokens[end:])).astype(tokens.dtype)


@dataclass(eq=False)
class FilledBatches(Prefetching):
    """The batches of another packing, with some documents rearranged; see :class:`FillInTheMiddle`."""

    inner: PackedBatches
    marks: Sentinels
    rate: float
    spm_rate: float
    seed: int

    def __post_init__(self) -> None:
        inner = self.inner
        self.cursor, self.rank, self.world_size, self.pad = (
            inner.cursor,
            inner.rank,
            inner.world_size,
            inner.pad,
        )
        self.sequence_length, self.batch_size = inner.sequence_length, inner.batch_size

    @property
    def _shaped(self) -> PackedBatches:
        self.inner.sequence_length, self.inner.batch_size = self.sequence_length, self.batch_size
        return self.inner

    def __len__(self) -> int:
        return len(self._shaped)

    def order(self) -> dict[str, Any]:
        """Returns what a cursor depends on."""
        return self.inner.order()

    def epochs(self, cursor: Any) -> dict[str, float]:
        """Returns the number of epochs up to a cursor."""
        return self._shaped.epochs(cursor)

    def padding(self) -> dict[str, float]:
        """Returns about what share of the rows is padding."""
        return self._shaped.padding()

    def width(self, rows: Sequence[Any]) -> int:
        """Returns the length of the rows with their padding."""
        return self._shaped.width(rows)

    def take(self, cursor: Any, count: int) -> tuple[Sequence[Any], Any]:
        """Returns the next rows, and the cursor after them."""
        return self._shaped.take(cursor, count)

    def chunks(self, rows: Sequence[Any], own: slice) -> Iterator[Chunk]:
        """Yields the chunks of a remote folder that a slice of rows needs."""
        if isinstance(self.inner, Prefetching):
            yield from self.inner.chunks(rows, own)

    def cache_bytes(self) -> int:
        """Returns the size of the cache in bytes; 0 for a local store."""
        return self.inner.cache_bytes() if isinstance(self.inner, Prefetching) else 0

    def read(self, rows: Sequence[Any], own: slice) -> Batch:
        """Returns the rows of a slice; padded ones, as of validation, as they are."""
        batch = self._shaped.read(rows, own)
        if self.pad:
            return batch
        # dlpack: the batch is on the host, and this waits for no device
        tensors = cast(dict[str, torch.Tensor], batch)
        names = [name for name in ("input_ids", "labels", "document_ids") if name in tensors]
        values = [np.from_dlpack(tensors[name]).copy() for name in names]
        for row in zip(*values, strict=True):
            self._rearrange(*row)
        changed = {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}
        return cast(Batch, {**tensors, **changed})

    def _rearrange(self, ids: np.ndarray, labels: np.ndarray, documents: np.ndarray | None = None) -> None:
        """Changes a row in place: the tokens of each document, and the labels where there are any."""
        known = labels[-1] != IGNORED_LABEL
        tokens = np.append(ids, labels[-1:]) if known else ids.copy()
        if documents is None:
            inside = np.flatnonzero(tokens[:-1] == self.marks.end_of_text) + 1
        else:
            inside = np.flatnonzero(documents[1:] != documents[:-1]) + 1
        bounds = [0, *inside.tolist(), len(tokens)]
        for begin, end in pairwise(bounds):
            if (labels[begin:end] == IGNORED_LABEL).all():  # padding
                continue
            found = rearranged(tokens[begin:end], self.marks, self.rate, self.spm_rate, self.seed)
            if found is not None:
                tokens[begin:end] = found
        ids[:] = tokens[: len(ids)]
        following = np.append(tokens[1:], 0)[: len(ids)]
        np.copyto(labels, following, where=labels != IGNORED_LABEL)


@technique(
    paper="Efficient Training of Language Models to Fill in the Middle, arXiv:2207.14255, sections 3 and 4"
)
class FillInTheMiddle(Packing):
    """Rearranges some documents of another packing: prefix, suffix, and then the middle that joins them.

    Two cuts are drawn uniformly between the tokens of a document, or of the part of it that is in a row. Prefix first:
    PRE prefix SUF suffix MID middle. Suffix first, the paper's second variant: PRE SUF suffix MID prefix middle. Rows keep
    their length: the three sentinels take the place of the first three tokens of the document. What is drawn depends on the
    seed and the tokens alone, so that ranks, workers and a resume change nothing. Validation rows stay as they are.

    Args:
        packing: Makes the rows.
        prefix: The token before the prefix: its text in the tokenizer, or its id.
        suffix: The token before the suffix: its text, or its id.
        middle: The token before the middle: its text, or its id.
        rate: Share of the documents that are rearranged.
        spm_rate: Share of these that have the suffix first.
        end_of_text: The id that ends documents; None: that of the prepared folder.

    Raises:
        ConfigError: If a rate is not within [0, 1], or the tokenizer has no such token.

    Example:
        data:
          class_path: PretrainDataModule
          init_args:
            packing:
              class_path: FillInTheMiddle
              init_args:
                packing: {class_path: Concatenate}
                prefix: 1
                suffix: 2
                middle: 3
    """

    def __init__(
        self,
        packing: Packing,
        prefix: int | str = "<|fim_prefix|>",
        suffix: int | str = "<|fim_suffix|>",
        middle: int | str = "<|fim_middle|>",
        rate: float = 0.5,
        spm_rate: float = 0.5,
        end_of_text: int | None = None,
    ) -> None:
        for name, value in (("rate", rate), ("spm_rate", spm_rate)):
            if not 0 <= value <= 1:
                raise ConfigError(f"FillInTheMiddle takes {name} from 0 to 1, not {value}.")
        if len({prefix, suffix, middle}) < 3:
            raise ConfigError("FillInTheMiddle needs three different tokens for prefix, suffix and middle.")
        if least := [token for token in (prefix, suffix, middle) if isinstance(token, int) and token < 0]:
            raise ConfigError(f"FillInTheMiddle: an id is {least[0]}; ids are at least 0.")
        self.packing, self.rate, self.spm_rate = packing, rate, spm_rate
        self.tokens, self.end_of_text = (prefix, suffix, middle), end_of_text

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns one rank's batches; see :class:`core.contracts.Packing`."""
        marks = self._sentinels(folder.parent)
        inner = self.packing.batches(folder, **order)
        return FilledBatches(inner, marks, self.rate, self.spm_rate, order.get("seed", 0))

    def _sentinels(self, folder: Path) -> Sentinels:
        ids, end = [*self.tokens], self.end_of_text
        if end is None or any(isinstance(token, str) for token in ids):
            manifest = read_manifest(folder)
            end = int(manifest["end_of_text_id"]) if end is None else end
            known = _vocabulary(parse_json(read_tokenizer(folder, manifest).encode(), unique=False))
            ids = [token if isinstance(token, int) else _id_of(token, known, folder) for token in ids]
            if (largest := max(map(int, ids))) >= (size := int(manifest["vocab_size"])):
                raise ConfigError(
                    f"FillInTheMiddle: {largest} is no id of the tokenizer of {folder}, which has {size}: give a trained one "
                    "special_tokens, or ids that no text uses."
                )
        prefix, suffix, middle = (int(token) for token in ids)
        return Sentinels(prefix, suffix, middle, int(end))


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Returns text -> id of what a tokenizer.json holds."""
    stored = tokenizer.get("model", {}).get("vocab") or {}
    pairs = (
        stored.items() if isinstance(stored, Mapping) else ((piece[0], i) for i, piece in enumerate(stored))
    )
    return dict(pairs) | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}


def _id_of(token: str, known: Mapping[str, int], folder: Path) -> int:
    if token not in known:
        raise ConfigError(
            f"FillInTheMiddle: the tokenizer of {folder} has no token {token!r}.{nearest(token, set(known))}\nTake one that has, or "
            "give prefix, suffix and middle as ids that no text uses."
        )
    return known[token]
