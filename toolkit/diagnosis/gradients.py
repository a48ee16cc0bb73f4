"""Rules about gradients and updates: what the optimizer gets is not the gradient of the loss, or does not arrive."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.history import Series
from toolkit.diagnosis.parts import guard_remedy, is_known, suspects, taken_out


def _advice(case: Case, otherwise: str) -> str:
    return f"Leave out {suspects(case)}, which is not leyden's" if suspects(case) else otherwise


def non_finite(case: Case) -> Iterator[Finding]:
    """A loss or gradient is not a number; but gradients of the first step, from which a loss scale is found.

    Of a run that diverged step by step before it, that is what the cause of it has led to.
    """
    for name in ("train/grad_norm", "train/loss"):
        series = case.series(name)
        bad = ~np.isfinite(series.values)
        if bad.any() and (name == "train/loss" or np.isfinite(series.values[:1]).all()):
            step = series.first_step(bad)
            diverged = _diverged(case, step)
            if diverged:
                yield Finding(
                    "exploding_gradients", diverged[0], f"train/grad_norm grows to {diverged[1]:.3g}, until {name} is {series.values[bad][0]:g}", 0.7,
                    _advice(case, "Clip gradients, and lower the rate"), taken_out(case) or {"trainer": {"gradient_clip_val": 1.0}},
                )  # fmt: skip
            yield Finding(
                "non_finite", step, f"{name} is {series.values[bad][0]:g}", 0.62 if diverged else 0.97,
                "Drop such steps, or go back before them; NonFiniteGuard names the module",
                taken_out(case) or (guard_remedy(case, step) if step > 1 else {}),
            )  # fmt: skip
            return


def _diverged(case: Case, step: int) -> tuple[int, float] | None:
    """Returns since when gradients grew before a step, and the largest one; None: they did not, in several steps and a hundredfold."""
    norms = case.series("train/grad_norm").up_to(step - 1)
    norms = Series(*(one[np.isfinite(norms.values)] for one in norms))
    if len(norms) < 3 or not norms.values[-1] > 100 * (usual := float(np.median(norms.values[:4]))):
        return None
    large = norms.values > 3 * usual
    return (norms.first_step(large), float(norms.values.max())) if large[-2:].all() else None


def _underflown(case: Case) -> np.ndarray:
    """Returns the steps in which many gradients are zero that are not; small ones, so that the direction stays, or most."""
    lost, cosine = case.series("doctor/gradients_lost"), case.series("doctor/gradient_cosine")
    turned = np.isin(lost.steps, cosine.steps[cosine.values < 0.8])
    steps: np.ndarray = lost.steps[(lost.values > 0.05) & (~turned | (lost.values > 0.5))]
    return steps


def underflow(case: Case) -> Iterator[Finding]:
    """Many gradients are zero that the loss does not make zero."""
    lost, steps = case.series("doctor/gradients_lost"), _underflown(case)
    if len(steps):
        scale = case.option("trainer.precision")
        scaled = [item for item in case.option("trainer.plugins", []) or [] if "FP16Mixed" in str(item)]
        remedy = (
            {"trainer": {"plugins": {"FP16Mixed": {"init_scale": 65536.0, "growth_interval": 2000}}}}
            if scaled
            else {}
        )
        yield Finding(
            "fp16_underflow", int(steps[0]), f"{lost.values[lost.steps == steps[-1]][0]:.0%} of the gradients are zero that are not, "
            f"computed again (precision {scale or '32-true'})", 0.95,
            "Scale the loss as FP16Mixed does, or train in bf16-mixed", remedy or taken_out(case),
        )  # fmt: skip


def unlike_the_loss(case: Case) -> Iterator[Finding]:
    """Gradients differ from those of the loss in length or direction."""
    ratio, cosine = case.series("doctor/gradient_ratio"), case.series("doctor/gradient_cosine")
    if not len(ratio) or len(_underflown(case)):
        return
    if cut := case.worst("doctor/gradients_cut", 0.1):
        yield Finding(
            "clip_too_low", cut[0], f"{cut[1]:.0%} of the gradients have the same absolute value: each is clipped by itself", 0.94,
            _advice(case, "Clip the norm, at 1.0"),
            {"trainer": {"gradient_clip_algorithm": "norm", "gradient_clip_val": 1.0}},
        )  # fmt: skip
        return
    if (cosine.values < 0.9).any():
        yield _turned(case)
    elif ((ratio.values > 1.5) | (ratio.values < 0.67)).any():
        yield _of_another_length(case)


def _turned(case: Case) -> Finding:
    """Returns why gradients point elsewhere than those of the loss."""
    cosine = case.series("doctor/gradient_cosine")
    turned = cosine.values < 0.9
    since, worst = cosine.first_step(turned), float(cosine.values[turned].min())
    of_weights = case.series("doctor/gradient_of_weights").since(since).values
    if len(of_weights) and float(np.median(of_weights)) > 0.9:
        return Finding(
            "weight_decay_too_large", since, f"a decay of the weights is added to gradients, and turns them (cosine {worst:.2f})",
            0.945, _advice(case, "Decay weights in the optimizer alone"), taken_out(case),
        )  # fmt: skip
    signs = case.series("doctor/gradient_signs").since(since).values
    if len(signs) and float(np.median(signs)) > 0.98:
        return Finding(
            "fp16_underflow", since, f"{np.median(signs):.1%} of the gradients have the signs of those of the loss, and other sizes (cosine "
            f"{worst:.2f}): something rounds them", 0.93, _advice(case, "Send and keep gradients in float32"), taken_out(case),
        )  # fmt: skip
    for part, cause, what in (
        ("last_batch", "batch_too_small", "the last micro-batch"),
        ("own_rank", "ranks_differ", "this rank"),
    ):
        like = case.series(f"doctor/gradient_like_{part}").values
        if len(like) and float(np.median(like)) > 0.995:
            return Finding(
                cause, since, f"the gradients of a step are those of {what} alone", 0.945,
                _advice(case, "Average gradients over all micro-batches and ranks"), taken_out(case),
            )  # fmt: skip
    return Finding(
        "stale_gradients", since, f"the gradients of a step point elsewhere than those of its loss "
        f"(cosine {worst:.2f}), as if earlier ones were kept", 0.93,
        _advice(case, "Zero gradients before each step"), taken_out(case),
    )  # fmt: skip


def _of_another_length(case: Case) -> Finding:
    """Returns why gradients are longer or shorter than those of the loss."""
    ratio, norms = case.series("doctor/gradient_ratio"), case.series("doctor/gradient_norm")
    wrong = (ratio.values > 1.5) | (ratio.values < 0.67)
    since, given = ratio.first_step(wrong), norms.values[wrong[: len(norms)]]
    if (
        len(given) >= 3
        and given.max() < 1.02 * given.min()
        and not 0.98 < given[0] / case.number("trainer.gradient_clip_val", 0.0) < 1.02
    ):
        return Finding(
            "clip_too_low", since, f"the optimizer gets gradients of norm {given[0]:.2g} in all steps, "
            f"{np.median(ratio.values[wrong]):.2g} of the loss's", 0.9, _advice(case, "Clip at 1.0"),
            taken_out(case) or {"trainer": {"gradient_clip_val": 1.0}},
        )  # fmt: skip
    early = ratio.values[: GROWING + 1]
    if len(early) > GROWING and 0.9 < early[0] < 1.1 and (early[1:] > 1.2 * early[:-1]).all():
        return Finding(
            "stale_gradients", since, f"gradients are {early[1]:.3g}, {early[2]:.3g} and {early[3]:.3g} times those of the loss: earlier ones add "
            "up", 0.93, _advice(case, "Zero gradients before each step"), taken_out(case),
        )  # fmt: skip
    accumulated = case.number("trainer.accumulate_grad_batches", 1)
    return Finding(
        "gradient_scale", since, f"gradients are {np.median(ratio.values[wrong]):.3g} times those of the "
        f"mean loss ({accumulated:.0f} micro-batches)", 0.9,
        _advice(case, "Average gradients over micro-batches and ranks once"), taken_out(case),
    )  # fmt: skip


GROWING = 3
"""Examined steps in a row in which what adds up grows."""


def loss_scale(case: Case) -> Iterator[Finding]:
    """The logged loss is a multiple of what the same batches have, computed again."""
    # the loss without what an objective adds to it in training
    name = "train/task_loss" if len(case.series("train/task_loss")) else "train/loss"
    steps, plain, loss = case.together("doctor/plain_loss", name)
    times = loss / np.maximum(plain, 1e-9)
    if len(times) >= 2 and np.isfinite(times).all() and times.min() > 1.5 and times.max() < 1.5 * times.min():
        yield Finding(
            "gradient_scale", int(steps[0]), f"the loss that is trained on is {np.median(times):.3g} times that of its batches", 0.91,
            _advice(case, "Average the loss over tokens and micro-batches once"),
            taken_out(case) or {"model": {"objective": {"class_path": "CausalLM"}}},
        )  # fmt: skip


def low_precision(case: Case) -> Iterator[Finding]:
    """Weights take few values, though their type could hold many."""
    found = case.worst("doctor/weights_coarse", 0.5)
    if (
        found
        and "16" not in str(case.option("trainer.precision", "32"))
        and not case.last("doctor/frozen") > 0
    ):
        yield Finding(
            "low_precision_weights", found[0], f"{found[1]:.0%} of the weights are rounded to few values or digits", 0.945,
            _advice(case, "Keep weights in float32"), taken_out(case),
        )  # fmt: skip


def past_autocast(case: Case) -> Iterator[Finding]:
    """Most matrices are multiplied in float32, though the precision is a mixed one."""
    if found := case.worst("doctor/past_autocast", 0.5):
        yield Finding(
            "autocast_ignored", found[0], f"{found[1]:.0%} of the matrices are multiplied in float32, with precision "
            f"{case.option('trainer.precision')}", 0.85, _advice(case, "Look for what leaves autocast"), taken_out(case),
        )  # fmt: skip


def rounded(case: Case) -> Iterator[Finding]:
    """Gradients are those of the loss to a few digits alone, though all is computed in float32."""
    cosine, ratio = case.series("doctor/gradient_cosine"), case.series("doctor/gradient_ratio")
    rough = (cosine.values < 0.9995) & (cosine.values > 0.9)
    if (
        rough.sum() >= 2
        and "32" in str(case.option("trainer.precision", "32"))
        and (np.abs(ratio.values - 1) < 0.3).all()
    ):
        yield Finding(
            "fp16_underflow", cosine.first_step(rough), f"gradients point to {cosine.values[rough].min():.4f} where those of the loss do: "
            "something rounds them", 0.8, _advice(case, "Scale the loss as FP16Mixed does, or train in bf16-mixed"),
            taken_out(case),
        )  # fmt: skip


def weights_not_updated(case: Case) -> Iterator[Finding]:
    """Weights with a gradient stay as they are, in two examined steps in a row, though the rate is not 0."""
    steps, share, rate = case.together("doctor/weights_unchanged", "train/lr")
    tensors = case.series("doctor/tensors_unchanged")
    many = np.isin(steps, tensors.steps[tensors.values > 0.1])  # norms and biases are few weights
    moves = rate > 1e-4 * rate.max(initial=0.0)  # else updates are below the precision of the weights
    steps, share, bad = (one[moves] for one in (steps, share, (share > 0.02) | many))
    both = np.flatnonzero(bad[:-1] & bad[1:])
    restored = case.series("doctor/restored_outside")
    back = case.worst("doctor/restored_outside", 0.05 if (restored.values > 0.01).sum() < 2 else 0.01)
    own = suspects(case) or not is_known(case.class_path("model.optimizer"))
    if own and (missing := case.last("doctor/not_optimized")) > 0:
        yield Finding(
            "weights_not_updated", 1, f"{missing:.1%} of the weights that are trained are not in the optimizer", 0.95,
            _advice(case, "Give the optimizer all parameters"), taken_out(case),
        )  # fmt: skip
    elif none := case.worst("doctor/gradients_missing", 0.02):
        yield Finding(
            "weights_not_updated", none[0], f"the optimizer is given no gradient for {none[1]:.1%} of the weights, which the loss has", 0.95,
            _advice(case, "Give the optimizer all gradients"), taken_out(case),
        )  # fmt: skip
    elif back:
        yield Finding(
            "weights_not_updated", back[0], f"after a step {back[1]:.0%} of the tensors get back the values that they had before it",
            0.94, _advice(case, "Look for what writes weights"), taken_out(case),
        )  # fmt: skip
    elif len(both):
        rounds = "16-true" in str(case.option("trainer.precision", ""))
        yield Finding(
            "low_precision_weights" if rounds else "weights_not_updated", int(steps[both[0]]),
            f"{share[both[0] + 1]:.1%} of the weights have a gradient and do not change",
            0.94, _advice(case, "Keep weights in float32" if rounds else "Give the optimizer all parameters"),
            {"trainer": {"precision": "bf16-mixed"}} if rounds else taken_out(case),
        )  # fmt: skip


def frozen(case: Case) -> Iterator[Finding]:
    """Weights are not trained, without an adapter over weights that were read, or get no gradient."""
    names = [str(item.get("class_path", "")) for item in case.callbacks()]
    adapters = [name for name in names if name.rpartition(".")[2] in ADAPTERS or "adapters" in name]
    reads = not is_known(case.class_path("model.network"))  # it may read weights by itself
    said = adapters and (case.has_weights or reads)
    found, nothing = case.worst("doctor/frozen", 0.0), case.series("doctor/without_gradient")
    always = (
        len(nothing) >= 2 and float(nothing.values.min()) > 0
    )  # what is dropped at random has one in other steps
    without = (int(nothing.steps[0]), float(nothing.values.min())) if always else None
    if found and not said:
        what = "they were not read from a trained run" if adapters else "no adapter is selected"
        remedy = {"trainer": {"callbacks": dict.fromkeys(adapters)}} if adapters else taken_out(case)
        yield Finding(
            "frozen_weights", found[0], f"{found[1]:.1%} of the weights are not trained, and {what}", 0.9,
            f"Leave out {' and '.join(adapters)}, or set model.weights" if adapters else _advice(case, "Set requires_grad"), remedy,
        )  # fmt: skip
    elif without and not said:
        yield Finding(
            "frozen_weights", without[0], f"the loss gives {without[1]:.1%} of the weights no gradient", 0.84,
            _advice(case, "Look for detach() and no_grad() in the network"), taken_out(case),
        )  # fmt: skip


ADAPTERS = ("BottleneckAdapter", "Freeze", "IA3", "LoRA", "PTuning", "PrefixTuning", "PromptTuning")


def by_depth(case: Case) -> Iterator[Finding]:
    """Gradients grow or fade on their way down through the blocks, which add to what they get and hand its gradient on.

    Of small initial weights it stays nearly the same. Those that have been trained may change it a hundredfold: a norm divides
    gradients by the size of its input, and embeddings of N(0, 0.02) are small.
    """
    larger = case.last("doctor/initial_size") > 1.5  # than configured: `initial_weights` says so
    # in each block: without norms, or with larger branches
    if found := case.worst("doctor/initial_gain_through", 100.0):
        yield Finding(
            "exploding_gradients", found[0], f"before the first step the gradient of hidden states grows in each block, by {found[1]:.3g} "
            "times and more on its way down through all", 0.865 if larger else 0.952, _advice(case, "Take pre-norm blocks, and clip gradients"),
            taken_out(case) or {"trainer": {"gradient_clip_val": 1.0}},
        )  # fmt: skip
        return
    for name, limit, above, cause in (
        ("doctor/initial_gain_most", 8.0, True, "exploding_gradients"),
        ("doctor/initial_gain_least", 0.4, False, "vanishing_gradients"),
        ("doctor/gain_most", 1000.0, True, "exploding_gradients"),
        ("doctor/gain_least", 0.02, False, "vanishing_gradients"),
    ):
        if found := case.worst(name, limit, above):
            if found[1] <= LOST and case.worst("doctor/without_gradient", 0.0):
                continue  # detached: `frozen` says so
            confidence = (0.865 if larger and above else 0.875) if "initial" in name else 0.7
            if "initial_gain_least" in name and LOST < found[1] < 0.01:
                confidence = 0.958  # all else follows from that
            yield Finding(
                cause, found[0], f"the gradient of hidden states changes by a factor of {found[1]:.3g} on its way down through a "
                "block", confidence, _advice(case, "Take pre-norm blocks, and clip gradients"),
                taken_out(case) or {"trainer": {"gradient_clip_val": 1.0}},
            )  # fmt: skip
            return


LOST = 1e-12
"""A gain of a gradient that was not handed on at all, but cut off."""


def dead_block(case: Case) -> Iterator[Finding]:
    """A block has no gradient, adds nothing in any look, or is not run."""
    if (idle := case.last("doctor/initial_blocks_idle")) > 0:
        yield Finding(
            "dead_block", 1, f"{idle:.0f} of the network's blocks are not run", 0.965,
            _advice(case, "Run them all"), taken_out(case),
        )  # fmt: skip
        return
    adds = case.series("doctor/block_adds")
    if len(adds) >= 3 and (adds.values < NOTHING).all():
        yield Finding(
            "dead_block", 1, f"a block has added nothing to what it is given, or the same to all tokens, until step {adds.steps[-1]}", 0.966,
            _advice(case, "Begin with either gates or projections of zeros, not with both"), taken_out(case),
        )  # fmt: skip
        return
    zeros = case.last("doctor/blocks_of_zeros")
    if zeros > 0:
        yield Finding(
            "dead_block", 1, f"{zeros:.0f} blocks have matrices of zeros alone", 0.93,
            _advice(case, "Initialise its weights"), taken_out(case),
        )  # fmt: skip
        return
    blocks = case.blocks("gradient_norm")
    if len(blocks) < 2 or len(blocks[0]) < 2 or case.last("doctor/frozen") > 0:
        return
    count = min(4, *map(len, blocks))
    norms = np.array([np.nan_to_num(block.values[:count], posinf=0.0) for block in blocks])
    dead = (norms < DEAD * norms.max(0)).all(1)
    if dead.any():
        index = int(np.argmax(dead))
        yield Finding(
            "dead_block", int(blocks[index].steps[0]), f"block {index} has gradients below {DEAD:g} of those of others", 0.89,
            _advice(case, "Initialise its weights"), taken_out(case),
        )  # fmt: skip


NOTHING = 1e-6
"""Of what a block is given, rounding of float32."""

DEAD = 1e-8
"""Gradients that are no longer small, but none."""

RULES: tuple[Rule, ...] = (
    non_finite, underflow,
    rounded, past_autocast,
    loss_scale,
    low_precision, unlike_the_loss, weights_not_updated, frozen, by_depth, dead_block,
)  # fmt: skip
