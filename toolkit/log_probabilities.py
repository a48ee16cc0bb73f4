"""Log-probabilities of the labels: what objectives on whole answers are made of.

Shapes: B rows, T positions, N positions of all rows, C features, V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from core.contracts import IGNORED_LABEL, Network
from core.training.shards import full_tensor
from toolkit.aligned_logits import logits_of

__all__ = ["CHUNK_TOKENS", "log_probabilities", "log_probabilities_at", "row_sums"]

CHUNK_TOKENS = 1024
"""Positions whose logits exist at a time, by default."""


def log_probabilities(
    network: Network, batch: Mapping[str, Tensor], chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Returns the log-probability of each label in nats, (B, T) float32; 0 where the label is ignored.

    Args:
        network: Called once with the batch.
        batch: With `labels` (B, T), which are already shifted.
        chunk_tokens: Positions whose logits are computed at a time, see :func:`log_probabilities_at`.
    """
    return log_probabilities_at(network, network(batch), batch["labels"], chunk_tokens)


def log_probabilities_at(
    network: Network, hidden: Tensor, labels: Tensor, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Returns the log-probabilities (B, T) of labels where the network has been run already.

    Logits are converted to float32 before the softmax, also under autocast; float64 stays. Those of more than
    `chunk_tokens` positions never exist together: backward computes each chunk's again, from the hidden states. Where the
    network returns logits itself, that saves their float32 copies alone.

    Args:
        network: Whose `logits` are used.
        hidden: What the network returned, (B, T, C), or logits (B, T, V).
        labels: (B, T).
        chunk_tokens: Positions whose logits are computed at a time.
    """
    logits_from = logits_of(network, hidden)

    def of(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = logits_from(hidden)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # with a head that is sharded along the vocabulary, logits and losses are DTensors
        return -full_tensor(F.cross_entropy(wide, labels, ignore_index=IGNORED_LABEL, reduction="none"))

    rows, flat = hidden.flatten(0, 1), labels.flatten()
    if len(rows) <= chunk_tokens:
        return of(rows, flat).view_as(labels)
    parts = [
        # the head draws no random numbers
        checkpoint(of, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(rows.split(chunk_tokens), flat.split(chunk_tokens), strict=True)
    ]
    return torch.cat(parts).view_as(labels)


def row_sums(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of each row over its positions with a label, (B,), and how many these are, (B,) int64.

    Args:
        values: One for each position, (B, T).
        labels: (B, T).
    """
    labelled = labels != IGNORED_LABEL
    return values.where(labelled, 0.0).sum(1), labelled.sum(1)
