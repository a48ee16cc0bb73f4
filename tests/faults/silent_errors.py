"""Errors that were reported of real trainings, in their form here: those that TrainCheck was evaluated on (arXiv:2506.14813, 5).

Each name begins with the report's. docs/diagnosis.md has those without a form in these runs. AC-2665 is not of the twenty:
TrainCheck found it. Faults and causes were fixed before the doctor was run on them.
"""

from __future__ import annotations

from typing import Any

from tests.faults.catalogue import ONSET, Fault, everywhere
from tests.faults.fifth_unseen import Overlays, also_in, both, callback, item, trainer
from tests.faults.recipes import INTERRUPTED, NETWORKS, OPTIMIZERS, PACKINGS, RANKS, RECIPES, RESUMED


def own(name: str, **arguments: Any) -> dict[str, Any]:
    return item(f"tests.faults.broken_silent.{name}", **arguments)


def network(prefix: str) -> Overlays:
    """Returns the recipes' networks as classes of one's own."""
    return {
        name: {"model": {"network": own(prefix + value["class_path"], **value["init_args"])}}
        for name, value in NETWORKS.items()
    }


def stepped(prefix: str) -> Overlays:
    """Returns the recipes' optimizers as classes of one's own."""
    return {
        name: {"model": {"optimizer": own(prefix + value["class_path"], **value["init_args"])}}
        for name, value in OPTIMIZERS.items()
    }


def rows(name: str, **options: Any) -> Overlays:
    """Returns the recipes' packings within one's own."""
    return {
        recipe: {"data": {"init_args": {"packing": own(name, packing=PACKINGS[recipe]), **options}}}
        for recipe in RECIPES
    }


def across(bug: str) -> Overlays:
    return also_in(RANKS, callback(own("AcrossRanks", bug=bug)), alone=True)


SILENT_ERRORS: tuple[Fault, ...] = tuple(
    Fault(name, cause, True, overlays, **more)
    for name, cause, overlays, more in (
        # drivers and devices
        ("baichuan2-86 zeros arrive at the other device", "unsteady_outputs",
            callback(own("Wired", bug="lost_between_devices", amount=0.25)), {}),
        ("PT-84803 averaged gradients do not arrive", "ranks_differ", across("results_lost"), {}),
        ("PT-96600 first weights do not arrive", "ranks_differ", across("weights_lost"), {}),
        # frameworks
        ("DS-1801 norms clipped on one rank", "ranks_differ", across("clipped_on_one"), {}),
        ("PT-104336 parameters moved after DDP", "ranks_differ", across("moved"), {}),
        ("LT-725 matrices past autocast", "autocast_ignored",
            both(network("Full"), everywhere({"trainer": {"precision": "bf16-mixed"}})), {}),
        ("MP-702 frozen by train() alone", "frozen_weights", network("Frozen"), {"onset": 12}),
        ("PT-51800 spectral norm before a first pass", "bad_initialisation",
            everywhere(callback(own("Wired", bug="spectral_norm"))["gpt"], ("gpt", "llama")), {}),
        ("TF-33844 attention drops in evaluation", "unsteady_outputs", network("Dropping"), {}),
        ("TF-34204 a batch becomes its first row", "batch_too_small", rows("FirstRow"),
            {"also": ("few_labels",)}),
        ("SO-67180955 workers draw alike", "duplicates", rows("SameInWorkers", num_workers=2), {}),
        ("TF-33455 steps counted in micro-batches", "ends_early", both(
            trainer(accumulate_grad_batches=2), callback(own("CountsBatches"))), {"onset": 24}),
        ("TF-29903 checkpoint of empty tensors", "weights_not_restored",
            also_in(RESUMED, callback(own("WritesZeros")), alone=True), {"onset": INTERRUPTED + 1}),
        # compiler
        ("PT-115607 left out of a step, left out for good", "weights_not_updated",
            both(stepped("Captured"), callback(own("WithoutOnce", step=ONSET))), {"onset": ONSET + 1}),
        # user code
        ("FORUM-84911 all frozen but norms", "frozen_weights", network("OnlyNorms"), {}),
        ("SO-60335387 gradients never zeroed", "stale_gradients", stepped("Adding"), {}),
        ("X-jxmnop every other step past DDP", "ranks_differ", across("unwrapped"), {}),
        # found by TrainCheck
        ("AC-2665 an optimizer of other parameters", "weights_not_updated", stepped("Early"), {}),
    )
)  # fmt: skip
