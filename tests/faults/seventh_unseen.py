"""A seventh set of faults, drawn after all rules were fixed by somebody who knew neither the rules nor the other sets.

For each cause it has the way in which users of such frameworks commonly come to it, by trackers of issues and reports of
runs: about a third by a value in a configuration, the others by a part of their own or by data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.faults.catalogue import Fault
from tests.faults.recipes import (
    INTERRUPTED,
    NETWORKS,
    OBJECTIVES,
    OPTIMIZERS,
    PACKINGS,
    RANKS,
    RECIPES,
    RESUMED,
    SCHEDULES,
)

GPT, LLAMA, MOE = RECIPES
ADAMW = (GPT, MOE)
BOTH_RANKS = tuple(f"{name}-{RANKS}" for name in RECIPES)
RESUMES = tuple(f"{name}-{RESUMED}" for name in RECIPES)
PHASE, SHARD = 20, 21
"""The step in which a second phase begins, and the one in which a damaged shard does."""


def _own(part: str, name: str, **arguments: Any) -> dict[str, Any]:
    """Returns a part of a configuration that names a class of `broken_seventh_*`."""
    return {"class_path": f"tests.faults.broken_seventh_{part}.{name}", "init_args": arguments}


def _in(names: tuple[str, ...], make: Callable[[str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns overlays of recipes and variants, made for the recipe."""
    return {name: make(name.partition("-")[0]) for name in names}


def _values(overlay: dict[str, Any], names: tuple[str, ...] = RECIPES) -> dict[str, dict[str, Any]]:
    return _in(names, lambda name: overlay)


def _model(part: str, names: tuple[str, ...] = RECIPES, **arguments: Any) -> dict[str, dict[str, Any]]:
    return _values({"model": {part: {"init_args": arguments}}}, names)


def _data(names: tuple[str, ...] = RECIPES, **arguments: Any) -> dict[str, dict[str, Any]]:
    return _values({"data": {"init_args": arguments}}, names)


def _network(prefix: str, names: tuple[str, ...] = RECIPES, **sizes: Any) -> dict[str, dict[str, Any]]:
    def make(name: str) -> dict[str, Any]:
        given = NETWORKS[name]
        return {
            "model": {"network": _own("networks", prefix + given["class_path"], **given["init_args"] | sizes)}
        }

    return _in(names, make)


def _loss(kind: str, names: tuple[str, ...] = RECIPES, **arguments: Any) -> dict[str, dict[str, Any]]:
    """Returns overlays with a loss of one's own; the loss of routing stays around it."""

    def make(name: str) -> dict[str, Any]:
        own, given = _own("losses", kind, **arguments), OBJECTIVES[name]
        if "objective" in given.get("init_args", {}):
            own = given | {"init_args": given["init_args"] | {"objective": own}}
        return {"model": {"objective": own}}

    return _in(names, make)


def _optimizer(prefix: str, names: tuple[str, ...] = RECIPES) -> dict[str, dict[str, Any]]:
    def make(name: str) -> dict[str, Any]:
        given = OPTIMIZERS[name]
        return {"model": {"optimizer": _own("steps", prefix + given["class_path"], **given["init_args"])}}

    return _in(names, make)


def _schedule(prefix: str, names: tuple[str, ...] = RECIPES, **more: Any) -> dict[str, dict[str, Any]]:
    def make(name: str) -> dict[str, Any]:
        given = SCHEDULES[name]
        own = _own("steps", prefix + given["class_path"], **given["init_args"] | more)
        return {"model": {"lr_scheduler": own}}

    return _in(names, make)


def _packing(kind: str, names: tuple[str, ...] = RECIPES, **arguments: Any) -> dict[str, dict[str, Any]]:
    def make(name: str) -> dict[str, Any]:
        own = _own("rows", kind, packing=PACKINGS[name], **arguments)
        return {"data": {"init_args": {"packing": own}}}

    return _in(names, make)


def _callback(item: dict[str, Any], names: tuple[str, ...] = RECIPES) -> dict[str, dict[str, Any]]:
    return _values({"trainer": {"callbacks+": [item]}}, names)


def _rates(factor: float) -> dict[str, dict[str, Any]]:
    return _in(
        RECIPES,
        lambda name: {
            "model": {"optimizer": {"init_args": {"lr": OPTIMIZERS[name]["init_args"]["lr"] * factor}}}
        },
    )


