"""Drops documents that a trained network finds too likely or too unlikely."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow

from core import catalog
from core.errors import ConfigError
from core.technique import declaration_of, technique
from toolkit.arrow_columns import numbers, with_column
from toolkit.document_filter import DocumentFilter

_REMEMBERED = 1 << 14
"""Scores that are kept, for documents that come again: sweep-filters applies each threshold to the same ones."""

_CHARACTERS = 8
"""Characters for each token that are encoded at first, of a document that may be longer."""


@technique(
    paper="CCNet, arXiv:1911.00359, section 3.3 (with an n-gram model); strided windows as in transformers' guide"
)
class PerplexityFilter(DocumentFilter):
    """Drops documents whose perplexity under a network of ours is too low or too high.

    The perplexity is the exponential of the mean cross-entropy, in nats, of the document's first tokens, by the tokenizer of
    the checkpoint: it says nothing across tokenizers. The first token follows an end of text, as in training. A document longer than the
    `window` is scored in windows that overlap by half, so that each token but those of the first window sees at least half a window before it. High values are
    text unlike that of the training, low ones lists, templates, or what the network knows by heart. CCNet keeps the third of each language with the
    lowest values; `sweep-filters` draws what each value keeps. The report counts all documents by their perplexity, in powers of 2.

    Each document is scored by itself on one thread, so that neither its neighbours nor the number of workers change a bit. Each
    worker holds the network, and the results of different processors may differ in their last digits.

    Args:
        path: A checkpoint of `fit` of a network that predicts the next token, or its run folder.
        max_perplexity: Largest perplexity that is kept; None: any.
        min_perplexity: Smallest perplexity that is kept; None: any.
        tokens: How many tokens of a document are scored.
        window: Tokens of a window; at most the network's `max_sequence_length`. Best that of the training.
        column: Name of a column that is added with the perplexities, for `Rebalance` and documents.parquet; None: none is.

    Raises:
        ConfigError: If the checkpoint cannot be read, its network sees later tokens, or a number is out of range.

    Example:
        data:
          init_args:
            transforms:
              - class_path: PerplexityFilter
                init_args: {path: runs/base, max_perplexity: 1000, tokens: 1024, window: 256}
    """

    def __init__(
        self,
        path: str,
        max_perplexity: float | None = None,
        min_perplexity: float | None = None,
        tokens: int = 1024,
        window: int = 256,
        column: str | None = None,
    ) -> None:
        low, high = (
            (1.0 if min_perplexity is None else min_perplexity),
            (math.inf if max_perplexity is None else max_perplexity),
        )
        if not 1 <= low <= high:
            raise ConfigError(
                f"PerplexityFilter: perplexities from {low:g} to {high:g} are kept, which is none: they are at least 1, and "
                "min_perplexity\nis at most max_perplexity."
            )
        if tokens < 1 or window < 2:
            raise ConfigError(
                f"PerplexityFilter: tokens is {tokens}, at least 1; window is {window}, at least 2."
            )
        self.max_perplexity, self.min_perplexity = max_perplexity, min_perplexity
        self.tokens, self.window, self.column = tokens, window, column
        self._limits = low, high
        self._stored: Any = catalog.offering("stored_network", "data").load()(path)
        self._counts: Counter[str] = Counter()
        self._found: list[float] = []

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options and the digest of the checkpoint."""
        return {**super().fingerprint(), "network": self._stored.digest}

    def take_counts(self) -> Mapping[str, int]:
        """Returns how many documents had which perplexities since the last call, in powers of 2."""
        counts, self._counts = self._counts, Counter()
        return counts

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Drops documents whose perplexity is out of range; adds those of the others."""
        self._found = []
        kept = super().apply(batch, drop)
        if self.column is None:
            return kept
        return with_column(kept, self.column, numbers(np.array(self._found, np.float64)), "PerplexityFilter")

    def reason(self, text: str) -> str | None:
        """Returns "perplexity too low", "perplexity too high", "no tokens", or None."""
        found = self.perplexity(text)
        if found is None:
            return "no tokens"
        power = int(math.log2(found)) if math.isfinite(found) else 1024
        self._counts[
            f"perplexity {2.0**power:g} to {2.0 ** (power + 1):g}" if power < 64 else "perplexity from 2^64"
        ] += 1
        low, high = self._limits
        if not low <= found <= high:
            return "perplexity too low" if found < low else "perplexity too high"
        self._found.append(found)
        return None

    def perplexity(self, text: str) -> float | None:
        """Returns the perplexity of a text's first tokens; None: it has no token.

        Raises:
            ConfigError: If the checkpoint cannot be used.
        """
        scorer = _scorer(str(self._stored.path), self._stored.path.stat().st_mtime_ns)
        loss = scorer.mean_loss(text, self.tokens, self.window)
        return None if loss is None else float(np.exp(np.float64(min(loss, 700.0))))


@lru_cache(maxsize=1)  # once for each process
def _scorer(path: str, changed_ns: int) -> _Scorer:
    return _Scorer(path)


class _Scorer:
    """The network of a checkpoint, with its tokenizer.

    Args:
        path: The checkpoint.
    """

    def __init__(self, path: str) -> None:
        import torch
        from tokenizers import Tokenizer

        self.path = path
        with torch.random.fork_rng(devices=[]):  # building it draws weights
            self.network, tokenizer, self.end = catalog.offering("stored_network", "data").load()(path).load()
        kind = type(self.network)
        declared = declaration_of(kind)
        if declared is not None and "bidirectional" in declared.offers:
            raise ConfigError(
                f"PerplexityFilter: {path} holds a {kind.__name__}, which sees later tokens: it gives no perplexity.\nTake a "
                "checkpoint of a decoder, such as GPT."
            )
        self.tokenizer = Tokenizer.from_str(tokenizer)
        self.tokenizer.encode_special_tokens = True
        self._known: dict[bytes, float | None] = {}

    def mean_loss(self, text: str, tokens: int, window: int) -> float | None:
        """Returns the mean cross-entropy of a text's first tokens in nats; None: it has no token."""
        key = hashlib.blake2b(f"{tokens} {window} {text}".encode(), digest_size=16).digest()
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = self._mean_loss(self._ids(text, tokens), window)
        return self._known[key]

    def _ids(self, text: str, tokens: int) -> list[int]:
        """Returns the first ids of a text, which is not encoded much further than that."""
        size = tokens * _CHARACTERS
        while True:
            ids = self.tokenizer.encode(text[:size], add_special_tokens=False).ids
            if len(text) <= size or len(ids) > tokens:
                break
            size *= 2
        if ids and max(ids) >= self.network.vocab_size:
            raise ConfigError(
                f"PerplexityFilter: {self.path}: its tokenizer has the id {max(ids):,}, its network {self.network.vocab_size:,} ids."
            )
        before = [] if self.end is None else [self.end]
        return [*before, *ids[:tokens]]

    def _mean_loss(self, ids: list[int], window: int) -> float | None:
        import torch

        if len(ids) < 2:
            return None
        length = min(window, self.network.max_sequence_length or window)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # their number changes the order of sums
        try:
            with torch.inference_mode():
                losses = [
                    self._losses(ids[first : end + 1], scored)
                    for first, end, scored in windows(len(ids) - 1, length)
                ]
        finally:
            torch.set_num_threads(threads)
        mean = float(torch.cat(losses).double().mean())
        if math.isnan(mean):
            raise ConfigError(
                f"PerplexityFilter: the network of {self.path} gives NaN: its weights are damaged."
            )
        return mean

    def _losses(self, ids: list[int], scored: int) -> Any:
        """Returns the cross-entropies of the last `scored` ids of a window, each after all before it."""
        import torch
        import torch.nn.functional as F

        row = torch.tensor(ids)
        hidden = self.network({"input_ids": row[None, :-1]})[0, -scored:]
        return F.cross_entropy(self.network.logits(hidden).float(), row[-scored:], reduction="none")


def windows(tokens: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yields (begin, end, how many of its last tokens are scored) of windows that overlap by half."""
    begin, scored = 0, 0
    while scored < tokens:
        end = min(begin + length, tokens)
        yield begin, end, end - scored
        begin, scored = begin + length - length // 2, end
