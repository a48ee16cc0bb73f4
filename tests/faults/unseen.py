"""Faults that were written without knowledge of the rules: what they say of these is a blind test, once.

Each cause has other mechanisms, places, strengths or times here than in the catalogue. Some happen over two ranks, or when a run
is resumed. They are what people report of their runs: masks off by one, a tied head that a copy replaced, a schedule
that every rank steps, a checkpoint of which something is not loaded.

Causes that the catalogue has no word for:

- `batch_too_small`: the batch is far below the gradient noise scale.
- `checkpoint_stall`: training waits for checkpoints.
- `communication_bound`: training waits for collectives, on all ranks alike.
- `straggler`: one rank keeps the others waiting.
- `ranks_differ`: the ranks' weights are not the same.
- `low_precision_weights`: weights have too few bits for their updates.
- `average_wrong`: the averaged weights are not the average of the weights, or take their place.
- `data_restarted`, `schedule_restarted`, `weights_not_restored`: what a resumed run did not take from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.faults.catalogue import DOCUMENTS, Fault, everywhere, packing, schedule, source, trainer
from tests.faults.recipes import (
    INTERRUPTED,
    OBJECTIVES,
    OPTIMIZERS,
    RANKS,
    RECIPES,
    RESUMED,
)

Overlays = dict[str, dict[str, Any]]

MIDDLE = 17
"""The step in which most faults begin that strike in the middle of a run."""

AFTER_RESUME = INTERRUPTED + 1


def part(name: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    """Returns a callback of the broken parts, for some recipes."""
    item = {"class_path": f"tests.faults.broken_{name}", "init_args": arguments}
    return everywhere({"trainer": {"callbacks+": [item]}}, only)


def wired(bug: str, amount: float = 1.0, only: tuple[str, ...] = RECIPES, **more: Any) -> Overlays:
    return part("parts.Rewired", only, bug=bug, amount=amount, **more)


def changing(bug: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return part("parts.Changing", only, bug=bug, **arguments)


def batches(bug: str, amount: float = 1.0, only: tuple[str, ...] = RECIPES) -> Overlays:
    return packing(bug, amount, only, "broken_batches.AlteredBatches")


def varied(variant: str, *overlays: Overlays) -> Overlays:
    """Returns overlays for the variants of their recipes, put together."""
    return {f"{name}-{variant}": together(*(each[name] for each in overlays)) for name in overlays[0]}


def together(*overlays: dict[str, Any]) -> dict[str, Any]:
    """Returns one overlay for several, with their `+` as it is."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(key for one in overlays for key in one):
        values = [one[name] for one in overlays if name in one]
        found[name] = together(*values) if isinstance(values[0], dict) else values[-1]
    return found


def on_ranks(bug: str, *more: Overlays, **arguments: Any) -> Overlays:
    return varied(RANKS, part("loops.Ranks", bug=bug, **arguments), *more)


def options_of(*patterns: str, only: tuple[str, ...] = RECIPES, **options: Any) -> Overlays:
    return everywhere({"model": {"parameter_options": dict.fromkeys(patterns, options)}}, only)


def of_ends(**options: Any) -> Overlays:
    """Returns options of embedding and head, which are one weight but for `moe`."""
    untied = options_of("*embed_tokens*", "*lm_head*", only=("moe",), **options)
    return options_of("*embed_tokens*", **options) | untied


def rates(factor: float) -> dict[str, float]:
    return {name: OPTIMIZERS[name]["init_args"]["lr"] * factor for name in RECIPES}


def rate_of(chosen: Callable[..., Overlays], factor: float) -> Overlays:
    return {name: chosen(lr=rate)[name] for name, rate in rates(factor).items()}


def no_schedule(factor: float) -> Overlays:
    return {
        name: {"model": {"optimizer": {"init_args": {"lr": rate}}, "lr_scheduler": None}}
        for name, rate in rates(factor).items()
    }


def unscaled(parts: int) -> Overlays:
    path = "tests.faults.broken_parts.UnscaledSum"
    return {
        name: {
            "model": {
                "objective": {
                    "class_path": path,
                    "init_args": {"objective": OBJECTIVES[name], "parts": parts},
                }
            },
            **accumulated(parts)[name],
        }
        for name in RECIPES
    }


