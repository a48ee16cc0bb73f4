"""A fifth set of faults, chosen by somebody who had seen neither the rules nor the other sets, as they come about in practice."""

from __future__ import annotations

from typing import Any

from tests.faults.catalogue import ONSET, Fault, everywhere, optimizer
from tests.faults.recipes import (
    NETWORKS,
    OBJECTIVES,
    OPTIMIZERS,
    PACKINGS,
    RANKS,
    RECIPES,
    RESUMED,
)

Overlays = dict[str, dict[str, Any]]

ADAM = ("gpt", "moe")
"""Recipes whose optimizer is AdamW."""

RATES = {name: value["init_args"]["lr"] for name, value in OPTIMIZERS.items()}


def also_in(variant: str, overlays: Overlays, alone: bool = False) -> Overlays:
    """Returns overlays with those of the same recipes over two ranks or resumed."""
    varied = {f"{name}-{variant}": overlay for name, overlay in overlays.items()}
    return varied if alone else overlays | varied


def item(path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


def own(file: str, name: str, **arguments: Any) -> dict[str, Any]:
    return item(f"tests.faults.broken_fifth_{file}.{name}", **arguments)


def network(prefix: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    """Returns the recipes' networks as classes of one's own, or with other arguments."""
    found = {}
    for name in only:
        kind, sizes = NETWORKS[name]["class_path"], NETWORKS[name]["init_args"]
        path = f"tests.faults.broken_fifth_networks.{prefix}{kind}" if prefix else kind
        found[name] = {"model": {"network": item(path, **(sizes | arguments))}}
    return found


def stepped(prefix: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    """Returns the recipes' optimizers as classes of one's own."""
    found = {}
    for name in only:
        kind, options = OPTIMIZERS[name]["class_path"], OPTIMIZERS[name]["init_args"]
        found[name] = {"model": {"optimizer": own("steps", prefix + kind, **(options | arguments))}}
    return found


def schedule(name: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    return everywhere({"model": {"lr_scheduler": own("steps", name, **arguments)}}, only)


def objective(name: str) -> Overlays:
    return {
        recipe: {"model": {"objective": own("steps", name, objective=OBJECTIVES[recipe])}}
        for recipe in RECIPES
    }


def rows(name: str, only: tuple[str, ...] = RECIPES, **arguments: Any) -> Overlays:
    """Returns the recipes' packings within one's own."""
    return {
        recipe: {"data": {"init_args": {"packing": own("rows", name, packing=PACKINGS[recipe], **arguments)}}}
        for recipe in only
    }


def reader(name: str, **options: Any) -> Overlays:
    return everywhere({"data": {"init_args": {"reader": own("rows", name), **options}}})


def trainer(**options: Any) -> Overlays:
    return everywhere({"trainer": options})


def callback(value: dict[str, Any]) -> Overlays:
    return trainer(**{"callbacks+": [value]})


def both(one: Overlays, other: Overlays) -> Overlays:
    """Returns two overlays of the same recipes as one, of different sections or different keys of one."""
    return {name: merged(one[name], other[name]) for name in one}


def merged(one: Any, other: Any) -> Any:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return one | {key: merged(one[key], value) if key in one else value for key, value in other.items()}


FIFTH_UNSEEN: tuple[Fault, ...] = tuple(
    Fault(name, cause, True, overlays, **more)
    for name, cause, overlays, more in (
        # by configuration
        ("the rate of SGD kept for other optimizers", "rate_too_high", optimizer(lr=0.5), {}),
        ("SGD clipped at a hundredth", "clip_too_low", everywhere({
            "trainer": {"gradient_clip_val": 0.01},
            "model": {"optimizer": item("SGD", lr=0.5, momentum=0.9)},
        }), {}),
        ("fp16 with the inverse of a loss scale", "fp16_underflow", also_in(RANKS, trainer(
            plugins=[item("FP16Mixed", init_scale=2**-10)])), {}),
        ("only the last block is trained", "frozen_weights", callback(item("Freeze", last_blocks=1)), {}),
        ("overfitting on two batches for a test", "over_fitting", trainer(overfit_batches=2),
            {"also": ("duplicates",)}),
        ("probability of keeping as dropout", "dropout_too_high",
            also_in(RANKS, network("", ("gpt",), dropout=0.9)), {}),
        ("no balancing loss, one expert a token", "dead_experts", {"moe": {"model": {
            "objective": {"class_path": "CausalLM"},
            "network": {"init_args": {"experts_per_token": 1}},
        }}}, {}),
        ("eight blocks with norms behind them", "vanishing_gradients",
            network("", ("gpt",), n_layer=8, norm_position="post"), {}),
        ("embeddings that begin at one", "bad_initialisation",
            network("", ("llama",), init_std={"embed_tokens": 1.0})
            | network("", ("moe",), init_std={"lm_head": 1.0}), {}),
        ("epsilon of another paper", "epsilon_too_large", optimizer(ADAM, eps=0.1), {}),
        # schedules and optimizers
        ("a lambda that returns rates", "rate_too_low", {
            name: schedule("AbsoluteCosine", (name,), peak=RATES[name])[name] for name in RECIPES}, {}),
        ("a callback steps the schedule too", "schedule_ends_early", both(
            callback(own("steps", "StepsSchedule")),
            everywhere({"model": {"lr_scheduler": {"init_args": {"min_lr_ratio": 0.0}}}})), {}),
        ("the warm-up of a long run", "warmup_too_long", schedule("LongCosine", warmup_steps=1000),
            {"also": ("rate_too_low",)}),
        ("a drop that is a rise", "spike_by_optimizer", schedule("Drops", milestone=ONSET, factor=10.0),
            {"onset": ONSET + 1, "also": ("rate_too_high",)}),
        ("a decay that the rate does not scale", "weight_decay_too_large", also_in(RESUMED, stepped("Decaying")), {}),
        ("gradients zeroed for micro-batches that are none", "stale_gradients", stepped("Accumulating"), {}),
        ("a resume without the optimizer's state", "optimizer_state_lost",
            also_in(RESUMED, stepped("Restarting"), alone=True), {"onset": 23}),
        ("hidden matrices left to another optimizer", "weights_not_updated", {
            name: {"model": {"optimizer": own("steps", "RestAdamW", lr=RATES["gpt"])}} for name in RECIPES}, {}),
        # losses
        ("labels shifted by data and by loss", "labels_shifted", also_in(RANKS, objective("ShiftsLabels")), {}),
        ("sums over rows", "gradient_scale", objective("SumsRows"), {}),
        ("means over rows without labels", "non_finite", both(
            everywhere({"model": {"objective": own("steps", "MeansOfRows")}}, ("gpt", "llama"))
            | {"moe": {"model": {"objective": {"init_args": {"objective": own("steps", "MeansOfRows")}}}}},
            rows("EmptyAnswers", first=ONSET)), {"onset": ONSET}),
        # networks
        ("the loop over blocks ends early", "dead_block", network("Unfinished"), {}),
        ("biases of units far below zero", "dead_units", network("Sparse", ("gpt",)), {}),
        ("logits multiplied by the width", "logit_growth", network("Loud"), {"also": ("bad_initialisation",)}),
        ("a mask in the place of the causal one", "sees_future", network("Uncausal"), {}),
        ("rows laid out as one", "mask_leak", network("Flat", ADAM), {}),
        # data
        ("labels behind a rare marker", "few_labels", rows("AfterMarker", amount=26), {}),
        ("data prepared anew before a resume", "tokenizer_mismatch",
            also_in(RESUMED, rows("OtherVocabulary", checkpoint="${run_folder}/interrupted.ckpt", amount=8.0), alone=True), {"onset": 23}),
        ("a shard of bytes that are no text", "spike_by_data", rows("Binary", first=ONSET, last=ONSET + 1), {"onset": ONSET}),
        ("pages crawled again and again", "duplicates", reader("Mirrored"), {}),
        ("sources one after the other", "not_shuffled", also_in(RESUMED, reader("BySource", shuffle=False)), {}),
        ("all token files for training", "validation_leak", both(rows("BothSplits"), everywhere(
            {"data": {"init_args": {"source": "FOLDER/topics-20.jsonl", "validation_fraction": 0.3}}})), {}),
        ("a slow disk, over ranks that of one", "data_bound", rows("SlowDisk", amount=0.05)
            | also_in(RANKS, rows("SlowDisk", amount=0.15, rank=1), alone=True), {}),
        ("the same rows for each rank", "duplicates", also_in(RANKS, rows("SameRows"), alone=True), {}),
    )
)  # fmt: skip
