"""Proofs for objectives: that tokens weigh the same however they are distributed; see `core.contracts.Objective`."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.case import Case
from conformance.networks import build, seeded
from conformance.proof import NotProvable, proof, require
from core.contracts import IGNORED_LABEL, ChangesNetwork, Network, Objective, TokenSum
from toolkit.rollouts import OLD, REWARDS, ROOM, SAMPLED, OnPolicyObjective, Rollout

ROWS, LENGTH = 4, 12
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative tolerance of a sum of some hundred terms of this type."""

Batch = dict[str, Tensor]
Sums = dict[str, TokenSum]


def batch_of(network: Network, case: Case, objective: Objective) -> Batch:
    """Returns a batch whose rows have 12, 9, 6 and 3 labels, as the case's objective takes it.

    For an objective on rollouts two such, with rewards.
    """
    on_policy = [part for part in objective.modules() if isinstance(part, OnPolicyObjective)]
    count = 2 * ROWS if on_policy else ROWS
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(network.vocab_size, (count, LENGTH + 1), generator=generator)
    labels = rows[:, 1:].clone()
    for row in range(count):
        labels[row, LENGTH - 3 * (row % ROWS) :] = IGNORED_LABEL
    batch = {"input_ids": rows[:, :-1], "labels": labels}
    batch = case.batch(batch) if case.batch else batch
    return _rollout(on_policy[0], network, batch) if on_policy else batch


def _rollout(objective: OnPolicyObjective, network: Network, part: Batch) -> Batch:
    """Returns a batch of two answers to each of several prompts as an objective prepares it."""
    part[REWARDS] = torch.arange(float(len(part["labels"])))
    part[ROOM] = torch.full((len(part["labels"]),), LENGTH)
    with torch.no_grad():
        objective.begin(network)
        objective.add_log_probabilities(network, part)
        # not all the same: rows whose advantages add up to 0 have another sum
        part[SAMPLED] = part[OLD] - 0.05 * torch.arange(len(part[OLD]))[:, None]
        objective.prepare(network, Rollout([part], 2, lambda sums: sums))
    return part


MODES = {False: "in validation", True: "in training"}
"""An objective's `training`, as `train()` and `eval()` set it: a term may exist in one of them alone."""


def parts(case: Case, training: bool) -> tuple[Objective, Network]:
    """Builds the objective, in one of its modes, and the network that it is tried with, in eval mode."""
    objective: Objective = case.build("model.objective", Objective)
    network = build(case)
    for part in list(objective.modules()):  # as a run does: some make parameters of the network's size
        if isinstance(part, ChangesNetwork):
            part.change_network(network)
    return objective.train(training), network


def sums(objective: Objective, network: Network, batch: Batch, repeatable: bool = True) -> Sums:
    """Returns the loss, named "loss", and the further figures.

    Raises:
        NotProvable: If they have to be repeatable and random numbers were drawn.
    """
    with seeded(0):
        before = torch.default_generator.get_state()
        loss, figures = objective.loss(network, batch)
        random = not torch.equal(before, torch.default_generator.get_state())
    require(isinstance(loss, TokenSum), f"`loss` returns a {type(loss).__name__}, not a TokenSum")
    if random and repeatable:
        raise NotProvable(f"its loss draws random numbers {MODES[objective.training]}")
    return {"loss": loss, **figures}


@proof("objectives")
def sums_are_additive(case: Case) -> None:
    """The sums over a batch are those over its rows, added up, in both modes: no mean, and no mean of means."""
    for training, mode in MODES.items():
        objective, network = parts(case, training)
        batch = batch_of(network, case, objective)
        with torch.no_grad():
            whole = sums(objective, network, batch)
            middle = len(batch["labels"]) // 2
            halves = [
                sums(objective, network, _rows(batch, part))
                for part in (slice(0, middle), slice(middle, None))
            ]
        for name, one in whole.items():
            require(all(name in half for half in halves), f"{name} is missing {mode} for a part of the batch")
            for what in one._fields:
                _is_the_sum(
                    f"{what} of {name} {mode}",
                    getattr(one, what),
                    [getattr(half[name], what) for half in halves],
                )


def _is_the_sum(what: str, one: Tensor, pieces: list[Tensor]) -> None:
    parts = torch.stack([piece.detach().double() for piece in pieces])
    added, rounding = parts.sum(), ROUNDING.get(one.dtype, 1e-2)
    least = rounding * float(
        parts.abs().max()
    )  # parts of different signs may cancel: what they round to stays
    shown = ", ".join(str(float(piece)) for piece in pieces)
    require(
        torch.isclose(one.detach().double(), added, rtol=rounding, atol=least),
        f"{what}: {float(one)} for 4 rows, {float(added)} for 2 and 2 ({shown}).\n"
        "Likely: a mean over rows or tokens is taken before the sum, or a term does not depend on the number of "
        "tokens: multiply it by them.",
    )


@proof("objectives")
def ignored_labels_do_not_count(case: Case) -> None:
    """Positions whose label is -100 count neither in a total nor among the tokens, in both modes."""
    for training, mode in MODES.items():
        objective, network = parts(case, training)
        batch = batch_of(network, case, objective)
        ignored = {**batch, "labels": torch.full_like(batch["labels"], IGNORED_LABEL)}
        with torch.no_grad():
            whole = sums(objective, network, batch)
            more = sums(objective, network, {key: torch.cat((batch[key], ignored[key])) for key in batch})
            none = sums(objective, network, ignored)
        for name, one in whole.items():
            require(
                more[name].tokens == one.tokens and torch.isclose(more[name].total, one.total, rtol=1e-4),
                f"{name} {mode}: {float(one.total)} over {int(one.tokens)} tokens; with rows that have no label "
                f"{float(more[name].total)} over {int(more[name].tokens)}",
            )
            require(
                none[name].total == 0 and none[name].tokens == 0,
                f"{name} of a batch without labels: {float(none[name].total)} over {int(none[name].tokens)}, {mode}",
            )


@proof("objectives")
def gradients_are_finite(case: Case) -> None:
    """Gradients exist and are finite in training, also where no position, or one, has a label; figures carry none."""
    objective, network = parts(case, training=True)
    batch = batch_of(network, case, objective)
    one = torch.full_like(batch["labels"], IGNORED_LABEL)
    none = one.clone()
    one[0, 0] = batch["labels"][0, 0]
    for what, labels in {"all": batch["labels"], "one": one, "no": none}.items():
        network.zero_grad()
        found = sums(objective, network, {**batch, "labels": labels}, repeatable=False)
        for name, figure in found.items():
            require(
                figure.total.ndim == 0 and figure.tokens.ndim == 0,
                f"{name}: total and tokens are 0-d tensors, not {figure.total}",
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
