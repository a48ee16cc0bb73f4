"""What is measured of the data before the first step: counts over the coming batches, of which figures are shares.

Every function returns pairs of counts, by the name of a figure: how often, out of how many. Counts of ranks add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Batch

Counts = dict[str, tuple[float, float]]
"""Name of a figure -> how often, out of how many."""

SPAN = 12
"""Tokens in a row that are looked for in the training data: fewer occur by chance."""


def label_counts(batches: Sequence[Batch]) -> Counts:
    """Compares labels with the inputs at, after and two after their positions; counts how many positions have one."""
    found = {f"doctor/labels_{name}": [0, 0] for name in ("same", "next", "after_next")}
    labelled = [0, 0]
    for batch in batches:
        ids, labels = batch["input_ids"], batch["labels"]
        for by, pair in enumerate(found.values()):
            theirs = labels[:, : labels.shape[1] - by]
            known = theirs != IGNORED_LABEL
            pair[0] += int((known & (theirs == ids[:, by:])).sum())
            pair[1] += int(known.sum())
        labelled[0] += int((labels != IGNORED_LABEL).sum())
        labelled[1] += labels.numel()
    return {name: (pair[0], pair[1]) for name, pair in (*found.items(), ("doctor/labelled", labelled))}


def repeated_rows(batches: Sequence[Batch]) -> Counts:
    """Counts the rows that came before."""
    rows = [row.tobytes() for batch in batches for row in batch["input_ids"].cpu().numpy()]
    return {"doctor/repeated_rows": (len(rows) - len(set(rows)), len(rows))}


def neighbours(batches: Sequence[Batch], vocab_size: int) -> Counts:
    """Says how much more batches that follow each other are alike than others, in standard errors.

    Alike: by the frequencies of their tokens, those that all batches share left out.
    """
    counts = np.stack([_frequencies(batch["input_ids"], vocab_size) for batch in batches])
    counts = np.sqrt(counts) - np.sqrt(counts).mean(0)
    norms = np.linalg.norm(counts, axis=1, keepdims=True)
    alike = (counts / np.maximum(norms, 1e-12)) @ np.transpose(counts / np.maximum(norms, 1e-12))
    near = np.array([alike[i, j] for i, j in pairwise(range(len(batches)))])
    far = alike[np.triu_indices(len(batches), k=max(2, len(batches) // 4))]
    error = far.std() / np.sqrt(len(near)) if len(near) > 3 else np.inf
    return {"doctor/neighbours_alike": (float((near.mean() - far.mean()) / max(error, 1e-12)), 1)}


def _frequencies(ids: Tensor, vocab_size: int) -> np.ndarray:
    return np.bincount(ids.cpu().numpy().ravel().clip(0, vocab_size - 1), minlength=vocab_size) / ids.numel()


def seen_spans(validation: Sequence[Batch], training: Sequence[Batch], share_read: float) -> Counts:
    """Counts the spans of the validation rows that are among the training rows, above what is alike by nature.

    How much is alike by nature, training rows say: of the last quarter of them, how many spans are among the others.

    Args:
        validation: Validation batches.
        training: Training batches.
        share_read: Which share of the training data these are: the others may hold as many.
    """
    fold = len(training) - max(1, len(training) // 4)
    if fold < 1 or not validation:
        return {}
    known = _spans(training[:fold])
    usual = float(np.isin(_spans(training[fold:]), known).mean())
    spans = _spans(validation)
    seen = float(np.isin(spans, known).mean()) if len(spans) else 0.0
    of_all = max(share_read * fold / len(training), 1e-9)
    return {"doctor/validation_seen": (max(seen - usual, 0.0) / min(of_all, 1.0) * len(spans), len(spans))}


def _spans(batches: Sequence[Batch]) -> np.ndarray:
    """Returns a 64-bit number for each span of tokens that is no padding."""
    random = np.random.default_rng(0).integers(1, 2**63, SPAN, dtype=np.uint64)
    found = [np.zeros(0, np.uint64)]
    for batch in batches:
        rows = batch["input_ids"].cpu().numpy()
        if rows.shape[1] < SPAN:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(rows, SPAN, axis=1).reshape(-1, SPAN)
        real = (windows != windows[:, :1]).sum(1) > SPAN // 3
        found.append((windows[real].astype(np.uint64) * random).sum(1))
    return np.concatenate(found)


def round_trips(batches: Sequence[Batch], tokenizer_json: str) -> Counts:
    """Counts the ids that the tokenizer gives again for the text that they are decoded to."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception:  # the library raises no narrower class: data without a tokenizer
        return {}
    same = total = 0
    for batch in batches:
        for row in batch["input_ids"].tolist():
            again = tokenizer.encode(
                tokenizer.decode(row, skip_special_tokens=False), add_special_tokens=False
            ).ids
            counts, others = np.bincount(row), np.bincount(again or [0])
            size = min(len(counts), len(others))
            same += int(np.minimum(counts[:size], others[:size]).sum())
            total += len(row)
    return {"doctor/round_trip": (same, total)}


def position_counts(batches: Sequence[Mapping[str, Any]]) -> Counts:
    """Counts positions that are not those of their documents, and documents that a row has."""
    wrong = total = documents = rows = 0
    for batch in batches:
        ids, positions = batch.get("document_ids"), batch.get("position_ids")
        restarts = positions if ids is None and positions is not None else None
        begins = _begins(ids) if ids is not None else None if restarts is None else (restarts == 0)
        if begins is None:
            continue
        documents += int(begins.sum())
        rows += len(begins)
        if positions is not None and ids is not None:
            real = (ids >= 0) & (batch["labels"] != IGNORED_LABEL)
            wrong += int((real & (positions != _expected(begins))).sum())
            total += int(real.sum())
    found: Counts = {}
    if rows:
        found["doctor/documents_per_row"] = (documents, rows)
    if total:
        found["doctor/positions_wrong"] = (wrong, total)
    return found


def _begins(ids: Tensor) -> Tensor:
    """Returns where documents begin, (B, T)."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return begins


def _expected(begins: Tensor) -> Tensor:
    """Returns positions from the beginning of each document, (B, T)."""
    places = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
    return places - torch.where(begins, places, 0).cummax(dim=1).values