def accumulated(parts: int, ranks: int = 1) -> Overlays:
    """Returns what keeps the global batch, in so many micro-batches."""
    overlay = {"data": {"init_args": {"batch_size": 8 // parts // ranks}}}
    return everywhere(overlay | {"trainer": {"accumulate_grad_batches": parts}})


def saving(every: int, milliseconds: float) -> Overlays:
    own = {"every_n_steps": every, "dirpath": "${run_folder}/checkpoints"}
    callbacks = [
        {"class_path": "PeriodicCheckpoint", "init_args": own},
        {
            "class_path": "tests.faults.broken.Stalls",
            "init_args": {"every": every, "milliseconds": milliseconds},
        },
    ]
    plugins = [{"class_path": "AtomicCheckpoint"}]
    return trainer(**{"callbacks+": callbacks, "plugins": plugins, "enable_checkpointing": True})


def small_batch(rows: int) -> Overlays:
    monitor = {"class_path": "GradientNoiseScale", "init_args": {"every_n_steps": 2}}
    overlay = {
        "trainer": {"callbacks+": [monitor], "accumulate_grad_batches": rows},
        "data": {"init_args": {"batch_size": 1}},
    }
    return everywhere(overlay)


def technique(name: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return everywhere({"trainer": {"callbacks+": [{"class_path": name, "init_args": arguments}]}}, only)


RATE_AND_OPTIMIZER: tuple[tuple[Any, ...], ...] = (
    (
        "rate raised forty times in the middle",
        "rate_too_high",
        technique("tests.faults.broken.Optimizing", bug="rate", amount=40.0, first=MIDDLE),
        MIDDLE,
    ),
    (
        "attention has 60 times the rate",
        "rate_too_high",
        rate_of(lambda **own: options_of("*attention*proj*", **own), 60),
    ),
    (
        "embedding and head have a 300th of the rate",
        "rate_too_low",
        rate_of(of_ends, 1 / 300),
    ),
    ("no schedule, eight times the rate", "no_warmup", no_schedule(8)),
    (
        "each rank steps the schedule",
        "schedule_ends_early",
        varied(RANKS, part("loops.Scheduling", bug="often", times=2), schedule(min_lr_ratio=0.0)),
    ),
    (
        "schedule is stepped once in 24 steps",
        "warmup_too_long",
        part("loops.Scheduling", bug="seldom", times=24),
    ),
    (
        "epsilon 1 for embedding and head",
        "epsilon_too_large",
        of_ends(eps=1.0),
    ),
    ("norms decay", "weight_decay_too_large", options_of("*norm*", weight_decay=60.0)),
    (
        "gradients clipped value by value",
        "clip_too_low",
        trainer(gradient_clip_algorithm="value", gradient_clip_val=1e-9),
    ),
    (
        "resumed without the optimizer's state",
        "optimizer_state_lost",
        varied(RESUMED, part("loops.Resumed", bug="optimizer")),
        AFTER_RESUME,
    ),
    (
        "second moments become zero once",
        "spike_by_optimizer",
        part("loops.Stepping", bug="second_moment", amount=0.0, first=MIDDLE, last=MIDDLE),
        MIDDLE,
    ),
)

GRADIENTS: tuple[tuple[Any, ...], ...] = (
    ("loss not divided by eight micro-batches", "gradient_scale", unscaled(8)),
    (
        "gradients summed over ranks and micro-batches",
        "gradient_scale",
        on_ranks("summed", accumulated(4, 2), amount=4.0),
    ),
    (
        "gradients zeroed in every sixth step",
        "stale_gradients",
        part("loops.Stepping", bug="zeroed_seldom", amount=6),
    ),
    ("hidden states' gradients in fp16", "fp16_underflow", wired("half_backward", 1e-4)),
    ("weights in eight bits", "low_precision_weights", changing("rounded")),
    ("a row that attends to nothing", "non_finite", wired("nan_row", first=MIDDLE), MIDDLE),
    ("a backward pass that grows", "exploding_gradients", wired("growing_gradient", 1.7, first=12), 12),
    ("a soft cap far too low", "vanishing_gradients", wired("hard_cap", 1e-3)),
    ("blocks frozen in the middle", "frozen_weights", changing("frozen", first=MIDDLE), MIDDLE),
    (
        "MLPs replaced after the optimizer was built",
        "weights_not_updated",
        wired("new_parameters", only=("gpt", "llama")),
    ),
    ("head no longer tied, and not trained", "weights_not_updated", wired("untied")),
)

NETWORK: tuple[tuple[Any, ...], ...] = (
    ("output weights of deviation one", "bad_initialisation", wired("loud_head")),
    ("all units of a layer alike", "bad_initialisation", wired("same_units", only=("gpt", "llama"))),
    ("last block left out", "dead_block", wired("skipped_block")),
    (
        "units die in the middle",
        "dead_units",
        changing("dead_units", ("gpt",), amount=20.0, first=MIDDLE, last=MIDDLE),
        MIDDLE,
    ),
    ("scores multiplied by the width", "attention_collapse", wired("wrong_scale", 64.0, ("moe",))),
    ("output weights grow", "logit_growth", changing("louder_head", amount=1.1, first=8), 8),
    (
        "balancing loss with the wrong sign",
        "dead_experts",
        part("parts.RewardedImbalance", ("moe",), coefficient=0.3),
    ),
    ("mask off by one", "sees_future", wired("attends_to_next")),
    ("a convolution over both sides", "sees_future", wired("sees_both_sides", 0.5)),
    (
        "blocks left out far too often",
        "dropout_too_high",
        technique("StochasticDepth", ("gpt", "llama"), rate=0.95),
    ),
    (
        "an average of something else",
        "average_wrong",
        part("parts.StuckAverage", decay=0.9),
    ),
    (
        "averaged weights stay in after validation",
        "average_wrong",
        part("parts.AverageLeftIn", decay=0.97),
        13,
    ),
)

DATA: tuple[tuple[Any, ...], ...] = (
    ("labels are the tokens before", "labels_shifted", batches("previous")),
    ("labels shifted again in training", "labels_shifted", batches("shifted_again")),
    ("only one row has labels", "few_labels", batches("empty_rows", 1 / 8)),
    ("each batch six times", "duplicates", batches("again", 6)),
    ("all ranks read the same", "duplicates", varied(RANKS, batches("same_on_ranks"))),
    ("a shuffle buffer of three batches", "not_shuffled", batches("small_buffer", 3)),
    ("training text of another tokenizer", "tokenizer_mismatch", batches("old_tokenizer")),
    ("every second row of a newer tokenizer", "tokenizer_mismatch", batches("newer_rows")),
    ("every second document sees the one before", "mask_leak", batches("pairs", only=DOCUMENTS)),
    ("positions begin anew in chunks", "position_ids", batches("chunks")),
    ("training reads validation text", "validation_leak", batches("rows_of_validation", 0.75)),
    (
        "a damaged shard",
        "spike_by_data",
        part("batches.DamagedShard", first=MIDDLE, last=MIDDLE + 3, rows=6),
        MIDDLE,
    ),
    ("twelve documents over and over", "over_fitting", source("topics-12")),
    ("a batch of two rows", "batch_too_small", small_batch(2)),
    (
        "resumed with the first rows",
        "data_restarted",
        varied(RESUMED, batches("from_the_start")),
        AFTER_RESUME,
    ),
)

SPEED_AND_RANKS: tuple[tuple[Any, ...], ...] = (
    ("reading ever slower", "data_bound", part("batches.Preprocessing", milliseconds=1.5)),
    ("a checkpoint in every third step", "checkpoint_stall", saving(3, 150)),
    ("one rank slow", "straggler", on_ranks("slow", amount=30.0)),
    ("one rank slow at times", "straggler", on_ranks("slow", amount=120.0, every=3)),
    ("padded buckets", "communication_bound", on_ranks("padded", amount=48)),
    ("gradients not reduced", "ranks_differ", on_ranks("not_reduced")),
    ("one rank skips steps", "ranks_differ", on_ranks("skips", every=4), 4),
)

RESUMING: tuple[tuple[Any, ...], ...] = (
    (
        "resumed at the start of the schedule",
        "schedule_restarted",
        varied(RESUMED, part("loops.Resumed", bug="schedule")),
        AFTER_RESUME,
    ),
    (
        "resumed without the weights",
        "weights_not_restored",
        varied(RESUMED, part("loops.Resumed", bug="weights")),
        AFTER_RESUME,
    ),
)

UNSEEN: tuple[Fault, ...] = tuple(
    Fault(name, cause, True, overlays, *onset)
    for name, cause, overlays, *onset in (
        *RATE_AND_OPTIMIZER,
        *GRADIENTS,
        *NETWORK,
        *DATA,
        *SPEED_AND_RANKS,
        *RESUMING,
    )
)