def _both(*faults: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the overlays of several helpers, for the recipes that the first has."""
    first, *others = faults
    return {name: _merged(first[name], *(other[name] for other in others)) for name in first}


def _merged(one: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    found = dict(one)
    for other in others:
        for key, value in other.items():
            nested = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = _merged(found[key], value) if nested else value
    return found


_BY_VALUES = (
    Fault("s7 rate of another batch size", "rate_too_high", True, _rates(20)),
    Fault(
        "s7 clipping of another code base",
        "clip_too_low",
        True,
        _values(
            {
                "trainer": {"gradient_clip_val": 0.01},
                "model": {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.3}}},
            }
        ),
    ),
    Fault(
        "s7 warm-up of a longer run",
        "warmup_too_long",
        True,
        _model("lr_scheduler", ADAMW, warmup_steps=45),
    ),
    Fault("s7 decay in percent", "weight_decay_too_large", True, _model("optimizer", weight_decay=10.0)),
    Fault("s7 epsilon of an image network", "epsilon_too_large", True, _model("optimizer", eps=0.1)),
    Fault(
        "s7 keep probability as dropout",
        "dropout_too_high",
        True,
        _model("network", (GPT, f"{GPT}-{RANKS}"), dropout=0.8),
    ),
    Fault(
        "s7 batches of a test run",
        "over_fitting",
        True,
        _values({"trainer": {"overfit_batches": 2}}),
    ),
    Fault("s7 shuffle switched off", "not_shuffled", True, _data((*RECIPES, BOTH_RANKS[0]), shuffle=False)),
    Fault(
        "s7 loss scale with a sign in its exponent",
        "fp16_underflow",
        True,
        _values(
            {
                "trainer": {
                    "plugins": [
                        {
                            "class_path": "FP16Mixed",
                            "init_args": {"init_scale": 2.0**-16, "growth_interval": 10000},
                        }
                    ]
                }
            },
            ADAMW,
        ),
    ),
    Fault(
        "s7 freezing left from fine-tuning",
        "frozen_weights",
        True,
        _callback({"class_path": "Freeze", "init_args": {"last_blocks": 1}}),
    ),
    Fault(
        "s7 embeddings as torch begins them",
        "bad_initialisation",
        True,
        _model("network", (LLAMA, MOE), init_std={"embed_tokens": 1.0, "lm_head": 1.0}),
    ),
)

_BY_NETWORKS = (
    Fault(
        "s7 cosines at the limit of their scale", "attention_collapse", True, _network("Cosine", (LLAMA, MOE))
    ),
    Fault("s7 shifted ReLU", "dead_units", True, _network("ShiftedReLU", (GPT, LLAMA))),
    Fault(
        "s7 deep without norms",
        "exploding_gradients",
        True,
        _network("WithoutNorms", (GPT,), n_layer=10, init="he"),
    ),
    Fault("s7 token shift the other way", "sees_future", True, _network("TokenShift")),
    Fault("s7 zeros twice", "dead_block", True, _network("ZeroTwice", (GPT, LLAMA))),
)

_BY_LOSSES = (
    Fault("s7 loss scaled by hand", "gradient_scale", True, _loss("ScaledByHand")),
    Fault("s7 labels shifted twice", "labels_shifted", True, _loss("ShiftsLabels")),
    Fault("s7 z-loss subtracted", "logit_growth", True, _loss("MinusZLoss", coefficient=0.05)),
    Fault(
        "s7 mean of no answer",
        "non_finite",
        True,
        _loss("MeanOfAnswers", (*RECIPES, BOTH_RANKS[0]), marker=221),
    ),
    Fault(
        "s7 balancing subtracted",
        "dead_experts",
        True,
        _values(
            {
                "model": {
                    "objective": _own(
                        "losses",
                        "MinusBalance",
                        objective={"class_path": "CausalLM"},
                        load_balancing=0.1,
                        z_loss=0.001,
                    )
                }
            },
            (MOE,),
        ),
    ),
)

_BY_STEPS = (
    Fault(
        "s7 rates as factors",
        "rate_too_low",
        True,
        _values({"model": {"lr_scheduler": _own("steps", "rates_as_factors")}}),
    ),
    Fault(
        "s7 schedule counts processes",
        "schedule_ends_early",
        True,
        _schedule("StepsPerProcess", min_lr_ratio=0.0),
    ),
    Fault(
        "s7 second phase",
        "spike_by_optimizer",
        True,
        _schedule("SecondPhase", begins=PHASE, ratio=25.0),
        onset=PHASE,
        also=("rate_too_high",),
    ),
    Fault(
        "s7 resumed without moments",
        "optimizer_state_lost",
        True,
        _optimizer("LoadsGroupsOnly", RESUMES),
        onset=INTERRUPTED + 1,
    ),
    Fault("s7 gradients cleared once", "stale_gradients", True, _optimizer("ClearsOnce")),
    Fault(
        "s7 contiguous after the optimizer",
        "weights_not_updated",
        True,
        _callback(_own("steps", "Contiguous")),
    ),
)

_BY_DATA = (
    Fault(
        "s7 index parsed for each batch",
        "data_bound",
        True,
        _packing("ParsesIndex", (*ADAMW, f"{GPT}-{RANKS}"), entries=200000),
    ),
    Fault(
        "s7 slow disk of one rank",
        "data_bound",
        True,
        _packing("SlowDisk", (f"{GPT}-{RANKS}", f"{MOE}-{RANKS}"), seconds=0.04),
        also=("straggler",),
    ),
    Fault(
        "s7 consent pages",
        "duplicates",
        True,
        _data(reader=_own("rows", "ConsentPages")),
    ),
    Fault("s7 answers without their marker", "few_labels", True, _packing("AnswersOnly", marker=26)),
    Fault(
        "s7 shard of another width",
        "spike_by_data",
        True,
        _packing("WrongWidth", ADAMW, first=SHARD, last=SHARD + 1),
        onset=SHARD,
    ),
    Fault("s7 validation of another tokenizer", "tokenizer_mismatch", True, _packing("OffsetValidation")),
    Fault(
        "s7 validation on training rows",
        "validation_leak",
        True,
        _both(_packing("TrainForBoth"), _data(source="FOLDER/topics-20.jsonl", validation_fraction=0.3)),
    ),
)

SEVENTH_UNSEEN: tuple[Fault, ...] = (*_BY_VALUES, *_BY_NETWORKS, *_BY_LOSSES, *_BY_STEPS, *_BY_DATA)
