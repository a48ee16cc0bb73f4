"""OLMo Hybrid: three blocks of gated DeltaNet for each of attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from core.errors import ConfigError
from core.technique import technique
from plugins.networks.parts.arguments import check_sizes
from plugins.networks.parts.block import Block
from plugins.networks.parts.decoder import Layer
from plugins.networks.parts.families import DEFAULTS, ENDS, SIZES, SWIGLU, check_layer_types, read_rope
from plugins.networks.parts.gated_delta_net import GatedDeltaNet
from plugins.networks.parts.hybrid_decoder import HybridDecoder
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.mlp import MLP
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.positions import Rope
from toolkit.hugging_face import HuggingFaceForm, Rename

HEAD_NORM_EPS = 1e-5
"""Of the norm of heads in gated DeltaNet, whatever the other norms have."""


def _layer_types(n_layer: int, attention_every: int) -> list[str]:
    return ["linear_attention" if (i + 1) % attention_every else "full_attention" for i in range(n_layer)]


def _to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    heads, theta = arguments["n_head"], arguments["rope_theta"]
    rope = {"rope_type": "default", "rope_theta": None if theta is None else float(theta)}
    return {
        "num_key_value_heads": arguments["n_kv_head"] or heads,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "rope_parameters": rope,
        "layer_types": _layer_types(arguments["n_layer"], arguments["attention_every"]),
    }


def _to_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    n_layer, heads = config["num_hidden_layers"], config["num_attention_heads"]
    types, every = config.get("layer_types"), 4
    if types is not None:
        every = types.index("full_attention") + 1 if "full_attention" in types else n_layer + 1
        check_layer_types(config, _layer_types(n_layer, every), f"OLMoHybrid has attention in one of {every}")
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        if config.get(key) not in (None, heads):
            raise ConfigError(
                f"config.json: {key} is {config[key]}; OLMoHybrid is read with {heads}, as attention."
            )
    rope = config.get("rope_parameters") or {}
    found: dict[str, Any] = {"rope_theta": None}
    if rope.get("rope_theta") is not None:
        found = read_rope(rope, config, 10000.0)
        if found.pop("rope_scaling") is not None:
            raise ConfigError("config.json: OLMoHybrid is read with rotary positions that are not stretched.")
    return found | {"attention_every": every, "n_kv_head": config.get("num_key_value_heads")}


class LinearAttentionBlock(nn.Module):
    """Gated DeltaNet, then an MLP, each added to what it was given, with a norm before it."""

    def __init__(self, mixer: GatedDeltaNet, mlp: nn.Module, attention_norm: nn.Module, mlp_norm: nn.Module):
        super().__init__()
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm
        self.linear_attention, self.mlp = mixer, mlp

    def forward(self, x: Tensor, rope: None, mask: Tensor | None, cache: Any) -> Tensor:
        """Maps x (B, T, C) to (B, T, C); the other arguments go to the mixer."""
        x = x + self.linear_attention(self.attention_norm(x), rope, mask, cache)
        return x + self.mlp(self.mlp_norm(x))


@technique(paper="OLMo Hybrid (allenai/Olmo-Hybrid-7B); gated DeltaNet, arXiv:2412.06464")
class OLMoHybrid(HybridDecoder):
    """OLMo Hybrid and all of its shape; the defaults are Olmo Hybrid 7B's.

    Attention has norms as OLMo 2 and, as released, no positions: the order of tokens is in gated DeltaNet's states.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_head: Number of query heads, and of heads of gated DeltaNet.
        n_embd: Width C, a multiple of `n_head`.
        max_sequence_length: Largest T.
        n_kv_head: Number of key-value heads of attention, a divisor of `n_head`; None: `n_head`.
        intermediate_size: Width of the MLP.
        attention_every: Every how many blocks one has attention: with 4 blocks 3, 7, 11...
        key_dim: Features of a key of gated DeltaNet.
        value_dim: Features of its values.
        negative_eigenvalues: Whether beta is in (0, 2), and not in (0, 1); arXiv:2411.12537.
        conv_kernel: Tokens that a short convolution sees.
        rope_theta: Base of the wavelengths of rotary positions in attention; None: no positions.
        norm_eps: Epsilon of the norms.
        tie_embeddings: Whether the head uses the weight of the token embedding.
        init: Of matrices. "llama": N(0, 0.02); "gpt2": N(0, 0.02 / sqrt(2 n_layer)) for the two per block that add to
            the residual stream; "small": N(0, sqrt(2 / (5 C))), and N(0, 2 / (n_layer sqrt(C))) for those two.
        init_std: Patterns of module names -> standard deviation, over `init`: `{embed_tokens: 0.01}`.

    Raises:
        ConfigError: If a value is out of range or a size does not divide another.

    Example:
        model:
          network:
            class_path: OLMoHybrid
            init_args: {n_layer: 4, n_head: 4, n_embd: 256, key_dim: 48, value_dim: 96, intermediate_size: 768, max_sequence_length: 1024}
    """

    deferred_init = True

    hugging_face = HuggingFaceForm(
        architecture="OlmoHybridForCausalLM",
        model_type="olmo_hybrid",
        renames=(
            *ENDS,
            Rename("layers.*.linear_attention", "model.layers.*.linear_attn"),
            Rename("layers.*.attention_norm", "model.layers.*.attention_layer_norm"),
            Rename("layers.*.mlp_norm", "model.layers.*.feedforward_layer_norm"),
            Rename("layers.*.attention_out_norm", "model.layers.*.post_attention_layernorm"),
            Rename("layers.*.mlp_out_norm", "model.layers.*.post_feedforward_layernorm"),
        ),
        arguments={key: name for key, name in SIZES.items() if key != "attention_dropout"}
        | {
            "linear_key_head_dim": "key_dim",
            "linear_value_head_dim": "value_dim",
            "linear_allow_neg_eigval": "negative_eigenvalues",
            "linear_conv_kernel_dim": "conv_kernel",
        },
        defaults=DEFAULTS | {"linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4},
        constants=SWIGLU | {"attention_bias": False},
        to_config=_to_config,
        to_arguments=_to_arguments,
    )

    def __init__(
        self,
        vocab_size: int = 100352,
        n_layer: int = 32,
        n_head: int = 30,
        n_embd: int = 3840,
        max_sequence_length: int = 65536,
        n_kv_head: int | None = None,
        intermediate_size: int = 11008,
        attention_every: int = 4,
        key_dim: int = 96,
        value_dim: int = 192,
        negative_eigenvalues: bool = True,
        conv_kernel: int = 4,
        rope_theta: float | None = None,
        norm_eps: float = 1e-6,
        tie_embeddings: bool = False,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        sizes = check_sizes(OLMoHybrid, locals(), rotary=rope_theta is not None)
        layer = Layer(None if rope_theta is None else Rope(sizes["head_dim"], rope_theta))
        recurrent = [kind == "linear_attention" for kind in _layer_types(n_layer, attention_every)]
        super().__init__(
            **sizes,
            layers=[Layer() if state else layer for state in recurrent],
            recurrent=recurrent,
        )
        norm = partial(new_norm, "rmsnorm", n_embd, norm_eps)
        qk_norm = partial(new_norm, "rmsnorm", eps=norm_eps)

        def new_block(index: int) -> nn.Module:
            mlp = MLP(n_embd, intermediate_size, "silu", False, gated=True)
            if recurrent[index]:
                mixer = GatedDeltaNet(
                    n_embd,
                    n_head,
                    n_head,
                    key_dim,
                    value_dim,
                    HEAD_NORM_EPS,
                    conv_kernel,
                    negative_eigenvalues,
                )
                return LinearAttentionBlock(mixer, mlp, norm(), norm())
            attention = self.new_attention(False, 0.0, qk_norm="all", new_norm=qk_norm)
            return Block(attention, mlp, norm, "after")

        self.build(new_block, norm, tie_embeddings)
