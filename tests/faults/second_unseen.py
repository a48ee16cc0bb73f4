"""A second set of faults that were written without knowledge of the rules, each of a mechanism that the others do not have.

They are what users report of their runs in pre-training and fine-tuning: a schedule of epochs that is stepped after each batch,
a loss that is divided twice, prompts and answers mixed up in a mask, a prefix that has labels, moments of
other weights after a resume. The causes are those of `catalogue` and `unseen`.
"""

from __future__ import annotations

from typing import Any

from tests.faults.catalogue import DOCUMENTS, Fault, everywhere, packing
from tests.faults.recipes import OBJECTIVES, OPTIMIZERS, RANKS, RECIPES, RESUMED
from tests.faults.unseen import AFTER_RESUME, Overlays, options_of, part, small_batch, together, varied

LATER = 18
"""The step in which most faults begin that strike in the middle of a run."""

STREAMS = ("gpt", "moe")
"""Recipes whose rows are cut from one stream."""


def rows(bug: str, amount: float = 1.0, only: tuple[str, ...] = RECIPES) -> Overlays:
    return packing(bug, amount, only, "broken_rows.AlteredRows")


def misbuilt(bug: str, amount: float = 1.0, only: tuple[str, ...] = RECIPES) -> Overlays:
    return part("models.Misbuilt", only, bug=bug, amount=amount)


