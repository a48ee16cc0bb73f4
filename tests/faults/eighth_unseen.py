"""Faults of an eighth set: what users of such a framework often get wrong, one way for a cause.

About a third are values of a configuration, the others mistakes in what users write themselves, in data and in resumes.
None was tried on the diagnosis before it was fixed.
"""

from __future__ import annotations

from typing import Any

from tests.faults.catalogue import (
    ONSET,
    Fault,
    everywhere,
    optimizer,
    schedule,
    trainer,
)
from tests.faults.recipes import (
    INTERRUPTED,
    LENGTH,
    NETWORKS,
    OBJECTIVES,
    OPTIMIZERS,
    PACKINGS,
    RANKS,
    RECIPES,
    RESUMED,
    ROWS,
    STEPS,
    WARMUP,
)

Overlays = dict[str, dict[str, Any]]
PARALLEL = tuple(f"{name}-{RANKS}" for name in RECIPES)
AGAIN = tuple(f"{name}-{RESUMED}" for name in RECIPES)
CHOSEN = f"gpt-{RANKS}", f"llama-{RESUMED}"
"""Variants of which faults take one or both that could be in all of them."""

STEP_TOKENS = ROWS * LENGTH


def also_in(overlays: Overlays, *variants: str) -> Overlays:
    """Returns overlays that hold for variants of their recipes, too."""
    return overlays | {one: overlays[one.partition("-")[0]] for one in variants}


def of(part: str, name: str) -> str:
    """Returns the path of a class in one of the set's files."""
    return f"tests.faults.broken_eighth_{part}.{name}"


def rows(bug: str, amount: float = 1.0, only: tuple[str, ...] = RECIPES) -> Overlays:
    """Returns the packings of recipes, each with a mistake."""
    return {
        name: {
            "data": {
                "init_args": {
                    "packing": {
                        "class_path": of("rows", "Rows"),
                        "init_args": {
                            "packing": PACKINGS[name.partition("-")[0]],
                            "bug": bug,
                            "amount": amount,
                        },
                    }
                }
            }
        }
        for name in only
    }


def network(prefix: str, only: tuple[str, ...] = RECIPES, **more: dict[str, Any]) -> Overlays:
    """Returns the networks of recipes with a mistake; `more` are arguments by recipe."""
    return {
        name: {
            "model": {
                "network": {
                    "class_path": of("networks", prefix + NETWORKS[name]["class_path"]),
                    "init_args": NETWORKS[name]["init_args"] | more.get(name, {}),
                }
            }
        }
        for name in only
    }


def own_optimizer(prefix: str, only: tuple[str, ...] = RECIPES) -> Overlays:
    """Returns the optimizers of recipes with a mistake."""
    return {
        name: {
            "model": {
                "optimizer": {
                    "class_path": of("steps", prefix + OPTIMIZERS[name]["class_path"]),
                    "init_args": OPTIMIZERS[name]["init_args"],
                }
            }
        }
        for name in only
    }


def rates(**of_recipe: float) -> Overlays:
    """Returns learning rates of recipes."""
    return {name: {"model": {"optimizer": {"init_args": {"lr": value}}}} for name, value in of_recipe.items()}


def task(kind: str, **arguments: Any) -> Overlays:
    """Returns objectives of one's own in place of the next token's; that of the experts is around it."""
    own = {"class_path": of("losses", kind), "init_args": arguments}
    plain = {"model": {"objective": own}}
    return {
        "gpt": plain,
        "llama": plain,
        "moe": {"model": {"objective": {"init_args": {"objective": own}}}},
    }


def stages(warmup_steps: int, found: list[list[float]]) -> Overlays:
    """Returns a schedule of one's own; see `broken_eighth_steps.Stages`."""
    arguments = {"warmup_steps": warmup_steps, "stages": found}
    item = {"class_path": of("steps", "Stages"), "init_args": arguments}
    return everywhere({"model": {"lr_scheduler": item}})


