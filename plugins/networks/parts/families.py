"""What the families of Llama's kind have in common with each other in transformers: names, keys, rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError
from plugins.networks.parts.positions import SCALINGS
from toolkit.hugging_face import Rename

ENDS = (
    Rename("embed_tokens", "model.embed_tokens"),
    Rename("norm", "model.norm"),
    Rename("lm_head", "lm_head"),
    Rename("layers.*.attention", "model.layers.*.self_attn"),
    Rename("layers.*.mlp", "model.layers.*.mlp"),
)
"""Lines of all families; the names of projections and of norms of queries and keys are the same."""

PRE_NORMS = (
    Rename("layers.*.attention_norm", "model.layers.*.input_layernorm"),
    Rename("layers.*.mlp_norm", "model.layers.*.post_attention_layernorm"),
)

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_sequence_length",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "attention_dropout": "attention_dropout",
}
"""Keys of config.json that all families have -> arguments."""

SWIGLU = {"hidden_act": "silu"}
"""The activation of all families but Gemma."""

DEFAULTS = {
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_key_value_heads": None,
}
"""What transformers takes for keys that config.json leaves out."""


def to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of config.json that follow from several arguments: heads, and `rope_parameters` (transformers 5)."""
    heads = arguments["n_head"]
    found = {
        "num_key_value_heads": arguments["n_kv_head"] or heads,
        "head_dim": arguments.get("head_dim") or arguments["n_embd"] // heads,
    }
    scaling = dict(arguments["rope_scaling"] or {})
    theta = float(arguments["rope_theta"])
    return found | {"rope_parameters": {"rope_type": "default"} | scaling | {"rope_theta": theta}}


def to_config_of_whole_heads(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """As :func:`to_config`, for the families of which transformers refuses a width that heads do not divide.

    Raises:
        ConfigError: If `n_embd` is not a multiple of `n_head`.
    """
    width, heads = arguments["n_embd"], arguments["n_head"]
    if width % heads:
        raise ConfigError(
            f"n_embd={width} is not a multiple of n_head={heads}, which transformers needs here."
        )
    return to_config(arguments)


def to_arguments(config: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """Returns the arguments that :func:`to_config` makes keys of, and reads the keys of transformers 4, too.

    Args:
        config: A config.json.
        theta: Transformers' default of `rope_theta`.

    Raises:
        ConfigError: If positions are stretched in a way that is none of `SCALINGS`, or turn only some of the features.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    sizes = {"n_kv_head": config.get("num_key_value_heads"), "head_dim": config.get("head_dim")}
    return sizes | read_rope(rope, config, theta)


def read_rope(rope: Mapping[str, Any], config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` for one entry of rotary positions in a config.json."""
    found = dict(rope)
    base = found.pop("rope_theta", None) or config.get("rope_theta") or theta
    kind = found.pop("rope_type", None) or found.get("type") or "default"
    found.pop("type", None)
    part = found.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        raise ConfigError(f"config.json: partial_rotary_factor is {part}; here positions turn all features.")
    if kind == "default":
        return {"rope_theta": float(base), "rope_scaling": None}
    if kind not in SCALINGS:
        raise ConfigError(f"config.json: rope_type is {kind!r}; {', '.join(SCALINGS)} can be read.")
    if "original_max_position_embeddings" in SCALINGS[kind][0]:
        found.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return {"rope_theta": float(base), "rope_scaling": {"rope_type": kind, **found}}


def check_layer_types(config: Mapping[str, Any], expected: list[str], because: str) -> None:
    """Raises a ConfigError if config.json has `layer_types` other than those that its other keys say."""
    found = config.get("layer_types")
    if found is not None and list(found) != expected:
        index = next(
            (i for i, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other), 0
        )
        raise ConfigError(f"config.json: layer {index} is {found[index]!r} in layer_types; {because}.")


def windows_to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Qwen's keys for the layers from `max_window_layers` on, which have a window."""
    window, first = arguments["sliding_window"], arguments["max_window_layers"]
    types = layer_types(arguments["n_layer"], first if window else None)
    keys = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types}
    return keys | {"max_window_layers": first}


def windows_to_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `sliding_window` and `max_window_layers` for Qwen's keys."""
    window = config["sliding_window"] if config["use_sliding_window"] else None
    first = config["max_window_layers"]
    expected = layer_types(config["num_hidden_layers"], first if window else None)
    check_layer_types(config, expected, "only windows from max_window_layers on can be read")
    return {"sliding_window": window, "max_window_layers": first}


def layer_types(n_layer: int, first: int | None) -> list[str]:
    """Returns transformers' kinds of layers, those from `first` on with a window."""
    return [
        "full_attention" if first is None or index < first else "sliding_attention"
        for index in range(n_layer)
    ]