def schedule_of(path: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return everywhere({"model": {"lr_scheduler": {"class_path": path, "init_args": arguments}}}, only)


def decaying() -> Overlays:
    """Returns the recipes' optimizers, each with a decay that is not multiplied by the rate."""
    found = {}
    for name, own in OPTIMIZERS.items():
        path = f"tests.faults.broken_steps.Decaying{own['class_path']}"
        optimizer = {"class_path": path, "init_args": own["init_args"]}
        found[name] = {"model": {"optimizer": optimizer}}
    return found


def mean_by_hand(twice: bool) -> Overlays:
    path = "tests.faults.broken_models.MeanByHand"
    found = {}
    for name in RECIPES:
        arguments = {"objective": OBJECTIVES[name], "twice": twice}
        found[name] = {"model": {"objective": {"class_path": path, "init_args": arguments}}}
    return found


def both(first: Overlays, second: Overlays) -> Overlays:
    return {name: together(first[name], second[name]) for name in first}


def on_ranks(bug: str, amount: float = 1.0) -> Overlays:
    return varied(RANKS, part("steps.AcrossRanks", bug=bug, amount=amount))


def last_micro_batch_alone() -> Overlays:
    found = {}
    for name, overlay in small_batch(8).items():
        callbacks = [
            *overlay["trainer"]["callbacks+"],
            {"class_path": "tests.faults.broken_steps.OnlyTheLast"},
        ]
        found[name] = overlay | {"trainer": overlay["trainer"] | {"callbacks+": callbacks}}
    return found


SECOND_UNSEEN: tuple[Fault, ...] = (
    # learning rate, schedule and optimizer
    Fault("rate compounds", "rate_too_high", True, part("steps.Compounding", factor=1.15)),
    Fault(
        "inverse square root without its warm-up",
        "no_warmup",
        True,
        schedule_of("tests.faults.broken_steps.InverseSquareRoot", STREAMS, first=20.0),
    ),
    Fault(
        "exponential decay stepped by batch",
        "schedule_ends_early",
        True,
        schedule_of("torch.optim.lr_scheduler.ExponentialLR", gamma=0.75),
    ),
    Fault("decay that is not multiplied by the rate", "weight_decay_too_large", True, decaying()),
    Fault(
        "each gradient clipped to its weight",
        "clip_too_low",
        True,
        part("steps.ClippedOneByOne", share=1e-10),
    ),
    Fault(
        "resumed with the moments of other weights",
        "optimizer_state_lost",
        True,
        varied(RESUMED, part("steps.ResumedWrongly", bug="moments")),
        AFTER_RESUME,
    ),
    Fault(
        "a step made forty times over",
        "spike_by_optimizer",
        True,
        part("steps.Repeated", times=40, first=LATER, last=LATER),
        LATER,
    ),
    # gradients
    Fault("loss divided by its tokens twice", "gradient_scale", True, mean_by_hand(twice=True)),
    Fault("gradients of four steps before", "stale_gradients", True, part("steps.Delayed", steps=4)),
    Fault("gradients sent in fp16", "fp16_underflow", True, on_ranks("half_sent", 1e-5)),
    Fault(
        "a batch without a label",
        "non_finite",
        True,
        both(mean_by_hand(twice=False), part("models.NoLabels", first=LATER, last=LATER)),
        LATER,
    ),
    Fault("a skip path that fades", "vanishing_gradients", True, misbuilt("fading_skip", 1e-6)),
    Fault(
        "first block without gradients",
        "frozen_weights",
        True,
        misbuilt("without_gradient"),
        also=("weights_not_updated",),
    ),
    Fault("MLPs in a group of rate zero", "weights_not_updated", True, options_of("*mlp*", lr=0.0)),
    # network
    Fault("norms begin at zero", "bad_initialisation", True, misbuilt("norms_at_zero")),
    Fault("first block scaled to next to nothing", "dead_block", True, misbuilt("small_branches", 1e-6)),
    Fault(
        "a ReLU that begins too far to the right",
        "dead_units",
        True,
        misbuilt("shifted_relu", 8.0, ("gpt", "llama")),
    ),
    Fault(
        "slopes so steep that a token sees itself", "attention_collapse", True, misbuilt("steep_slopes", 30)
    ),
    Fault("z-loss with the wrong sign", "logit_growth", True, part("models.RewardedLogits", coefficient=0.1)),
    Fault(
        "balancing bias with the wrong sign", "dead_experts", True, misbuilt("biased_choice", 0.05, ("moe",))
    ),
    Fault("a prefix that has labels", "sees_future", True, rows("labelled_prefix", 0.75)),
    Fault("most tokens dropped", "dropout_too_high", True, misbuilt("dropped_tokens", 0.7)),
    Fault(
        "an average that keeps the first weights",
        "average_wrong",
        True,
        part("models.AverageWithoutStart", decay=0.999),
    ),
    # data
    Fault("every second row shifted twice", "labels_shifted", True, rows("half_shifted")),
    Fault("labels on prompts alone", "few_labels", True, rows("prompts_alone", 2, DOCUMENTS)),
    Fault("windows that overlap", "duplicates", True, rows("windows", 2, STREAMS)),
    Fault("whole batches shuffled", "not_shuffled", True, rows("whole_batches", only=STREAMS)),
    Fault("validation text of another tokenizer", "tokenizer_mismatch", True, rows("other_in_validation")),
    Fault("documents begin eight tokens late", "mask_leak", True, rows("late_boundaries", 8, DOCUMENTS)),
    Fault("positions divided by four", "position_ids", True, rows("coarse_positions", 4)),
    Fault(
        "validation batches trained on",
        "validation_leak",
        True,
        part("steps.TrainsOnValidation", passes=3),
        13,
    ),
    Fault(
        "labels of other rows for three steps",
        "spike_by_data",
        True,
        part("rows.LabelsOfOthers", first=LATER, last=LATER + 2),
        LATER,
    ),
    Fault("a cache of three batches", "over_fitting", True, rows("small_cache"), also=("duplicates",)),
    Fault(
        "only the last micro-batch counts",
        "batch_too_small",
        True,
        last_micro_batch_alone(),
        also=("gradient_scale",),
    ),
    Fault(
        "resumed at half of the position",
        "data_restarted",
        True,
        varied(RESUMED, rows("half_the_position")),
        AFTER_RESUME,
    ),
    Fault(
        "resumed with weights of an earlier step",
        "weights_not_restored",
        True,
        varied(
            RESUMED, part("steps.ResumedWrongly", bug="older_weights", step=6, path="${run_folder}/older.pt")
        ),
        AFTER_RESUME,
    ),
    # speed and ranks
    Fault("rows found slowly", "data_bound", True, rows("found_slowly", 4)),
    Fault(
        "one rank reads slowly",
        "straggler",
        True,
        varied(RANKS, rows("one_rank_slow", 30)),
        also=("data_bound",),
    ),
    Fault("hidden states gathered in each step", "communication_bound", True, on_ranks("gathered", 32)),
    Fault("each rank begins with weights of its own", "ranks_differ", True, on_ranks("own_weights")),
)
