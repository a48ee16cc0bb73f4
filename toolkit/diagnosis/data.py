"""Rules about the data: labels, documents, positions, order, duplicates, leaks, tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.parts import packing_remedy


def _of_packing(case: Case, cause: str, evidence: str, confidence: float, advice: str) -> Finding:
    return Finding(cause, 1, evidence, confidence, advice, packing_remedy(case))


def labels_shifted(case: Case) -> Iterator[Finding]:
    """Labels are not the tokens that follow."""
    names = ("same", "next", "after_next")
    same, following, later = (case.last(f"doctor/labels_{name}") for name in names)
    if case.is_causal and following < 0.5 and max(same, later) > 0.9:
        which = "the inputs themselves" if same > later else "two tokens ahead"
        evidence = f"{max(same, later):.0%} of the labels are {which}, {following:.0%} the next token"
        yield _of_packing(
            case, "labels_shifted", evidence, 0.99, "Take a packing whose labels are the next tokens"
        )


def few_labels(case: Case) -> Iterator[Finding]:
    """Most positions of a next-token objective have no label."""
    share = case.last("doctor/labelled")
    if (
        case.is_causal
        and share < 0.25
        and case.class_of("data") in ("PretrainDataModule", "MixtureDataModule")
    ):
        yield _of_packing(
            case,
            "few_labels",
            f"only {share:.0%} of the positions have a label",
            0.95,
            "Train on all tokens of a text",
        )


def sees_documents(case: Case) -> Iterator[Finding]:
    """Logits depend on other documents of a row, though positions restart with each."""
    share = case.last("doctor/sees_documents")
    if share > 1e-3:
        yield _of_packing(
            case, "mask_leak", f"logits move by {share:.1%} with tokens of another document of the row", 0.98,
            "Pass document_ids that keep documents apart",
        )  # fmt: skip


def positions_wrong(case: Case) -> Iterator[Finding]:
    """Positions do not count from the beginning of each document."""
    share = case.last("doctor/positions_wrong")
    if share > 0.01:
        yield _of_packing(
            case, "position_ids", f"{share:.0%} of position_ids do not count from the start of their document", 0.97,
            "Take a packing whose positions do",
        )  # fmt: skip


def tokenizer_mismatch(case: Case) -> Iterator[Finding]:
    """The data's tokenizer does not give the ids again."""
    share = case.last("doctor/round_trip")
    if share < 0.6:
        yield _of_packing(
            case, "tokenizer_mismatch", f"the tokenizer gives {share:.0%} of the ids again for the text they spell", 0.96,
            "Encode the text again with the tokenizer of the data",
        )  # fmt: skip


def duplicates(case: Case) -> Iterator[Finding]:
    """Rows come again within an epoch."""
    share = case.last("doctor/repeated_rows")
    if share > 0.1 and not case.option("trainer.overfit_batches"):
        finding = _of_packing(
            case,
            "duplicates",
            f"{share:.0%} of the rows came before, in one epoch",
            0.94,
            "Drop repeated documents",
        )
        deduplicating = {"data": {"init_args": {"transforms": [{"class_path": "ExactDuplicates"}]}}}
        remedy = finding.remedy or deduplicating
        yield Finding("duplicates", 1, finding.evidence, finding.confidence, finding.advice, remedy)


def not_shuffled(case: Case) -> Iterator[Finding]:
    """Batches that follow each other are alike."""
    errors = case.last("doctor/neighbours_alike")
    off = case.option("data.shuffle") is False
    if errors > (3.0 if off else 5.0):
        remedy: dict[str, Any] = {"data": {"init_args": {"shuffle": True}}} if off else packing_remedy(case)
        evidence = f"neighbouring batches are more alike than others, by {errors:.0f} standard errors"
        yield Finding("not_shuffled", 1, evidence, 0.9, "Shuffle the training rows", remedy)


def validation_leak(case: Case) -> Iterator[Finding]:
    """Validation text is among the training text."""
    share = case.last("doctor/validation_seen")
    if share > 0.2:
        yield _of_packing(
            case, "validation_leak", f"about {min(share, 1):.0%} of the validation text is in the training rows", 0.92,
            "Hold out other documents",
        )  # fmt: skip


def over_fitting(case: Case) -> Iterator[Finding]:
    """After several epochs the validation loss is far above the training loss, or rises."""
    val, train, epochs = case.series("val/loss"), case.series("train/loss"), case.last("epoch/all")
    if not len(val) or not np.isfinite(val.values).all() or not epochs > 1.5:
        return
    best = int(np.argmin(val.values))
    recent = train.since(val.steps[-1] - max(4, 0.1 * val.steps[-1])).values
    gap = val.values[-1] - (float(np.median(recent)) if len(recent) else math.nan)
    rises = best < len(val) - 1 and val.values[-1] > 1.01 * val.values[best]
    if gap > (0.1 if rises else 0.15) * val.values[best]:
        yield Finding(
            "over_fitting", int(val.steps[best]),
            f"val/loss is {val.values[-1]:.3g}, its least {val.values[best]:.3g}, and train/loss {gap:.2g} lower, after "
            f"{epochs:.1f} epochs", 0.85, "Stop at the best step, or take more text",
            {"trainer": {"max_steps": int(val.steps[best])}},
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    labels_shifted, few_labels, sees_documents, positions_wrong, tokenizer_mismatch, duplicates, not_shuffled,
    validation_leak, over_fitting,
)  # fmt: skip
