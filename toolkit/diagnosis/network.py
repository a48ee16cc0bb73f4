"""Rules about the network: what it sees, how it is initialised, dead units and experts, attention, logits, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.parts import network_remedy, suspects, taken_out, without_callbacks


def _advice(case: Case, otherwise: str) -> str:
    return f"Leave out {suspects(case)}, which is not leyden's" if suspects(case) else otherwise


def sees_future(case: Case) -> Iterator[Finding]:
    """Logits depend on the tokens that are predicted."""
    share = case.last("doctor/sees_future")
    if case.is_causal and share > 1e-3:
        yield Finding(
            "sees_future", 1, f"logits move by {share:.1%} with tokens that follow", 0.985,
            "Take a network whose attention is causal", taken_out(case),
        )  # fmt: skip


def unsteady(case: Case) -> Iterator[Finding]:
    """The same rows give other logits in evaluation, in two looks."""
    later, first = case.series("doctor/unsteady"), case.last("doctor/initial_unsteady")
    bad = later.values > UNSTEADY
    if bad.sum() + (first > UNSTEADY) >= 2:
        most = max(float(later.values[bad].max()), first if first > 0 else 0.0)
        yield Finding(
            "unsteady_outputs", later.first_step(bad), f"logits of the same rows move by {most:.2g} deviations from one pass in evaluation to "
            "the next", 0.99, _advice(case, "Look for dropout without self.training, and test the device"), taken_out(case),
        )  # fmt: skip


UNSTEADY = 0.01
"""Deviations of logits; kernels that sum in another order move them by less than a thousandth of that."""


def bad_initialisation(case: Case) -> Iterator[Finding]:
    """The first loss is far from that of a uniform guess, logits do not differ, or one block is unlike the others."""
    loss, vocabulary = case.series("train/loss"), case.number("model.network.vocab_size", 0)
    if case.has_weights:
        return
    uniform, deviation = math.log(max(vocabulary, 2)), case.last("doctor/initial_logit_deviation")
    blocks, matrices = case.last("doctor/blocks_unlike"), case.last("doctor/matrices_unlike")
    evidence = list[tuple[str, float]]()
    if (
        deviation < 0.02 and not case.last("doctor/initial_gain_least") < 0.4
    ):  # else it fades on its way through blocks
        evidence.append(
            (f"before the first step logits differ by {deviation:.2g} only: weights are too small", 0.95)
        )
    if (warms := case.last("doctor/initial_warms")) > 0.3 and not case.last(
        "doctor/initial_unsteady"
    ) > UNSTEADY:
        evidence.append(
            (
                f"a pass in training moves the first logits by {warms:.2g} deviations: buffers are not ready",
                0.95,
            )
        )
    if (alike := case.last("doctor/units_alike")) > 0.3:
        evidence.append(
            (f"before the first step {alike:.0%} of the units of a matrix are alike, and stay so", 0.948)
        )
    plain = case.series("doctor/plain_loss").values
    first = case.last("doctor/initial_next_loss")  # an objective may sum what others average
    first = first if math.isfinite(first) else float(min([*loss.values[:1], *plain[:1]], default=0.0))
    if vocabulary >= 2 and len(loss) and loss.steps[0] <= 4 and first > 1.25 * uniform + 0.5:
        high = (
            f"the first loss is {first:.3g}, and log of the vocabulary {uniform:.3g}: weights are too large"
        )
        evidence.append((high, 0.89))
    if blocks > 12 or matrices > 12:
        what, times = ("the weights", blocks) if blocks > 12 else ("a matrix", matrices)
        unlike = (
            f"before the first step {what} of one block are {times:.3g} times as large or small as in others"
        )
        evidence.append((unlike, 0.89 if blocks > 12 else 0.86))
    if evidence:
        yield Finding(
            "bad_initialisation", 1, evidence[0][0], evidence[0][1], _advice(case, "Initialise as GPT-2, N(0, 0.02)"),
            taken_out(case) or _usual_init(case),
        )  # fmt: skip


def _usual_init(case: Case) -> dict[str, Any]:
    """Returns the overlay without deviations of initial weights that are set; else nothing."""
    given = case.option("model.network.init_std")
    return {"model": {"network": {"init_args": {"init_std": None}}}} if given else {}


def logit_growth(case: Case) -> Iterator[Finding]:
    """Logits grow from one look to the next, to where the softmax is saturated."""
    spread = case.series("doctor/logit_deviation")
    before, after = spread.values[:-1], spread.values[1:]
    grows = (before > 4) & (after > 12) & (after > 1.5 * before)
    if grows.any():
        at = int(np.argmax(grows))
        yield Finding(
            "logit_growth", int(spread.steps[at]), f"logits deviate by {before[at]:.3g}, then by {after[at]:.3g} at step "
            f"{spread.steps[at + 1]}; below 5 is usual", 0.775,
            _advice(case, "Keep logits small with a z-loss"),
            taken_out(case) or _z_loss(case),
        )  # fmt: skip


def _z_loss(case: Case) -> dict[str, Any]:
    """Returns the overlay of a z-loss on logits, where CausalLM trains the network, alone or within BalancedRouting."""
    if case.class_of("model.objective") == "CausalLM":
        return {"model": {"objective": {"init_args": {"z_loss": 1e-4}}}}
    if case.class_of("model.objective.objective") == "CausalLM":
        inner = {"objective": {"init_args": {"z_loss": 1e-4}}}
        return {"model": {"objective": {"init_args": inner}}}
    return {}


def dead_units(case: Case) -> Iterator[Finding]:
    """Many hidden units of a block are zero before the first step, or nearly all of them later on."""
    takes = case.class_of("model.network") in (
        "GPT",
        "BERT",
    )  # others have gated units, or a choice of their own
    smooth = {"model": {"network": {"init_args": {"activation": "gelu_tanh"}}}} if takes else {}
    remedy = taken_out(case) or smooth
    share = case.last("doctor/initial_dead_units")
    if share > 0.25:
        yield Finding(
            "dead_units", 1, f"before the first step {share:.1%} of the hidden units of a block are zero for all tokens", 0.91,
            _advice(case, "Take activation=gelu_tanh"), remedy,
        )  # fmt: skip
    elif late := _twice(case, "doctor/dead_units", 0.9):
        yield Finding(
            "dead_units", late[0], f"{late[1]:.1%} of the hidden units of a block are zero for all tokens", 0.7,
            _advice(case, "Take activation=gelu_tanh, or a lower rate"), remedy,
        )  # fmt: skip


def _twice(case: Case, name: str, limit: float, above: bool = True) -> tuple[int, float] | None:
    """Returns since when a figure is beyond a limit in two examined steps in a row, and the figure; None: never."""
    series = case.series(name)
    bad = series.values > limit if above else series.values < limit
    both = np.flatnonzero(bad[:-1] & bad[1:])
    return (int(series.steps[both[0]]), float(series.values[both[0] + 1])) if len(both) else None


def attention_collapse(case: Case) -> Iterator[Finding]:
    """Attention looks at one token: before the first step, or, what may be learned in part, hardly at any other later on."""
    entropy = case.last("doctor/initial_attention_entropy")
    late = _twice(case, "doctor/attention_entropy", 0.15, above=False)
    if entropy < 0.5 or late:
        when, value = ("before the first step ", entropy) if entropy < 0.5 else ("", late[1] if late else 0.0)
        yield Finding(
            "attention_collapse", 1 if entropy < 0.5 or not late else late[0],
            f"{when}the entropy of attention weights in a block is {value:.0%} of that of equal ones", 0.87 if when else 0.7,
            _advice(case, "Normalise queries and keys, as Qwen3 does"), taken_out(case),
        )  # fmt: skip


def monitors(case: Case) -> Iterator[Finding]:
    """ActivationMonitor sees a hidden layer of zeros; AttentionMonitor an entropy that falls to a part of what it was."""
    for index, zeros in enumerate(case.blocks("activation", ".mlp/zeros")):
        if (bad := (zeros.values[:-1] > 0.97) & (zeros.values[1:] > 0.97)).any():
            yield Finding(
                "dead_units", zeros.first_step(bad), f"{zeros.values[-1]:.1%} of the hidden values of block {index} are zero", 0.69,
                _advice(case, "Take activation=gelu_tanh, or a lower rate"), taken_out(case),
            )  # fmt: skip
            break
    for index, entropy in enumerate(case.blocks("attention", "/entropy")):
        low = entropy.values < 0.15 * entropy.values[:1]
        if (bad := low[:-1] & low[1:]).any():
            yield Finding(
                "attention_collapse", entropy.first_step(bad), f"the entropy of attention in block {index} fell from {entropy.values[0]:.2g} to "
                f"{entropy.values[-1]:.2g} nats", 0.69, _advice(case, "Normalise queries and keys, as Qwen3 does"), taken_out(case),
            )  # fmt: skip
            break


def dead_experts(case: Case) -> Iterator[Finding]:
    """Experts get no tokens: before the first step, or for long.

    Where nothing balances the load, a dozen logged steps say it. Where something does, experts that starve early come back: in a
    run of 400 steps with a loss for it, all did within 100.
    """
    unused, load = case.last("doctor/initial_experts_unused"), case.series("routing/min_load")
    remedy = {**taken_out(case), "model": {"objective": _balanced(case)}}
    advice = "Balance the experts with BalancedRouting or BiasBalancing"
    if unused > 0:
        yield Finding(
            "dead_experts", 1, f"before the first step no token chooses {unused:.0%} of the experts of a layer", 0.92,
            _advice(case, advice), remedy,
        )  # fmt: skip
    fed = load.values >= 0.01
    since = int(np.flatnonzero(fed)[-1]) + 1 if fed.any() else 0
    hungry = len(load) - since
    if hungry >= 12 and load.steps[-1] - load.steps[since] >= (BALANCING if _balances(case) else 11):
        yield Finding(
            "dead_experts", int(load.steps[since]), f"an expert got at most {load.values[since:].max():.2g} of its share in {hungry} "
            "logged steps", 0.74, advice, remedy,
        )  # fmt: skip


def _balanced(case: Case) -> dict[str, Any]:
    """Returns the run's objective with losses of routing."""
    options: dict[str, Any] = {"load_balancing": 0.01, "z_loss": 0.001}
    if case.class_of("model.objective") != "BalancedRouting":
        own = case.option("model.objective", {"class_path": "CausalLM"})
        options["objective"] = dict(own) if isinstance(own, Mapping) else {"class_path": str(own)}
    return {"class_path": "BalancedRouting", "init_args": options}


