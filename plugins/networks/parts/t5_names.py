"""T5 in transformers: names and keys of version 1.0 and of 1.1, whose MLP has a gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from core.errors import ConfigError
from toolkit.hugging_face import HuggingFaceForm, Rename

FEED_FORWARD = {"relu": "relu", "gated-gelu": "gated_gelu"}
"""Names of transformers -> ours."""


def _renames(gated: bool) -> Iterator[Rename]:
    yield Rename("embed_tokens", "shared")
    yield Rename("lm_head", "lm_head")
    yield Rename("encoder_norm", "encoder.final_layer_norm")
    yield Rename("norm", "decoder.final_layer_norm")
    parts = {"encoder": ("attention", "mlp"), "decoder": ("attention", "cross", "mlp")}
    for stack, names in parts.items():
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        yield Rename(f"{stack}_bias.table", bias)
        for place, name in enumerate(names):
            ours, theirs = f"{stack}_layers.*.{name}", f"{stack}.block.*.layer.{place}"
            yield Rename(f"{ours}_norm", f"{theirs}.layer_norm")
            if name == "mlp":
                yield Rename(f"{ours}.down_proj", f"{theirs}.DenseReluDense.wo")
                yield Rename(f"{ours}.up_proj", f"{theirs}.DenseReluDense.{'wi_1' if gated else 'wi'}")
                yield Rename(f"{ours}.gate_proj", f"{theirs}.DenseReluDense.wi_0")
            else:
                kind = "EncDecAttention" if name == "cross" else "SelfAttention"
                for leaf in "qkvo":
                    yield Rename(f"{ours}.{leaf}_proj", f"{theirs}.{kind}.{leaf}")


def _to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in FEED_FORWARD.items()}
    head_dim = arguments["head_dim"] or arguments["n_embd"] // arguments["n_head"]
    start = arguments[
        "decoder_start_id"
    ]  # T5's is the id of padding, without which transformers shifts no labels
    return {"feed_forward_proj": names[arguments["activation"]], "d_kv": head_dim, "pad_token_id": start}


def _to_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config["feed_forward_proj"]
    if kind not in FEED_FORWARD:
        raise ConfigError(f"config.json: feed_forward_proj is {kind!r}; T5 has {', '.join(FEED_FORWARD)}.")
    return {"activation": FEED_FORWARD[kind], "head_dim": config["d_kv"]}


def _form(gated: bool) -> HuggingFaceForm:
    return HuggingFaceForm(
        architecture="T5ForConditionalGeneration",
        model_type="t5",
        renames=tuple(_renames(gated)),
        arguments={
            "vocab_size": "vocab_size",
            "d_model": "n_embd",
            "d_ff": "intermediate_size",
            "num_layers": "n_layer",
            "num_decoder_layers": "n_decoder_layer",
            "num_heads": "n_head",
            "relative_attention_num_buckets": "buckets",
            "relative_attention_max_distance": "max_distance",
            "dropout_rate": "dropout",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
            "decoder_start_token_id": "decoder_start_id",
        },
        defaults={
            "d_kv": 64,
            "num_decoder_layers": None,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "dropout_rate": 0.1,
            "layer_norm_epsilon": 1e-6,
            "feed_forward_proj": "relu",
            "tie_word_embeddings": True,
            "decoder_start_token_id": 0,
        },
        to_config=_to_config,
        to_arguments=_to_arguments,
        copies=("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    )


PLAIN, GATED = _form(gated=False), _form(gated=True)
"""Of the MLP without a gate, and with one."""
