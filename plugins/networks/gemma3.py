"""Gemma 3: blocks with a window between those that see all tokens, norms on both sides, soft caps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.networks.parts.arguments import check_sizes
from plugins.networks.parts.block import Block
from plugins.networks.parts.decoder import Decoder, Layer
from plugins.networks.parts.families import (
    DEFAULTS,
    ENDS,
    SIZES,
    check_layer_types,
    read_rope,
    to_arguments,
    to_config_of_whole_heads,
)
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.mlp import MLP
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.positions import Rope
from toolkit.hugging_face import HuggingFaceForm, Rename


def _layer_types(n_layer: int, global_every: int) -> list[str]:
    return ["sliding_attention" if (i + 1) % global_every else "full_attention" for i in range(n_layer)]


def _to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if arguments["attention_soft_cap"] is not None:
        raise ConfigError(
            "Gemma3: attention_soft_cap has no form in transformers, whose Gemma 3 leaves it out."
        )
    found = to_config_of_whole_heads(arguments)
    local = {"rope_type": "default", "rope_theta": float(arguments["local_rope_theta"])}
    rope = {"full_attention": found["rope_parameters"], "sliding_attention": local}
    types = _layer_types(arguments["n_layer"], arguments["global_every"])
    return found | {"rope_parameters": rope, "layer_types": types}


def _to_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise ConfigError(f"config.json: {key} is {config[key]!r}; Gemma3 is read without it.")
    n_layer, types = config["num_hidden_layers"], config.get("layer_types")
    every = config.get("sliding_window_pattern") or 6
    if types is not None:
        every = types.index("full_attention") + 1 if "full_attention" in types else n_layer + 1
        check_layer_types(config, _layer_types(n_layer, every), f"Gemma3 has one that sees all in {every}")
    own = config.get("rope_parameters") or {}
    local = own.get("sliding_attention") or {"rope_theta": config.get("rope_local_base_freq", 10000.0)}
    rope = own.get("full_attention") or config.get("rope_scaling") or {}
    found = to_arguments(dict(config) | {"rope_parameters": rope}, theta=1000000.0)
    if read_rope(local, {}, 10000.0)["rope_scaling"] is not None:
        raise ConfigError(
            "config.json: Gemma3 is read with rotary positions that are not stretched in local layers."
        )
    return found | {"global_every": every, "local_rope_theta": float(local.get("rope_theta", 10000.0))}


@technique(paper="Gemma 3, arXiv:2503.19786; soft caps: Gemma 2, arXiv:2408.00118")
class Gemma3(Decoder):
    """Gemma 3, text only, and all of its shape; the defaults are Gemma 3 1B's.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_head: Number of query heads.
        n_embd: Width C.
        max_sequence_length: Largest T.
        n_kv_head: Number of key-value heads, a divisor of `n_head`; None: `n_head`.
        head_dim: Features of a head, an even number; None: C / `n_head`.
        intermediate_size: Width of the MLP.
        rope_theta: Base of the wavelengths of rotary positions in global blocks.
        local_rope_theta: The same in blocks with a window.
        rope_scaling: How they are stretched: `rope_type` is linear, llama3 or yarn, the other keys are those of
            transformers' config.json. None: not at all.
        sliding_window: Tokens that a query sees in a local block, itself included.
        global_every: Every how many blocks one sees all tokens: with 6 blocks 5, 11, 17...
        query_pre_attn_scalar: Scores are divided by its root, where others take `head_dim`.
        attention_soft_cap: Scores are kept within this, as in Gemma 2; None: not at all. Attention is then written out,
            with all scores in memory.
        final_soft_cap: Logits are kept within this, as in Gemma 2; None: not at all.
        norm_eps: Epsilon of the norms.
        tie_embeddings: Whether the head uses the weight of the token embedding.
        attention_dropout: Dropout on the attention weights, after the softmax.
        init: Of matrices. "llama": N(0, 0.02); "gpt2": N(0, 0.02 / sqrt(2 n_layer)) for the two per block that add to
            the residual stream; "small": N(0, sqrt(2 / (5 C))), and N(0, 2 / (n_layer sqrt(C))) for those two;
            "mup": N(0, 1 / sqrt(inputs)), embeddings N(0, 1), the head 0: arXiv:2203.03466.
        init_std: Patterns of module names -> standard deviation, over `init`: `{embed_tokens: 0.01}`.

    Raises:
        ConfigError: If a value is out of range or a size does not divide another.

    Example:
        model:
          network:
            class_path: Gemma3
            init_args: {n_layer: 6, n_head: 4, n_kv_head: 1, n_embd: 384, head_dim: 96, query_pre_attn_scalar: 96, intermediate_size: 1024, max_sequence_length: 1024, sliding_window: 256}
    """

    deferred_init = True

    hugging_face = HuggingFaceForm(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        renames=(
            *ENDS,
            Rename("layers.*.attention_norm", "model.layers.*.input_layernorm"),
            Rename("layers.*.attention_out_norm", "model.layers.*.post_attention_layernorm"),
            Rename("layers.*.mlp_norm", "model.layers.*.pre_feedforward_layernorm"),
            Rename("layers.*.mlp_out_norm", "model.layers.*.post_feedforward_layernorm"),
        ),
        arguments=SIZES
        | {
            "sliding_window": "sliding_window",
            "query_pre_attn_scalar": "query_pre_attn_scalar",
            "final_logit_softcapping": "final_soft_cap",
        },
        defaults=DEFAULTS
        | {
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": None,
        },
        constants={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        to_config=_to_config,
        to_arguments=_to_arguments,
    )

    def __init__(
        self,
        vocab_size: int = 262144,
        n_layer: int = 26,
        n_head: int = 4,
        n_embd: int = 1152,
        max_sequence_length: int = 32768,
        n_kv_head: int | None = 1,
        head_dim: int | None = 256,
        intermediate_size: int = 6912,
        rope_theta: float = 1000000.0,
        local_rope_theta: float = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        sliding_window: int | None = 512,
        global_every: int = 6,
        query_pre_attn_scalar: int = 256,
        attention_soft_cap: float | None = None,
        final_soft_cap: float | None = None,
        norm_eps: float = 1e-6,
        tie_embeddings: bool = True,
        attention_dropout: float = 0.0,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        sizes = check_sizes(Gemma3, locals())
        local = Layer(Rope(sizes["head_dim"], local_rope_theta), sliding_window)
        everywhere = Layer(Rope(sizes["head_dim"], rope_theta, rope_scaling))
        qk_norm = partial(new_norm, "gemma", eps=norm_eps)
        scale = None if query_pre_attn_scalar == sizes["head_dim"] else query_pre_attn_scalar**-0.5
        super().__init__(
            **sizes,
            layers=[local if (i + 1) % global_every else everywhere for i in range(n_layer)],
            embedding_scale=math.sqrt(n_embd),
            final_soft_cap=final_soft_cap,
        )
        norm = partial(new_norm, "gemma", n_embd, norm_eps)

        def new_block(index: int) -> Block:
            attention = self.new_attention(
                False,
                attention_dropout,
                qk_norm="head",
                new_norm=qk_norm,
                query_scale=scale,
                soft_cap=attention_soft_cap,
            )
            mlp = MLP(n_embd, intermediate_size, "gelu_tanh", False, gated=True)
            return Block(attention, mlp, norm, "sandwich")

        self.build(new_block, norm, tie_embeddings)
