"""Further faults, written after the rules were mended and run once: the blind test of these rules."""

from __future__ import annotations

from tests.faults import catalogue as made
from tests.faults.catalogue import DOCUMENTS, ONSET, Fault
from tests.faults.recipes import RECIPES

LATE = ONSET + 8


def _everywhere(
    bug: str, only: tuple[str, ...] = RECIPES, **arguments: object
) -> dict[str, dict[str, object]]:
    name = arguments.pop("part", "Gradients")
    return dict.fromkeys(only, made.foreign_callback(str(name), bug=bug, **arguments))


BLIND: tuple[Fault, ...] = (
    Fault("rate x15", "rate_too_high", True, made.rate(15)),
    Fault("rate /200", "rate_too_low", True, made.rate(1 / 200)),
    Fault("no warm-up, five times the rate", "no_warmup", True, made.no_warmup(5, 0)),
    Fault(
        "schedule ends at half", "schedule_ends_early", True, made.schedule(total_steps=24, min_lr_ratio=0.0)
    ),
    Fault("epsilon 0.3", "epsilon_too_large", True, made.optimizer(("gpt", "moe"), eps=0.3)),
    Fault("weight decay 30", "weight_decay_too_large", True, made.optimizer(weight_decay=30.0)),
    Fault("clipping at 1e-7", "clip_too_low", True, made.trainer(gradient_clip_val=1e-7)),
    Fault(
        "optimizer forgets every 11 steps",
        "optimizer_state_lost",
        True,
        _everywhere("forgets", part="Optimizing", every=11),
    ),
    Fault(
        "one step at 1000 times the rate",
        "spike_by_optimizer",
        True,
        _everywhere("rate", part="Optimizing", amount=1000.0, first=LATE, last=LATE),
        LATE,
    ),
    Fault("a twentieth of the gradients", "gradient_scale", True, _everywhere("scaled", amount=0.05)),
    Fault("gradients kept from step 10 on", "stale_gradients", True, _everywhere("kept", first=10), 10),
    Fault("gradients in fp16, a smaller scale", "fp16_underflow", True, _everywhere("half", amount=1e-6)),
    Fault("NaN early on", "non_finite", True, _everywhere("nan", amount=2.0, first=9, last=9), 9),
    Fault(
        "gradients grow by block",
        "exploding_gradients",
        True,
        _everywhere("deep_gain", part="Initialised", amount=300.0),
    ),
    Fault(
        "embedding frozen",
        "frozen_weights",
        True,
        _everywhere("frozen", part="Frozen", pattern="embed_tokens"),
    ),
    Fault(
        "optimizer without attention",
        "weights_not_updated",
        True,
        _everywhere("forgotten", part="Frozen", pattern="attention"),
    ),
    Fault(
        "weights 40 times too large",
        "bad_initialisation",
        True,
        _everywhere("scaled", part="Initialised", amount=40.0),
    ),
    Fault(
        "weights 100 times too small",
        "bad_initialisation",
        True,
        _everywhere("scaled", part="Initialised", amount=0.01),
    ),
    Fault(
        "units far, far below zero",
        "dead_units",
        True,
        _everywhere("dead", ("gpt",), part="Initialised", amount=80.0),
    ),
    Fault(
        "attention on a token or two",
        "attention_collapse",
        True,
        _everywhere("sharp_attention", ("gpt", "llama"), part="Initialised", amount=40.0),
    ),
    Fault(
        "logits grow from step 28 on",
        "logit_growth",
        True,
        dict.fromkeys(RECIPES, made.foreign_callback("Louder", factor=1.4, first=LATE)),
        LATE,
    ),
    Fault("two experts are never chosen", "dead_experts", True, made.unbalanced("masked_experts", 2)),
    Fault("labels three tokens ahead", "labels_shifted", True, made.packing("shifted", 3)),
    Fault("hardly any labels", "few_labels", True, made.packing("few_labels", 0.03)),
    Fault("each row twice", "duplicates", True, made.packing("repeated", 2)),
    Fault("positions all zero", "position_ids", True, made.packing("positions", 0, only=DOCUMENTS)),
    Fault(
        "validation is four fifths training",
        "validation_leak",
        True,
        made.packing("validation_in_training", 0.8),
    ),
    Fault("ids of another vocabulary", "tokenizer_mismatch", True, made.packing("permuted", 40)),
    Fault(
        "garbage in one batch",
        "spike_by_data",
        True,
        dict.fromkeys(RECIPES, made.foreign_callback("Garbage", first=LATE, last=LATE)),
        LATE,
    ),
    Fault("very slow reading", "data_bound", True, made.packing("slow", 80)),
    Fault(
        "dropout 0.7",
        "dropout_too_high",
        True,
        {"gpt": {"model": {"network": {"init_args": {"dropout": 0.7}}}}},
    ),
)
