"""Proofs for objectives: that tokens weigh the same however they are spread; see `core.contracts.Objective`."""

from __future__ import annotations

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.testing.case import Case
from core.testing.networks import build, seeded
from core.testing.proof import proof, require

ROWS, LENGTH = 4, 12
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Of a sum of some hundred terms of this type, relative."""

Batch = dict[str, Tensor]
Sums = dict[str, TokenSum]


def batch_of(network: Network) -> Batch:
    """Returns a batch whose rows have 12, 9, 6 and 3 labels."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(network.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    labels = rows[:, 1:].clone()
    for row in range(ROWS):
        labels[row, LENGTH - 3 * row :] = IGNORED_LABEL
    return {"input_ids": rows[:, :-1], "labels": labels}


def parts(case: Case) -> tuple[Objective, Network]:
    """Builds the objective and the network that it is tried with."""
    objective: Objective = case.build("model.objective", Objective)
    return objective.eval(), build(case)


def sums(objective: Objective, network: Network, batch: Batch) -> Sums:
    """Returns the loss, named "loss", and the further figures."""
    with seeded(0):
        loss, figures = objective.loss(network, batch)
    require(isinstance(loss, TokenSum), f"`loss` returns a {type(loss).__name__}, not a TokenSum")
    return {"loss": loss, **figures}


@proof("objectives")
def sums_are_additive(case: Case) -> None:
    """The sums over a batch are those over its rows, added up: no mean, and no mean of means."""
    objective, network = parts(case)
    batch = batch_of(network)
    with torch.no_grad():
        whole = sums(objective, network, batch)
        halves = [sums(objective, network, _rows(batch, part)) for part in (slice(0, 2), slice(2, 4))]
    for name, (total, tokens) in whole.items():
        require(all(name in half for half in halves), f"{name} is missing for a part of the batch")
        for what, one, pieces in (
            ("total", total, [half[name].total for half in halves]),
            ("tokens", tokens, [half[name].tokens for half in halves]),
        ):
            added = sum(piece.double() for piece in pieces)
            close = torch.isclose(
                one.double(), torch.as_tensor(added), rtol=ROUNDING.get(one.dtype, 1e-2), atol=0
            )
            require(
                close,
                f"{what} of {name}: {float(one)} for 4 rows, {float(added)} for 2 and 2 "
                f"({', '.join(str(float(piece)) for piece in pieces)})",
            )


@proof("objectives")
def ignored_labels_do_not_count(case: Case) -> None:
    """Positions whose label is -100 count neither in a total nor among the tokens."""
    objective, network = parts(case)
    batch = batch_of(network)
    ignored = {**batch, "labels": torch.full_like(batch["labels"], IGNORED_LABEL)}
    with torch.no_grad():
        whole = sums(objective, network, batch)
        more = sums(objective, network, {key: torch.cat((batch[key], ignored[key])) for key in batch})
        none = sums(objective, network, ignored)
    for name, (total, tokens) in whole.items():
        require(
            more[name].tokens == tokens and torch.isclose(more[name].total, total, rtol=1e-4),
            f"{name}: {float(total)} over {int(tokens)} tokens; with rows that have no label "
            f"{float(more[name].total)} over {int(more[name].tokens)}",
        )
        require(
            none[name].total == 0 and none[name].tokens == 0,
            f"{name} of a batch without labels: {float(none[name].total)} over {int(none[name].tokens)}",
        )


@proof("objectives")
def gradients_are_finite(case: Case) -> None:
    """Gradients exist and are finite, also where no position, or only one, has a label; figures carry none."""
    objective, network = parts(case)
    batch = batch_of(network)
    one = torch.full_like(batch["labels"], IGNORED_LABEL)
    none = one.clone()
    one[0, 0] = batch["labels"][0, 0]
    for what, labels in {"all": batch["labels"], "one": one, "no": none}.items():
        network.zero_grad()
        found = sums(objective, network, {**batch, "labels": labels})
        for name, (total, tokens) in found.items():
            require(
                total.ndim == 0 and tokens.ndim == 0, f"{name}: total and tokens are 0-d tensors, not {total}"
            )
        found["loss"].total.backward()
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        require(gradients, "the loss depends on no parameter of the network")
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        require(finite, f"gradients are not finite with {what} label")
        moved = any(bool(gradient.any()) for gradient in gradients)
        require(moved or what == "no", f"gradients are all zero with {what} label")


def _rows(batch: Batch, part: slice) -> Batch:
    return {key: value[part] for key, value in batch.items()}
