"""What is measured of the data before the first step: counts over the coming batches, of which figures are shares.

Every function returns pairs of counts, by the name of a figure: how often, out of how many. Counts of ranks add up.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
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


FURTHEST = 8
"""Tokens by which labels are looked for before and behind their positions."""


def label_counts(batches: Sequence[Batch]) -> Counts:
    """Counts the labels that are the inputs so many tokens away, as `labels+1` and so on, and how many tokens have one."""
    hits, labelled = dict.fromkeys(range(-FURTHEST, FURTHEST + 1), np.zeros(2)), np.zeros(2)
    for batch in batches:
        ids, labels = batch["input_ids"], batch["labels"]
        length = labels.shape[1]
        for by in hits:
            theirs = labels[:, max(-by, 0) : length - max(by, 0)]
            known = theirs != IGNORED_LABEL
            same = known & (theirs == ids[:, max(by, 0) : length - max(-by, 0)])
            hits[by] = hits[by] + (int(same.sum()), int(known.sum()))
        labelled += (int((labels != IGNORED_LABEL).sum()), int((batch.get("document_ids", ids) >= 0).sum()))
    counts = {f"labels{by:+d}": (float(pair[0]), float(pair[1])) for by, pair in hits.items()}
    return {**counts, "doctor/labelled": (float(labelled[0]), float(labelled[1]))}


def figures_of(counts: Counts) -> dict[str, float]:
    """Returns shares of counts.

    Of labels `doctor/labels_next`, those that are the next tokens, `doctor/labels_elsewhere`, those that are inputs at the other
    distance where most are, and `doctor/labels_offset`, that distance.
    """
    shares = {name: float(hits / total) for name, (hits, total) in counts.items() if total}
    labels = {int(name[6:]): shares.pop(name) for name in [*shares] if name.startswith("labels")}
    if 1 in labels:
        shares["doctor/labels_next"] = labels.pop(1)
        shares["doctor/labels_offset"] = float(max(labels, key=lambda by: labels[by], default=0))
        shares["doctor/labels_elsewhere"] = max(labels.values(), default=0.0)
    return shares


def repeated_rows(batches: Sequence[Batch]) -> Counts:
    """Counts the rows of which nearly all spans of tokens are in earlier rows: copies, also where they are cut elsewhere."""
    numbers, rows = spans_of(batches)
    if not len(numbers):
        return {}
    _, first, which = np.unique(numbers, return_index=True, return_inverse=True)
    seen = rows[first][which] < rows
    total = np.bincount(rows)
    known = np.bincount(rows, weights=seen)[total > 0] / total[total > 0]
    return {"doctor/repeated_rows": (float((known > 0.8).sum()), len(known))}


def common_text(batches: Sequence[Batch], end: int | None) -> Counts:
    """Counts the tokens in passages that come again in a fifth of the documents and more: notices, menus, headers of licences.

    Args:
        batches: Training batches.
        end: The id that ends every document; None: there is none.
    """
    ids = np.concatenate([batch["input_ids"].cpu().numpy() for batch in batches])
    documents = int(((ids[:, :-1] == end) & (ids[:, 1:] != end)).sum())
    if documents < LEAST_DOCUMENTS or ids.shape[1] < PASSAGE:
        return {}
    numbers, real = _windows(ids, PASSAGE)
    _, which, counts = np.unique(numbers[real], return_inverse=True, return_counts=True)
    # rows cut some of them
    least = max(0.2 * documents * (1 - (PASSAGE - 1) / ids.shape[1]), LEAST_DOCUMENTS / 3)
    common, covered = np.zeros(numbers.shape, bool), np.zeros(ids.shape, bool)
    common[real] = counts[which] > least
    for offset in range(PASSAGE):
        covered[:, offset : offset + numbers.shape[1]] |= common
    return {"doctor/common_text": (int(covered.sum()), covered.size)}


PASSAGE, LEAST_DOCUMENTS = 24, 48
"""Tokens in a row that many documents have alike, and documents below which these say nothing."""


class SeenRows:
    """The first row of each examined step, by a number, to know batches that come again."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.begin = -1  # that of the data's first row, as it was read before the first step

    def add(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """Returns whether the row was that of an examined step before."""
        number = self.number(batch)
        seen = number in self.numbers
        self.numbers.append(number)
        return {"doctor/rows_again": float(seen)}

    def begins_anew(self, batch: Mapping[str, Any]) -> bool:
        """Returns whether the row is the data's first one, or that of the first examined step."""
        return self.number(batch) in (self.begin, *self.numbers[:1])

    @staticmethod
    def number(batch: Mapping[str, Any]) -> int:
        """Returns the number of a batch's first row."""
        return zlib.crc32(batch["input_ids"][0].cpu().numpy().tobytes())


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
    known, _ = spans_of(training[:fold])
    others, spans = spans_of(training[fold:])[0], spans_of(validation)[0]
    if not len(others) or not len(spans):  # rows shorter than a span
        return {}
    usual, seen = (float(np.isin(found, known).mean()) for found in (others, spans))
    of_all = max(share_read * fold / len(training), 1e-9)
    return {"doctor/validation_seen": (max(seen - usual, 0.0) / min(of_all, 1.0) * len(spans), len(spans))}


def spans_of(batches: Sequence[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Returns a 64-bit number for each span of tokens that is no padding, and which row it is of."""
    found, of = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    before = 0
    for batch in batches:
        ids = batch["input_ids"].cpu().numpy()
        if ids.shape[1] >= SPAN:
            numbers, real = _windows(ids, SPAN)
            found.append(numbers[real])
            of.append(before + np.nonzero(real)[0])
        before += len(ids)
    return np.concatenate(found), np.concatenate(of)


def _windows(ids: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a number for each window of rows, (rows, windows), and whether it is more than one token again and again."""
    random = np.random.default_rng(0).integers(1, 2**63, size, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, size, axis=1)
    numbers = np.zeros(windows.shape[:2], np.uint64)
    same = np.zeros(windows.shape[:2], np.int64)
    for place, factor in enumerate(random):  # windows of all rows at once would be many times as large
        numbers += windows[..., place].astype(np.uint64) * factor
        same += windows[..., place] == windows[..., 0]
    return numbers, size - same > size // 3


def tokenizer_of(tokenizer_json: str) -> Any:
    """Returns the tokenizer of some data; None where it has none."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception:  # the library raises no narrower class: data without a tokenizer
        return None


def round_trips(batches: Sequence[Batch], tokenizer_json: str) -> Counts:
    """Counts the ids that the tokenizer gives again for the text that they are decoded to."""
    if (tokenizer := tokenizer_of(tokenizer_json)) is None:
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


class SourceFrequencies:
    """Compares the frequencies of ids with those of the first documents of the source, encoded again.

    Args:
        documents: The source's text.
        tokenizer_json: The tokenizer of the data.
    """

    def __init__(self, documents: Iterable[str], tokenizer_json: str) -> None:
        tokenizer = tokenizer_of(tokenizer_json)
        self.halves: list[list[int]] = [[], []]
        self.seen: np.ndarray = np.zeros(1)
        for index, text in enumerate(documents if tokenizer is not None else ()):
            self.halves[index % 2] += tokenizer.encode(text[:MOST_TEXT], add_special_tokens=False).ids
            if sum(map(len, self.halves)) > MOST_TEXT // 4:
                break

    def frequencies(self, batches: Sequence[Mapping[str, Any]], vocab_size: int) -> np.ndarray:
        """Returns how often each id is in some batches, (vocab_size,)."""
        ids = np.concatenate([batch["input_ids"].cpu().numpy().ravel() for batch in batches])
        return np.bincount(ids.clip(0, vocab_size - 1), minlength=vocab_size)

    def figures(self, counts: np.ndarray) -> dict[str, float]:
        """Says how much frequencies, and further ones until there are enough, agree with the source's.

        1: as much as one half of its documents agrees with the other.
        """
        self.seen = self.seen + counts
        if min(self.seen.sum(), *map(len, self.halves)) < LEAST_TOKENS:
            return {}
        rows, self.seen = self.seen / self.seen.sum(), np.zeros(1)
        one, other = (
            np.bincount(np.array(half).clip(0, len(rows) - 1), minlength=len(rows)) / len(half)
            for half in self.halves
        )
        same, usual = np.minimum(rows, (one + other) / 2).sum(), np.minimum(one, other).sum()
        return {"doctor/like_source": float(same / max(usual, 1e-12))}


MOST_TEXT, LEAST_TOKENS = 2**18, 1000
"""Characters of the source that are encoded again, and tokens below which frequencies say nothing."""


def position_counts(batches: Sequence[Mapping[str, Any]], end: int | None = None) -> Counts:
    """Counts positions that are not those of their documents, documents in a row, and those that document_ids do not part.

    Of the last, also those behind an end of text, whose id is given: others are no documents.
    """
    wrong = total = documents = rows = joined = behind = 0
    for batch in batches:
        number, ids, positions = document_numbers(batch), batch.get("document_ids"), batch.get("position_ids")
        if number is None:
            continue
        documents += int((number.amax(1) + 1).sum())
        rows += len(number)
        if positions is None:
            continue
        real = number >= 0
        begins = torch.ones_like(real)
        begins[:, 1:] = number[:, 1:] != number[:, :-1]
        same = (ids[:, 1:] == ids[:, :-1]) if ids is not None else torch.ones_like(real[:, 1:])
        without_id = begins[:, 1:] & real[:, 1:] & same
        behind += int((without_id & (batch["input_ids"][:, :-1] == end)).sum()) if end is not None else 0
        joined += int(without_id.sum())
        if ids is not None:
            wrong += int((real & (positions != _expected(begins))).sum())
            total += int(real.sum())
    return {
        "doctor/documents_per_row": (documents, rows),
        "doctor/positions_wrong": (wrong, total),
        "doctor/begins_behind_end": (behind, joined if end is not None else 0),
        "doctor/documents_joined": (joined, max(documents - rows, 1) if total else 0),
    }


def document_numbers(batch: Mapping[str, Any]) -> Tensor | None:
    """Returns the number of each token's document within its row, (B, T), -1 where there is none; None: rows are not divided.

    By document_ids, and also where positions begin again: where both differ, one of them is wrong.
    """
    ids, positions = batch.get("document_ids"), batch.get("position_ids")
    some = positions if ids is None else ids
    if some is None:
        return None
    begins = torch.zeros_like(some, dtype=torch.bool)
    if ids is not None:
        begins[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    if positions is not None:
        begins[:, 1:] |= (positions[:, 1:] == 0) & (positions[:, :-1] != 0)
    number = begins.long().cumsum(1)
    return number if ids is None else number.masked_fill(ids < 0, -1)


def _expected(begins: Tensor) -> Tensor:
    """Returns positions from the beginning of each document, (B, T)."""
    places = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
    return places - torch.where(begins, places, 0).cummax(dim=1).values