BALANCING = 300
"""Steps that something which balances experts is given."""


def _balances(case: Case) -> bool:
    """Returns whether a loss or a bias is configured that balances the load of experts."""
    names = [str(item.get("class_path", "")).rpartition(".")[2] for item in case.callbacks()]
    losses = case.series("train/load_balancing").values
    return "BiasBalancing" in names or (
        len(losses) > 0 and case.number("model.objective.load_balancing", 0.01) > 0
    )


def head_is_copy(case: Case) -> Iterator[Finding]:
    """The head begins with the embedding's values in a tensor of its own: what should be one weight is two."""
    if case.last("doctor/head_is_copy") > 0:
        yield Finding(
            "untied_embedding", 1, "the head has the values of the embedding, but is trained apart from it", 0.86,
            _advice(case, "Tie them, or initialise the head by itself"), taken_out(case),
        )  # fmt: skip


def dropout_too_high(case: Case) -> Iterator[Finding]:
    """Half of the features and more are dropped, or the same batch has a far lower loss without what training drops."""
    names = ("dropout", "attention_dropout", "residual_dropout", "embedding_dropout")
    found = {name: case.number(f"model.network.{name}", 0.0) for name in names}
    most = max(found.values())
    # the loss without what an objective adds to it in training
    name = "train/task_loss" if len(case.series("train/task_loss")) else "train/loss"
    common, without, loss = case.together("doctor/plain_loss", name)
    idle = case.series("doctor/without_gradient").values
    dropped = idle > 0.1
    if dropped.sum() >= 2 and (dropped[:-1] & ~dropped[1:]).any():  # and they have one again
        yield Finding(
            "dropout_too_high", int(case.series("doctor/without_gradient").first_step(dropped)),
            f"in {dropped.sum()} of {len(idle)} steps {np.median(idle[dropped]):.0%} of the weights get no gradient: what they are in is left out",
            0.82, "Leave it out less often", without_callbacks(case) or network_remedy(case),
        )  # fmt: skip
    if len(common) < 2:
        return
    with np.errstate(divide="ignore"):  # equal losses have no gap, also two of 0
        gaps = np.divide(loss, without, out=np.ones_like(loss), where=loss != without) - 1
    if most >= 0.5 or float(np.median(gaps[-3:])) > (0.05 if most >= 0.3 else 0.1):
        none = {name: 0.0 for name, value in found.items() if value > 0}
        yield Finding(
            "dropout_too_high", int(common[0]), f"dropout is {most:g}, and the loss of a batch {np.median(gaps[-3:]):.1%} lower "
            "without it", 0.8, "Leave dropout out",
            {"model": {"network": {"init_args": none}}} if none else network_remedy(case) or without_callbacks(case),
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    head_is_copy, monitors, unsteady,
    sees_future, bad_initialisation, logit_growth, dead_units, attention_collapse, dead_experts, dropout_too_high,
)  # fmt: skip
