"""The sixth set of faults: what commonly goes wrong where users write a configuration, a part of their own, or data.

One fault for each cause of the catalogue, in the way in which issue trackers have it most often, but for three that do no harm
in such short runs. They were chosen by somebody who knew neither the rules nor the other sets, and
ran them only to see that they run and do harm.
"""

from __future__ import annotations

from typing import Any

from tests.faults.catalogue import Fault, everywhere, rate
from tests.faults.recipes import (
    INTERRUPTED,
    LENGTH,
    NETWORKS,
    OPTIMIZERS,
    PACKINGS,
    RANKS,
    RECIPES,
    RESUMED,
    ROWS,
    STEPS,
)
from tests.faults.running import composed

BAD_STEP = 24
"""The step at which data are bad in the middle of a run."""

ADAM = ("gpt", "moe")
"""Recipes with AdamW."""

LLAMAS = ("llama", "llama-2-ranks")
"""Recipes whose blocks matter within so few steps."""

Overlays = dict[str, dict[str, Any]]


def varied(variant: str, only: tuple[str, ...] = RECIPES) -> tuple[str, ...]:
    """Returns the names of recipes in a variant."""
    return tuple(f"{name}-{variant}" for name in only)


def plain(name: str) -> str:
    """Returns the recipe of which this is a variant, or which it is."""
    return name.partition("-")[0]


def part(file: str, name: str, **arguments: Any) -> dict[str, Any]:
    """Returns a part with a mistake."""
    return {"class_path": f"tests.faults.broken_sixth_{file}.{name}", "init_args": arguments}


def data(**options: Any) -> dict[str, Any]:
    return {"data": {"init_args": options}}


