"""GPT in transformers: as GPT-2, or as Llama; names, keys, and which options of GPT they have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError
from plugins.networks.parts.families import DEFAULTS, ENDS, PRE_NORMS, SIZES, SWIGLU
from toolkit.hugging_face import HuggingFaceForm, Rename

ONLY = {"position": "learned", "norm": "layernorm", "norm_position": "pre", "bias": True}
"""Arguments of GPT that have one value in GPT-2."""

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
"""Names of transformers -> ours; the first of several is what is written."""

DROPOUTS = {
    "embd_pdrop": "embedding_dropout",
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "residual_dropout",
}


def _to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    heads = arguments["n_head"]
    found = {name: arguments[name] for name in ONLY}
    found["n_kv_head"] = arguments["n_kv_head"] or heads
    for name, value in (ONLY | {"n_kv_head": heads}).items():
        if found[name] != value:
            raise ConfigError(
                f"GPT: {name}={found[name]!r} has no form in transformers' GPT-2, which has {value!r}."
            )
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    activation = arguments["activation"]
    if activation not in names:
        raise ConfigError(f"GPT: activation={activation!r} has no form in transformers' GPT-2.")
    rates = {
        key: arguments["dropout"] if arguments[name] is None else arguments[name]
        for key, name in DROPOUTS.items()
    }
    return {"activation_function": names[activation], **rates}


def _to_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    activation = config["activation_function"]
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: activation_function is {activation!r}; GPT has {', '.join(ACTIVATIONS)}."
        )
    rates = {name: config[key] for key, name in DROPOUTS.items()}
    return {**ONLY, "activation": ACTIVATIONS[activation], **rates}


LLAMAS = {"position": "rotary", "norm": "rmsnorm", "norm_position": "pre", "activation": "swiglu"}
"""Arguments of GPT that have one value in Llama."""


def swiglu_width(n_embd: int) -> int:
    """Returns the width of the MLP with swiglu that GPT takes by default: 8/3 C rounded up to a multiple of 64."""
    return math.ceil(8 * n_embd / (3 * 64)) * 64


def _to_llama(arguments: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in LLAMAS.items():
        if arguments[name] != value:
            raise ConfigError(
                f"GPT: {name}={arguments[name]!r} has no form in transformers' Llama, which has {value!r}."
            )
    heads, own = arguments["n_head"], arguments["attention_dropout"]
    return {
        "num_key_value_heads": arguments["n_kv_head"] or heads,
        "head_dim": arguments["n_embd"] // heads,
        "intermediate_size": arguments["intermediate_size"] or swiglu_width(arguments["n_embd"]),
        "attention_dropout": arguments["dropout"] if own is None else own,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(arguments["rope_theta"])},
    }


_DERIVED = ("intermediate_size", "rms_norm_eps", "attention_dropout")

AS_LLAMA = HuggingFaceForm(
    architecture="LlamaForCausalLM",
    model_type="llama",
    renames=ENDS + PRE_NORMS,
    arguments={key: name for key, name in SIZES.items() if key not in _DERIVED}
    | {"attention_bias": "bias", "mlp_bias": "bias"},
    defaults=DEFAULTS,
    constants=SWIGLU | {"rms_norm_eps": 1e-5},
    to_config=_to_llama,
)
"""For an export, and for weights to start from: an import of a Llama makes the network Llama."""

GPT2 = HuggingFaceForm(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    renames=(
        Rename("embed_tokens", "transformer.wte"),
        Rename("embed_positions", "transformer.wpe"),
        Rename("layers.*.attention_norm", "transformer.h.*.ln_1"),
        Rename("layers.*.mlp_norm", "transformer.h.*.ln_2"),
        Rename(
            (
                "layers.*.attention.q_proj",
                "layers.*.attention.k_proj",
                "layers.*.attention.v_proj",
            ),
            "transformer.h.*.attn.c_attn",
            transposed=True,
        ),
        Rename("layers.*.attention.o_proj", "transformer.h.*.attn.c_proj", transposed=True),
        Rename("layers.*.mlp.up_proj", "transformer.h.*.mlp.c_fc", transposed=True),
        Rename("layers.*.mlp.down_proj", "transformer.h.*.mlp.c_proj", transposed=True),
        Rename("norm", "transformer.ln_f"),
        Rename("lm_head", "lm_head"),
    ),
    arguments={
        "vocab_size": "vocab_size",
        "n_embd": "n_embd",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_inner": "intermediate_size",
        "n_positions": "max_sequence_length",
        "tie_word_embeddings": "tie_embeddings",
    },
    defaults={
        "n_inner": None,
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
        **dict.fromkeys(DROPOUTS, 0.1),
    },
    constants={
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    to_config=_to_config,
    to_arguments=_to_arguments,
    otherwise=AS_LLAMA,
)
