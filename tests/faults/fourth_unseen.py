"""A fourth set of faults: of each cause the way in which it most often comes about.

Chosen by someone who knew neither the rules of the diagnosis nor the other sets, from reports of users of training
frameworks: a value in a configuration, a mistake in a part that users write themselves, bad files, a bad resume.
"""

from __future__ import annotations

from typing import Any

from tests.faults.catalogue import DOCUMENTS, Fault, everywhere, rate, schedule, trainer
from tests.faults.recipes import INTERRUPTED, NETWORKS, OBJECTIVES, OPTIMIZERS, PACKINGS, RECIPES, STEPS
from tests.faults.running import composed

Overlays = dict[str, dict[str, Any]]

STEPS_FILE, NETWORKS_FILE, ROWS_FILE = (
    f"tests.faults.broken_fourth_{part}" for part in ("steps", "networks", "rows")
)
ADAMW = ("gpt", "moe")
"""Recipes of AdamW and a cosine."""
ON_RANKS = tuple(f"{name}-2-ranks" for name in RECIPES)
RESUMED = tuple(f"{name}-resumed" for name in RECIPES)


def base(name: str) -> str:
    """Returns the recipe of a variant."""
    return name.partition("-")[0]


def part(path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


def callback(path: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return everywhere({"trainer": {"callbacks+": [part(path, **arguments)]}}, only)


def rewritten(change: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return callback(f"{NETWORKS_FILE}.Rewritten", only, change=change, **arguments)


def own_optimizer(name: str, only: tuple[str, ...] = ADAMW, **arguments: Any) -> Overlays:
    """Returns an optimizer of the user's, with the rates of the recipes."""
    return {
        recipe: {
            "model": {
                "optimizer": part(
                    f"{STEPS_FILE}.{name}", lr=OPTIMIZERS[base(recipe)]["init_args"]["lr"], **arguments
                )
            }
        }
        for recipe in only
    }


def own_schedule(name: str, **arguments: Any) -> dict[str, Any]:
    return {"model": {"lr_scheduler": part(f"{STEPS_FILE}.{name}", **arguments)}}


def objective(name: str, only: tuple[str, ...] = RECIPES, wraps: bool = True, **arguments: Any) -> Overlays:
    """Returns an objective of the user's, around that of the recipes or, where it does not wrap, in the place of CausalLM."""
    own = part(f"{NETWORKS_FILE}.{name}", **arguments)
    found = {}
    for recipe in only:
        if wraps:
            chosen = part(own["class_path"], objective=OBJECTIVES[base(recipe)], **arguments)
        elif base(recipe) == "moe":
            chosen = {**OBJECTIVES["moe"], "init_args": {**OBJECTIVES["moe"]["init_args"], "objective": own}}
        else:
            chosen = own
        found[recipe] = {"model": {"objective": chosen}}
    return found


def packing(name: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return {
        recipe: {
            "data": {
                "init_args": {
                    "packing": part(f"{ROWS_FILE}.{name}", packing=PACKINGS[base(recipe)], **arguments)
                }
            }
        }
        for recipe in only
    }


def edited(edit: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return packing("Edited", only, edit=edit, **arguments)


def both(one: Overlays, other: Overlays) -> Overlays:
    """Returns two overlays of each recipe as one."""
    return {name: composed(one[name], other[name]) for name in one}


def data(only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return everywhere({"data": {"init_args": arguments}}, only)


def peaks(factor: float) -> dict[str, float]:
    return {name: OPTIMIZERS[name]["init_args"]["lr"] * factor for name in RECIPES}


def no_warmup() -> Overlays:
    """Returns a warm-up of 1% of the run, which is no step, at three times the rate."""
    values = {
        "model": {
            "optimizer": {"init_args": {"lr": peaks(3)["gpt"]}},
            "lr_scheduler": {"init_args": {"warmup_steps": 0.01}},
        }
    }
    return everywhere(values, ("gpt", "gpt-2-ranks"))


def factor_and_rate() -> Overlays:
    return {
        name: own_schedule("AbsoluteRates", peak=peak, warmup_steps=6, total_steps=STEPS)
        for name, peak in peaks(1).items()
    }


def standard_normal() -> Overlays:
    """Returns matrices at the ends of the network that begin as torch's embeddings do, N(0, 1)."""
    stds = {"llama": {"embed_tokens": 1.0}, "moe": {"lm_head": 1.0}}
    return {name: {"model": {"network": {"init_args": {"init_std": own}}}} for name, own in stds.items()}


def long_warmup() -> Overlays:
    found = schedule(ADAMW, warmup_steps=44)
    return found | schedule(("llama",), warmup_steps=44, decay_steps=4)


def fed_back_loads() -> Overlays:
    found = callback(f"{NETWORKS_FILE}.LoadFeedback", ("moe",), rate=0.02)
    found["moe"]["model"] = {"objective": {"init_args": {"load_balancing": 0.0}}}
    return found


FOURTH_UNSEEN: tuple[Fault, ...] = (
    # learning rate and schedule
    Fault("an exponent one too large", "rate_too_high", True, rate(10)),
    Fault(
        "the rate of a fine-tuning run",
        "rate_too_low",
        True,
        everywhere({"model": {"optimizer": {"init_args": {"lr": 2e-5}}}}),
    ),
    Fault("a schedule that returns the rate", "rate_too_low", True, factor_and_rate()),
    Fault("a hundredth of a short run as warm-up", "no_warmup", True, no_warmup()),
    Fault(
        "the schedule of a shorter run",
        "schedule_ends_early",
        True,
        schedule(total_steps=STEPS // 3, min_lr_ratio=0.0),
    ),
    Fault("the warm-up of a longer run", "warmup_too_long", True, long_warmup()),
    Fault(
        "a decay that begins with a division by almost 0",
        "spike_by_optimizer",
        True,
        everywhere(own_schedule("HyperbolicDecay", warmup_steps=6, decay_from=24)),
        onset=25,
    ),
    # optimizer and gradients
    Fault("epsilon and decay swapped", "epsilon_too_large", True, own_optimizer("PositionalAdamW")),
    Fault(
        "a decay without the rate",
        "weight_decay_too_large",
        True,
        own_optimizer("FullDecayAdamW", weight_decay=0.1),
    ),
    Fault("a clip as small as an epsilon", "clip_too_low", True, trainer(gradient_clip_val=2e-7)),
    Fault(
        "a checkpoint without moments",
        "optimizer_state_lost",
        True,
        callback(f"{STEPS_FILE}.SavesWeightsAlone", RESUMED),
        onset=INTERRUPTED + 1,
    ),
    Fault("a loss scale that stays", "gradient_scale", True, objective("ScaledLoss", scale=1024.0)),
    Fault(
        "a step at each accumulated micro-batch",
        "stale_gradients",
        True,
        own_optimizer("AccumulatingAdamW", (*ADAMW, "gpt-2-ranks"), every=4),
    ),
    Fault(
        "a loss scale that divides",
        "fp16_underflow",
        True,
        callback(f"{STEPS_FILE}.LossScale", scale=65536.0),
    ),
    Fault(
        "the mean of a row without labels",
        "non_finite",
        True,
        both(
            objective("RowMeans", (*RECIPES, "gpt-2-ranks"), wraps=False),
            edited("unlabelled_row", (*RECIPES, "gpt-2-ranks"), begin=20),
        ),
        onset=20,
    ),
    # network
    Fault("norms without the square root", "exploding_gradients", True, rewritten("norms_by_variance")),
    Fault("neither residuals nor norms", "vanishing_gradients", True, rewritten("plain_layers")),
    Fault("a leftover of fine-tuning", "frozen_weights", True, callback("Freeze", last_blocks=1)),
    Fault(
        "embeddings that are replaced after the optimizer is made",
        "weights_not_updated",
        True,
        callback(f"{NETWORKS_FILE}.NewEmbeddings"),
    ),
    Fault("matrices that begin as torch's embeddings", "bad_initialisation", True, standard_normal()),
    Fault("a gate that nothing trains", "dead_block", True, rewritten("gate_of_zero", block=1)),
    Fault("prior biases", "dead_units", True, rewritten("prior_biases", ("gpt",), value=-4.6)),
    Fault(
        "cosines over a low temperature",
        "attention_collapse",
        True,
        rewritten("cosine_scores", ("gpt", "llama"), temperature=0.01),
    ),
    Fault(
        "a z-loss with the wrong sign",
        "logit_growth",
        True,
        objective("RewardedNormaliser", coefficient=0.05),
    ),
    Fault("loads fed back with the wrong sign", "dead_experts", True, fed_back_loads()),
    Fault("an encoder's attention", "sees_future", True, rewritten("in_both_directions")),
    Fault("a kernel that takes no mask", "mask_leak", True, rewritten("causal_alone", DOCUMENTS)),
    Fault(
        "the share that is kept as dropout",
        "dropout_too_high",
        True,
        everywhere({"model": {"network": {"init_args": {"dropout": 0.9}}}}, ("gpt",)),
    ),
    # data
    Fault(
        "labels that are shifted twice",
        "labels_shifted",
        True,
        objective("ShiftedLoss", (*RECIPES, "llama-2-ranks")),
    ),
    Fault(
        "a template that most rows do not have",
        "few_labels",
        True,
        edited("after_template", training=False, token=260),
    ),
    Fault(
        "the first page each time",
        "duplicates",
        True,
        data(reader=part(f"{ROWS_FILE}.FirstPage", size=16, pages=60)),
    ),
    Fault("a sampler that does not know of ranks", "duplicates", True, packing("SameOnEachRank", ON_RANKS)),
    Fault("files in the order of their names", "not_shuffled", True, data(shuffle=False)),
    Fault(
        "shards of another tokenizer",
        "tokenizer_mismatch",
        True,
        edited("moved_ids", begin=20, by=8, vocabulary=NETWORKS["gpt"]["init_args"]["vocab_size"]),
        onset=20,
    ),
    Fault(
        "token types as positions", "position_ids", True, edited("types_as_positions", ADAMW, training=False)
    ),
    Fault(
        "a pattern that matches the validation file",
        "validation_leak",
        True,
        both(packing("AllFiles"), data(validation_fraction=0.004)),
    ),
    Fault(
        "a file in base64",
        "spike_by_data",
        True,
        edited("encoded_file", begin=25, end=27, vocabulary=NETWORKS["gpt"]["init_args"]["vocab_size"]),
        onset=25,
    ),
    Fault(
        "a few documents for many epochs",
        "over_fitting",
        True,
        data(source="FOLDER/topics-8.jsonl", validation_fraction=0.25, batch_size=24),
    ),
    Fault("a slow disk", "data_bound", True, packing("SlowDisk", seconds=0.006)),
    Fault(
        "a rank with a slow disk", "data_bound", True, packing("SlowDisk", ON_RANKS, seconds=0.015, rank=1)
    ),
)