def rows(kind: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    """Returns the recipes' packings within another one."""
    return {
        name: data(packing=part("rows", kind, packing=PACKINGS[plain(name)], **arguments)) for name in only
    }


def half(scale: float) -> dict[str, Any]:
    """Returns mixed precision in fp16 with a loss scale."""
    return {"trainer": {"plugins": [{"class_path": "FP16Mixed", "init_args": {"init_scale": scale}}]}}


def disk(seconds: float, ranks: list[int] | None = None) -> dict[str, Any]:
    """Returns a data module that is the recipes' but for a slow disk."""
    return {"data": part("disk", "PretrainDataModule", seconds=seconds, ranks=ranks)}


def networks(prefix: str, only: tuple[str, ...] = RECIPES) -> Overlays:
    """Returns the recipes' networks, changed."""
    found = {name: NETWORKS[plain(name)] for name in only}
    return {
        name: {"model": {"network": part("networks", prefix + network["class_path"], **network["init_args"])}}
        for name, network in found.items()
    }


def optimizers(prefix: str, only: tuple[str, ...] = RECIPES) -> Overlays:
    """Returns optimizers of the user's in the place of the recipes', with their rates."""
    found = {name: OPTIMIZERS[plain(name)] for name in only}
    return {
        name: {"model": {"optimizer": part("steps", prefix + kind["class_path"], **kind["init_args"])}}
        for name, kind in found.items()
    }


def schedule(kind: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return everywhere({"model": {"lr_scheduler": part("steps", kind, **arguments)}}, only)


def objectives(kind: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    """Returns an objective in the place of CausalLM."""
    own = part("steps", kind, **arguments)
    return {
        name: {"model": {"objective": {"init_args": {"objective": own}} if plain(name) == "moe" else own}}
        for name in only
    }


def both(one: Overlays, other: Overlays) -> Overlays:
    """Returns overlays of which each lays two over a recipe."""
    return {name: composed(one[name], other[name]) for name in one}


def tokens_of_one(share: float) -> dict[str, Any]:
    """Returns a schedule in tokens, of which only a share of those of each step was counted."""
    tokens = int(STEPS * ROWS * LENGTH * share)
    lengths = {"total_tokens": tokens, "warmup_tokens": tokens // 8, "min_lr_ratio": 0.0}
    return {"model": {"lr_scheduler": {"init_args": lengths}}}


ACCUMULATED = tokens_of_one(0.25) | {"trainer": {"accumulate_grad_batches": 4}} | data(batch_size=ROWS // 4)

MASTER = {
    name: {"model": {"optimizer": part("steps", "MasterAdamW", lr=8e-3)}}
    for name in (*RECIPES, *varied(RANKS, ("gpt",)))
}

SLOW_SGD = {
    "model": {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.5, "momentum": 0.9}}},
    "trainer": {"gradient_clip_val": 0.01},
}

SIXTH_UNSEEN: tuple[Fault, ...] = (
    # values in a configuration
    Fault(
        "exponent of the rate is one too large",
        "rate_too_high",
        True,
        {name: rate(10)[plain(name)] for name in ("gpt", "llama", *varied(RANKS, ("gpt",)))},
    ),
    Fault(
        "rate of a fine-tuning recipe",
        "rate_too_low",
        True,
        everywhere({"model": {"optimizer": {"init_args": {"lr": 2e-5}}}}),
    ),
    Fault(
        "schedule in tokens of one rank or micro-batch",
        "schedule_ends_early",
        True,
        everywhere(tokens_of_one(0.5), varied(RANKS)) | everywhere(ACCUMULATED, ADAM),
    ),
    Fault(
        "epsilon of an image model",
        "epsilon_too_large",
        True,
        everywhere({"model": {"optimizer": {"init_args": {"eps": 0.1}}}}, ADAM),
    ),
    Fault("SGD clipped at 0.01", "clip_too_low", True, everywhere(SLOW_SGD)),
    Fault(
        "adapter on a network that was never trained",
        "frozen_weights",
        True,
        everywhere({"trainer": {"callbacks+": [{"class_path": "LoRA", "init_args": {"rank": 4}}]}}),
    ),
    Fault(
        "probability to keep, given as dropout",
        "dropout_too_high",
        True,
        everywhere(
            {"model": {"network": {"init_args": {"dropout": 0.9}}}}, ("gpt", *varied(RESUMED, ("gpt",)))
        ),
    ),
    Fault(
        "few batches left over from debugging",
        "over_fitting",
        True,
        everywhere({"trainer": {"overfit_batches": 4}}),
    ),
    Fault(
        "documents by topic, in the order of the file", "not_shuffled", True, everywhere(data(shuffle=False))
    ),
    Fault("loss scale of fp16 as its inverse", "fp16_underflow", True, everywhere(half(2.0**-16))),
    # steps
    Fault(
        "warm-up of a long run",
        "warmup_too_long",
        True,
        schedule("InverseSquareRoot", warmup_steps=400),
    ),
    Fault(
        "a share of the rate in percent",
        "spike_by_optimizer",
        True,
        schedule("Phases"),
        onset=BAD_STEP + 1,
    ),
    Fault(
        "own decay is not multiplied by the rate",
        "weight_decay_too_large",
        True,
        optimizers("DecayApart", ADAM),
    ),
    Fault(
        "own optimizer takes settings alone from a checkpoint",
        "optimizer_state_lost",
        True,
        optimizers("SettingsOnly", varied(RESUMED, ("gpt", "llama"))),
        onset=INTERRUPTED + 1,
    ),
    Fault(
        "own optimizer does not zero gradients",
        "stale_gradients",
        True,
        optimizers("KeepsGradients", ("gpt", "llama")),
    ),
    Fault("own master weights are not copied back", "weights_not_updated", True, MASTER),
    # objectives
    Fault("own loss is a sum", "gradient_scale", True, objectives("Summed")),
    Fault(
        "own loss shifts labels again", "labels_shifted", True, objectives("ShiftedAgain", ("gpt", "llama"))
    ),
    Fault("own z-loss is subtracted", "logit_growth", True, objectives("NegativeZLoss", z_loss=0.03)),
    Fault(
        "own loss is a mean of means, one of no labels",
        "non_finite",
        True,
        both(objectives("MeanOfRows"), rows("NoAnswer", step=BAD_STEP)),
        onset=BAD_STEP,
    ),
    # networks
    Fault(
        "own attention passes no direction on", "sees_future", True, networks("Unmasked", ("gpt", "llama"))
    ),
    Fault(
        "own attention ignores the mask of short records",
        "mask_leak",
        True,
        both(
            networks("CausalOnly", LLAMAS),
            everywhere(data(reader=part("rows", "ShortRecords", words=3)), LLAMAS),
        ),
    ),
    Fault(
        "own attention multiplies queries and keys",
        "attention_collapse",
        True,
        networks("Multiplied", LLAMAS),
    ),
    Fault(
        "own blocks have no residual connections",
        "vanishing_gradients",
        True,
        both(
            networks("NoResidual", LLAMAS),
            everywhere({"model": {"network": {"init_args": {"n_layer": 4}}}}, LLAMAS),
        ),
    ),
    Fault(
        "tied embeddings as torch begins them",
        "bad_initialisation",
        True,
        networks("TorchsOwn", ("gpt", "llama")),
    ),
    Fault("gates and projections begin with zeros", "dead_block", True, networks("ZeroTwice", LLAMAS)),
    Fault("biases of the MLP begin at -1", "dead_units", True, networks("NegativeBias", ("gpt",))),
    Fault(
        "sign of the experts' bias",
        "dead_experts",
        True,
        both(
            networks("SelfBalanced", ("moe", *varied(RANKS, ("moe",)))),
            everywhere(
                {"model": {"objective": {"init_args": {"load_balancing": 0.0}}}},
                ("moe", *varied(RANKS, ("moe",))),
            ),
        ),
    ),
    # data
    Fault("prompts masked by characters", "few_labels", True, rows("PromptsLeftOut", characters=28)),
    Fault(
        "a shard of arbitrary bytes",
        "spike_by_data",
        True,
        rows("DamagedShard", step=BAD_STEP, steps=3),
        onset=BAD_STEP,
    ),
    Fault(
        "a few documents oversampled",
        "duplicates",
        True,
        everywhere(data(reader=part("rows", "Oversampled", documents=8, times=600))),
    ),
    Fault(
        "validation reads the training folder",
        "validation_leak",
        True,
        both(rows("SameFolder"), everywhere(data(source="FOLDER/topics-12.jsonl", validation_fraction=0.3))),
    ),
    Fault(
        "tokens written anew before a run is resumed",
        "tokenizer_mismatch",
        True,
        everywhere(
            {"data": {"class_path": "tests.faults.broken_sixth_rows.PretrainDataModule"}}, varied(RESUMED)
        ),
        onset=INTERRUPTED + 1,
    ),
    Fault(
        "slow disk, of all ranks or of one",
        "data_bound",
        True,
        everywhere(disk(0.04)) | everywhere(disk(0.06, [1]), varied(RANKS)),
    ),
)
