"""Rules about the data: labels, documents, positions, order, duplicates, leaks, tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.parts import guard_remedy, packing_remedy, suspects, taken_out


def _of_packing(case: Case, cause: str, since: int, evidence: str, confidence: float, advice: str) -> Finding:
    """Returns a finding about batches: a packing or a callback that is not leyden's may have changed them."""
    return Finding(cause, since, evidence, confidence, advice, packing_remedy(case) or taken_out(case))


def labels_shifted(case: Case) -> Iterator[Finding]:
    """Labels are not the tokens that follow."""
    found = case.worst("doctor/labels_next", 0.95, above=False)
    altered = _usually(case, "doctor/rows_other") > 0.02  # inputs: labels are not those of them
    if case.is_causal and found and not (altered and case.last("doctor/labels_elsewhere") < 0.5):
        offset, share = case.last("doctor/labels_offset"), case.last("doctor/labels_elsewhere")
        where = "the inputs themselves" if offset == 0 else f"{offset:.0f} tokens ahead"
        which = f"; {share:.0%} are {where}" if share > max(found[1], 0.3) else ""
        yield _of_packing(
            case, "labels_shifted", found[0], f"{found[1]:.0%} of the labels are the next token{which}", 0.99,
            "Take a packing whose labels are the next tokens",
        )  # fmt: skip


PRETRAINING = ("PretrainDataModule", "MixtureDataModule")
"""Data whose texts are all learned."""


def _usually(case: Case, name: str) -> float:
    values = case.series(name).values
    return float(np.median(values)) if len(values) else 0.0


def few_labels(case: Case) -> Iterator[Finding]:
    """Most tokens of a next-token objective have no label."""
    found = case.worst("doctor/labelled", 0.5, above=False)
    if case.is_causal and found and case.class_of("data") in PRETRAINING:
        yield _of_packing(
            case, "few_labels", found[0], f"only {found[1]:.0%} of the tokens have a label", 0.95,
            "Train on all tokens of a text",
        )  # fmt: skip


def sees_documents(case: Case) -> Iterator[Finding]:
    """Logits depend on other rows, or other documents of a row, or document_ids do not part what positions part."""
    if (rows := case.last("doctor/sees_rows")) > 1e-3:
        yield Finding(
            "mask_leak", 1, f"logits move by {rows:.1%} with tokens of another row", 0.98,
            "Take a network whose rows do not see each other", taken_out(case),
        )  # fmt: skip
        return
    share, joined = case.last("doctor/sees_documents"), case.worst("doctor/documents_joined", 0.1)
    if (share > 1e-3 or joined) and not case.last("doctor/begins_behind_end") < 0.5:
        seen = f"logits move by {share:.1%} with tokens of another document of the row"
        apart = "document_ids are the same for documents whose positions begin anew"
        finding = _of_packing(
            case, "mask_leak", joined[0] if joined else 1, seen if share > 1e-3 else apart, 0.98,
            "Pass document_ids that keep documents apart",
        )  # fmt: skip
        yield finding if joined or finding.remedy else replace(finding, remedy=taken_out(case))


def positions_wrong(case: Case) -> Iterator[Finding]:
    """Positions do not count from the beginning of each document."""
    if (behind := case.last("doctor/begins_behind_end")) < 0.5:
        yield _of_packing(
            case, "position_ids", 1, f"positions begin anew within documents: {behind:.0%} of the times behind an end of text", 0.985,
            "Take a packing whose positions count through each document",
        )  # fmt: skip
    elif found := case.worst("doctor/positions_wrong", 0.01):
        yield _of_packing(
            case, "position_ids", found[0], f"{found[1]:.0%} of position_ids do not count from the start of their document",
            0.985, "Take a packing whose positions do",
        )  # fmt: skip


def tokenizer_mismatch(case: Case) -> Iterator[Finding]:
    """The data's tokenizer does not give the ids again, or they are not as frequent as in the source: from the first rows on.

    What is so in some batches alone is damaged text; repeated text has other frequencies with the right tokenizer, too.
    """
    advice = "Encode the text again with the tokenizer of the data"
    trips = case.series("doctor/round_trip")
    if (bad := trips.values < 0.93).any():
        first = int(np.argmax(bad))
        begins = first == 0 or any(
            trips.steps[first - 1] < at <= trips.steps[first] for at in case.series("doctor/resumed").steps
        )
        since, share, lasts = (
            int(trips.steps[first]),
            float(trips.values[bad].min()),
            bad[first:].mean() > 0.7,
        )
        evidence = f"the tokenizer gives {share:.0%} of the ids again for the text they spell"
        if lasts and (begins or bad.sum() >= LASTING):
            yield _of_packing(case, "tokenizer_mismatch", since, evidence, 0.96, advice)
        elif not lasts:
            finding = _of_packing(
                case, "spike_by_data", since, f"{evidence}, of single batches", 0.95, "Drop what is no text"
            )
            yield replace(finding, remedy=finding.remedy or guard_remedy(case, since))
    like, repeats = case.series("doctor/like_source").values, case.last("doctor/repeated_rows") > 0.1
    if len(like) and like[0] < 0.75 and (like := like[-1]) < 0.6 and not repeats and not _comes_again(case):
        yield _of_packing(
            case, "tokenizer_mismatch", 1, f"frequencies of ids agree to {like:.0%} with those of the source's text, encoded again",
            0.95, advice,
        )  # fmt: skip


LASTING = 3
"""Looks in a row in which text is of another tokenizer that was not so at first."""


