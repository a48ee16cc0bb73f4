"""A third set of faults that were written without knowledge of the rules, each of a mechanism that the others do not have.

They are what users report of their runs in pre-training and fine-tuning: a schedule that returns rates in the place of factors,
checkpoints through which no gradient passes, norms that are clipped on one rank alone, a document mask the wrong way round,
token ids that wrap around. The causes are those of `catalogue` and `unseen`.
"""

from __future__ import annotations

from typing import Any

from tests.faults.catalogue import DOCUMENTS, Fault, everywhere, packing, rate, trainer
from tests.faults.recipes import LENGTH, OBJECTIVES, RANKS, RECIPES, RESUMED, STEPS
from tests.faults.second_unseen import both, schedule_of
from tests.faults.unseen import AFTER_RESUME, Overlays, accumulated, part, varied

LATE = 19
"""The step in which faults begin that strike in the middle of a run."""

ADAMW = ("gpt", "moe")
"""Recipes all of whose weights have second moments."""

DENSE = ("gpt", "llama")
"""Recipes whose MLPs are no experts."""


def steps(name: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return part(f"third_steps.{name}", only, **arguments)


def rows(bug: str, amount: float = 1.0, only: tuple[str, ...] = RECIPES) -> Overlays:
    return packing(bug, amount, only, "broken_third_rows.AlteredThird")


def miswired(bug: str, amount: float = 1.0, only: tuple[str, ...] = RECIPES, **more: Any) -> Overlays:
    return part("third_networks.Miswired", only, bug=bug, amount=amount, **more)


def objective_of(path: str, **arguments: Any) -> Overlays:
    """Returns the recipes' objectives, each within one that has a bug."""
    found = {}
    for name in RECIPES:
        own = {
            "class_path": f"tests.faults.{path}",
            "init_args": {"objective": OBJECTIVES[name], **arguments},
        }
        found[name] = {"model": {"objective": own}}
    return found


def penalty(coefficient: float) -> Overlays:
    """Returns an L2 term of the loss."""
    plain = {"class_path": "CausalLM", "init_args": {"l2": coefficient}}
    overlays = everywhere({"model": {"objective": plain}})
    return overlays | everywhere({"model": {"objective": {"init_args": {"objective": plain}}}}, ("moe",))


def unbalanced(overlays: Overlays) -> Overlays:
    without = {"init_args": {"load_balancing": 0.0, "z_loss": 0.0}}
    return both(overlays, everywhere({"model": {"objective": without}}, ("moe",)))


def few_for_training(validation: float) -> Overlays:
    return everywhere({"data": {"init_args": {"validation_fraction": validation}}})


SCHEDULE_AND_OPTIMIZER: tuple[Fault, ...] = (
    Fault(
        "a cycle whose peak replaces the rate",
        "rate_too_high",
        True,
        schedule_of(
            "torch.optim.lr_scheduler.OneCycleLR", max_lr=0.5, total_steps=STEPS + 2, cycle_momentum=False
        ),
    ),
    Fault(
        "rates where factors are expected",
        "rate_too_low",
        True,
        schedule_of("tests.faults.broken_third_steps.SquaredRate"),
    ),
    Fault(
        "schedule of the old optimizer, a new optimizer",
        "no_warmup",
        True,
        both(rate(8), steps("CarriedOver")),
    ),
    Fault(
        "rate falls where a batch is no better than the best",
        "schedule_ends_early",
        True,
        steps("Plateau", factor=0.1, patience=1),
    ),
    Fault("a second warm-up by beta2", "warmup_too_long", True, steps("SecondWarmup", beta2=0.98)),
    Fault(
        "epsilon added to squared gradients",
        "epsilon_too_large",
        True,
        steps("FlooredSquares", ADAMW, epsilon=0.1),
    ),
    Fault("an L2 term of the loss", "weight_decay_too_large", True, penalty(0.3)),
    Fault("clipped to less than the step before", "clip_too_low", True, steps("FollowingLimit", share=0.6)),
    Fault("momentum zeroed with the gradients", "optimizer_state_lost", True, steps("SharedMemory")),
    Fault(
        "a bit of a first moment flips",
        "spike_by_optimizer",
        True,
        steps("FlippedBit", factor=2.0**15, first=LATE, last=LATE),
        LATE,
    ),
)

GRADIENTS: tuple[Fault, ...] = (
    Fault(
        "loss summed over each row",
        "gradient_scale",
        True,
        objective_of("broken_parts.UnscaledSum", parts=LENGTH),
    ),
    Fault("one of two optimizers never zeroes", "stale_gradients", True, steps("SecondOptimizer")),
    Fault(
        "gradients accumulated in fp16",
        "fp16_underflow",
        True,
        both(accumulated(8), steps("AccumulatedInHalf", scale=1e-5)),
    ),
    Fault(
        "a norm without epsilon meets a zero",
        "non_finite",
        True,
        miswired("norm_without_epsilon", first=LATE),
        LATE,
    ),
    Fault(
        "norms divide twice more in backward", "exploding_gradients", True, miswired("norms_divide_again", 2)
    ),
    Fault("eight sigmoids between the blocks", "vanishing_gradients", True, miswired("sigmoids", 8)),
    Fault(
        "reentrant checkpoints without a gradient",
        "frozen_weights",
        True,
        miswired("reentrant"),
        also=("weights_not_updated",),
    ),
    Fault(
        "embedding copied back from a stale master copy",
        "weights_not_updated",
        True,
        steps("StaleCopy", DENSE, pattern="embed_tokens"),
    ),
)

NETWORK: tuple[Fault, ...] = (
    Fault("rows of added tokens far too large", "bad_initialisation", True, miswired("added_tokens", 2.0)),
    Fault("last block rounded to zero in float8", "dead_block", True, miswired("eight_bits", 1e-6)),
    Fault("units pruned after the first batch", "dead_units", True, miswired("pruned", 0.05, DENSE)),
    Fault("all attention to the first token", "attention_collapse", True, miswired("sink", 30)),
    Fault(
        "confidence is rewarded",
        "logit_growth",
        True,
        objective_of("broken_third_networks.Confident", coefficient=2.0),
    ),
    Fault(
        "routers see a large common part",
        "dead_experts",
        True,
        unbalanced(miswired("common_part", 100, ("moe",))),
    ),
    Fault("token shift to the wrong side", "sees_future", True, miswired("token_shift", 0.25)),
    Fault("dropout 0.8 before the head", "dropout_too_high", True, miswired("head_dropout", 0.8)),
    Fault("an average that begins at zero", "average_wrong", True, steps("AverageFromZero", decay=0.98)),
)

DATA: tuple[Fault, ...] = (
    Fault("labels off by each row's padding", "labels_shifted", True, rows("both_paddings", 4)),
    Fault("most ids count as special", "few_labels", True, rows("special", 280)),
    Fault("pages that are nearly the same", "duplicates", True, rows("near_copies", 8)),
    Fault("a curriculum left on", "not_shuffled", True, rows("sorted")),
    Fault("ids wrap around", "tokenizer_mismatch", True, rows("wrapped", 64)),
    Fault(
        "a document mask the wrong way round", "mask_leak", True, miswired("inverted_mask", only=DOCUMENTS)
    ),
    Fault(
        "random positions that are not sorted", "position_ids", True, rows("random_positions", only=DOCUMENTS)
    ),
    Fault(
        "validation of the last training batch",
        "validation_leak",
        True,
        part("third_rows.ValidatesLastBatch"),
    ),
    Fault(
        "three batches in another script",
        "spike_by_data",
        True,
        part("third_rows.OtherScript", first=LATE, last=LATE + 2),
        LATE,
    ),
    Fault("training and validation split swapped", "over_fitting", True, few_for_training(0.994)),
    Fault("shards decompressed for each batch", "data_bound", True, rows("decompressed", 3)),
)

RANKS_AND_RESUMING: tuple[Fault, ...] = (
    Fault(
        "norms clipped on the first rank alone",
        "ranks_differ",
        True,
        varied(RANKS, both(trainer(gradient_clip_val=0.1), steps("ClipsNormsOnce"))),
    ),
    Fault(
        "resumed with a new embedding",
        "weights_not_restored",
        True,
        varied(RESUMED, steps("NewEmbedding")),
        AFTER_RESUME,
    ),
)

THIRD_UNSEEN: tuple[Fault, ...] = (
    *SCHEDULE_AND_OPTIMIZER,
    *GRADIENTS,
    *NETWORK,
    *DATA,
    *RANKS_AND_RESUMING,
)