def callback(kind: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    """Returns a callback."""
    item = {"class_path": of("steps", kind), "init_args": arguments}
    return everywhere({"trainer": {"callbacks+": [item]}}, only)


STAGES = [[1, 1.0], [ONSET, 25.0], [ONSET + 3, 0.1]]
"""Of a schedule: first steps and factors; the second factor is in percent."""

EIGHTH_UNSEEN: tuple[Fault, ...] = (
    # values of a configuration
    Fault(
        "the rate of an optimizer that finds its own",
        "rate_too_high",
        True,
        also_in(rates(**dict.fromkeys(RECIPES, 1.0)), CHOSEN[0]),
    ),
    Fault(
        "the rate of a fine-tuning recipe",
        "rate_too_low",
        True,
        also_in(rates(**dict.fromkeys(RECIPES, 2e-5)), CHOSEN[1]),
    ),
    Fault(
        "one percent of few steps as warm-up",
        "no_warmup",
        True,
        {
            name: {
                "model": {
                    "optimizer": {"init_args": {"lr": value}},
                    "lr_scheduler": {"init_args": {"warmup_steps": 0.01}},
                }
            }
            for name, value in {"gpt": 0.1, "llama": 0.3, "moe": 0.1}.items()
        },
        also=("rate_too_high",),
    ),
    Fault(
        "the tokens of the schedule are those of two rows",
        "schedule_ends_early",
        True,
        also_in(
            schedule(
                warmup_tokens=WARMUP * STEP_TOKENS // 4,
                total_tokens=STEPS * STEP_TOKENS // 4,
                min_lr_ratio=0.0,
            ),
            *CHOSEN,
        ),
    ),
    Fault(
        "a warm-up for a run of many steps",
        "warmup_too_long",
        True,
        also_in(stages(500, [[1, 1.0]]), CHOSEN[0]),
    ),
    Fault(
        "the loss scale is its inverse",
        "fp16_underflow",
        True,
        everywhere(
            {"trainer": {"plugins": [{"class_path": "FP16Mixed", "init_args": {"init_scale": 2.0**-16}}]}}
        ),
    ),
    Fault(
        "a frozen body is left from fine-tuning",
        "frozen_weights",
        True,
        everywhere(
            {
                "trainer": {
                    "callbacks+": [
                        {"class_path": "Freeze", "init_args": {"last_blocks": 1, "train": ["norm.*"]}}
                    ]
                }
            }
        ),
    ),
    Fault(
        "the share to keep is given as dropout",
        "dropout_too_high",
        True,
        also_in(
            {"gpt": {"model": {"network": {"init_args": {"dropout": 0.9}}}}},
            f"gpt-{RANKS}",
            f"gpt-{RESUMED}",
        ),
    ),
    Fault(
        "overfit_batches is left on", "over_fitting", True, trainer(overfit_batches=2), also=("duplicates",)
    ),
    Fault(
        "the epsilon of another field",
        "epsilon_too_large",
        True,
        also_in(optimizer(("gpt", "moe"), eps=0.1), f"gpt-{RESUMED}"),
    ),
    # optimizers, schedules, callbacks
    Fault(
        "clipped before the loss scale is taken out",
        "clip_too_low",
        True,
        own_optimizer("Scaled", ("gpt", "moe")),
    ),
    Fault(
        "decay as in the paper",
        "weight_decay_too_large",
        True,
        also_in(own_optimizer("Paper"), CHOSEN[0]),
    ),
    Fault(
        "an optimizer that was stored in half precision",
        "optimizer_state_lost",
        True,
        callback("HalfCheckpoints", (AGAIN[0], AGAIN[2])),
        onset=INTERRUPTED + 1,
        also=("spike_by_optimizer",),
    ),
    Fault(
        "a stage of the schedule is in percent",
        "spike_by_optimizer",
        True,
        stages(WARMUP, STAGES),
        onset=ONSET,
        also=("rate_too_high",),
    ),
    Fault(
        "gradients are zeroed every fourth step",
        "stale_gradients",
        True,
        own_optimizer("Accumulating"),
    ),
    Fault(
        "the vocabulary is resized after the optimizer",
        "weights_not_updated",
        True,
        callback("LateResize"),
    ),
    Fault("one rank is too hot", "straggler", True, callback("HotRank", PARALLEL, milliseconds=40)),
    # losses
    Fault(
        "the loss is a sum",
        "gradient_scale",
        True,
        also_in(
            {
                name: {
                    "model": {
                        "objective": {
                            "class_path": of("losses", "Summed"),
                            "init_args": {"objective": OBJECTIVES[name]},
                        }
                    }
                }
                for name in RECIPES
            },
            CHOSEN[0],
        ),
    ),
    Fault(
        "a row without labels, and means of rows",
        "non_finite",
        True,
        also_in(
            {name: task("RowMeans")[name] | overlay for name, overlay in rows("empty_answer").items()},
            CHOSEN[1],
        ),
        onset=ONSET,
    ),
    Fault(
        "the z-loss is subtracted",
        "logit_growth",
        True,
        also_in(task("RewardedNorm", z_loss=0.03), CHOSEN[1]),
    ),
    Fault(
        "the balancing loss is subtracted",
        "dead_experts",
        True,
        also_in(
            {
                "moe": {
                    "model": {
                        "objective": {
                            "class_path": of("losses", "Unbalancing"),
                            "init_args": OBJECTIVES["moe"]["init_args"] | {"load_balancing": 0.1},
                        }
                    }
                }
            },
            f"moe-{RANKS}",
            f"moe-{RESUMED}",
        ),
    ),
    # networks
    Fault(
        "deep and without norms",
        "exploding_gradients",
        True,
        network(
            "WithoutNorms",
            ("gpt", "llama"),
            gpt={"n_layer": 4, "std": 0.4},
            llama={"n_layer": 4, "init_std": {"layers.*": 0.3}},
        ),
    ),
    Fault(
        "the embedding begins as torch's",
        "bad_initialisation",
        True,
        network("UnitEmbedding", moe={"tie_embeddings": True}),
    ),
    Fault("the last block is never run", "dead_block", True, network("OneShort")),
    Fault(
        "a mask in place of the causal one",
        "sees_future",
        True,
        also_in(network("NotCausal", ("gpt", "llama")), *CHOSEN),
    ),
    # data
    Fault("labels are shifted the wrong way", "labels_shifted", True, also_in(rows("backwards"), CHOSEN[0])),
    Fault("a prompt is nearly all of a row", "few_labels", True, rows("long_prompts", 2)),
    Fault("each worker reads all rows", "duplicates", True, also_in(rows("unsharded", 4), CHOSEN[0])),
    Fault("a shuffle buffer of four batches", "not_shuffled", True, rows("buffered", 4)),
    Fault(
        "later shards are of an older tokenizer",
        "tokenizer_mismatch",
        True,
        also_in(rows("older_tokenizer"), CHOSEN[1]),
        onset=ONSET,
    ),
    Fault(
        "a crawl that visits pages again",
        "validation_leak",
        True,
        everywhere(
            {
                "data": {
                    "init_args": {
                        "source": "FOLDER/topics-12.jsonl",
                        "reader": {"class_path": of("rows", "Crawled"), "init_args": {"copies": 30}},
                    }
                }
            }
        ),
        also=("duplicates",),
    ),
    Fault(
        "a binary file among the text",
        "spike_by_data",
        True,
        also_in(rows("binary_file"), CHOSEN[0]),
        onset=ONSET,
    ),
    Fault("rows are made in slow Python", "data_bound", True, rows("slow_python", 25)),
    Fault(
        "the disk of one rank is slow",
        "data_bound",
        True,
        rows("slow_disk", 40, PARALLEL),
        also=("straggler",),
    ),
)