def _comes_again(case: Case) -> bool:
    """Returns whether most of the batches that are looked at came before, as of a few that are read over and over."""
    again = case.series("doctor/rows_again").values
    return len(again) >= 6 and float(again[len(again) // 2 :].mean()) > 0.6


def duplicates(case: Case) -> Iterator[Finding]:
    """Rows come again within an epoch."""
    if case.option("trainer.overfit_batches"):
        return
    if alike := case.worst("doctor/ranks_alike", 0.5):
        yield Finding(
            "duplicates", alike[0], "ranks read the same rows", 0.945, "Give each rank rows of its own",
            packing_remedy(case) or taken_out(case),
        )  # fmt: skip
        return
    before, during = case.worst("doctor/repeated_rows", 0.1), case.worst("doctor/rows_again", 0.1)
    if before or (during and not case.last("epoch/all") > 1):
        since, share = before or during or (0, 0.0)
        where = (
            "of the rows came before, in one epoch" if before else "of the rows of a step were in one before"
        )
        finding = _of_packing(
            case, "duplicates", since, f"{share:.0%} {where}", 0.94, "Drop repeated documents"
        )
        yield finding if finding.remedy else replace(finding, remedy=_adding(case, "ExactDuplicates"))
    elif (share := case.last("doctor/common_text")) > 0.055 and case.class_of("data") in PRETRAINING:
        finding = _of_packing(
            case, "duplicates", 1, f"{share:.0%} of the tokens are passages that a fifth of the documents and more have alike", 0.92,
            "Drop what pages share, with RepeatedLines, and repeated documents",
        )  # fmt: skip
        yield finding if finding.remedy else replace(finding, remedy=_adding(case, "RepeatedLines"))


def _adding(case: Case, transform: str) -> dict[str, Any]:
    """Returns the overlay that adds a transform, where the data has transforms and not this one."""
    given = case.option("data.transforms", [])
    names = [str(one.get("class_path")) for one in given if isinstance(one, dict)]
    if case.class_of("data") != "PretrainDataModule" or any(transform in name for name in names):
        return {}
    return {"data": {"init_args": {"transforms+": [{"class_path": transform}]}}}


def not_shuffled(case: Case) -> Iterator[Finding]:
    """Batches that follow each other are alike."""
    errors = case.last("doctor/neighbours_alike")
    off = case.option("data.shuffle") is False
    if errors > (3.0 if off else 5.0) and not case.option("trainer.overfit_batches"):
        remedy: dict[str, Any] = {"data": {"init_args": {"shuffle": True}}} if off else packing_remedy(case)
        evidence = f"neighbouring batches are more alike than others, by {errors:.0f} standard errors"
        yield Finding("not_shuffled", 1, evidence, 0.9, "Shuffle the training rows", remedy)


def validation_leak(case: Case) -> Iterator[Finding]:
    """Validation text is among the training text."""
    share = case.last("doctor/validation_seen")
    if share > 0.15:
        yield _of_packing(
            case, "validation_leak", 1, f"about {min(share, 1):.0%} of the validation text is in the training rows",
            0.945,
            "Hold out other documents",
        )  # fmt: skip


def over_fitting(case: Case) -> Iterator[Finding]:
    """After several epochs the validation loss is far above the training loss, or rises; or does both by far."""
    val, train, epochs = case.series("val/loss"), case.series("train/loss"), case.last("epoch/all")
    if not len(val) or not np.isfinite(val.values).all():
        return
    best = int(np.argmin(val.values))
    recent = train.since(val.steps[-1] - max(4, 0.1 * val.steps[-1])).values
    gap = val.values[-1] - (float(np.median(recent)) if len(recent) else math.nan)
    _, given, plain = case.together("train/loss", "doctor/plain_loss")
    gap += (
        min(float(np.median(given - plain)), 0.0) if len(given) else 0.0
    )  # what training alone takes off the loss
    several = epochs > 1.5 or _comes_again(case)
    rises = best < len(val) - 1 and val.values[-1] > 1.01 * val.values[best]
    widened, few = _widened(case), case.option("trainer.overfit_batches")
    if not several and not (rises and gap > 0.5 * val.values[best]):
        return
    if gap > (0.1 if rises else 0.15) * val.values[best] or widened > 0.05 * val.values[best]:
        yield Finding(
            "over_fitting", int(val.steps[best]),
            f"val/loss is {val.values[-1]:.3g}, its least {val.values[best]:.3g}, and train/loss {max(gap, widened):.2g} lower than "
            f"at first beside it, " + ("over rows that come again" if _comes_again(case) else f"after {epochs:.1f} epochs"), 0.85,
            "Stop at the best step, or take more text", {"trainer": {"overfit_batches": 0.0} if few else {"max_steps": int(val.steps[best])}},
        )  # fmt: skip


def _widened(case: Case) -> float:
    """Returns by how much the losses of a fixed validation batch and of training batches have moved apart; NaN: not known."""
    steps, anchor, plain = case.together("doctor/anchor_loss", "doctor/plain_loss")
    if len(steps) < 5:
        return math.nan
    gaps = anchor - plain
    return float(np.median(gaps[-3:]) - np.median(gaps[:2]))


def rows_missing(case: Case) -> Iterator[Finding]:
    """Batches have fewer rows than are configured, in two looks."""
    given = case.series("doctor/rows_given")
    few = given.values < 0.6
    if few.sum() >= 2 and (suspects(case) or packing_remedy(case)):
        yield _of_packing(
            case, "batch_too_small", given.first_step(few), f"batches have {np.median(given.values[few]):.0%} of the rows that are configured",
            0.92, "Return all rows of a batch",
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    labels_shifted, few_labels, sees_documents, positions_wrong, tokenizer_mismatch, duplicates, not_shuffled,
    validation_leak, over_fitting, rows_missing,
)  # fmt: skip
