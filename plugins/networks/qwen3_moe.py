"""Qwen 3 with a mixture of experts for each MLP."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.networks.parts.arguments import check_sizes
from plugins.networks.parts.block import Block
from plugins.networks.parts.decoder import Layer
from plugins.networks.parts.families import DEFAULTS, ENDS, PRE_NORMS, SIZES, SWIGLU, to_arguments, to_config
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.positions import Rope
from plugins.networks.parts.sparse_decoder import EXPERTS, SparseDecoder, check_experts, new_sparse_mlp
from toolkit.hugging_face import HuggingFaceForm


def _to_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    if dense := config.get("mlp_only_layers"):
        raise ConfigError(f"config.json: mlp_only_layers is {dense}; Qwen3MoE has experts in every layer.")
    # transformers 5 writes num_local_experts, published files have num_experts
    experts = config.get("num_local_experts", config.get("num_experts", 128))
    return to_arguments(config) | {"n_experts": experts}


@technique(paper="Qwen3, arXiv:2505.09388")
class Qwen3MoE(SparseDecoder):
    """Qwen 3 with experts and all of its shape; the defaults are Qwen3 30B-A3B's: 30.5B parameters, of which a token passes 3.3B.

    The losses that balance the experts are those of the objective BalancedRouting; the callback RoutingMonitor
    logs how the experts are used.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_head: Number of query heads.
        n_embd: Width C.
        max_sequence_length: Largest T.
        n_kv_head: Number of key-value heads, a divisor of `n_head`; None: `n_head`.
        head_dim: Features of a head, an even number; None: C / `n_head`.
        intermediate_size: Width of an expert.
        n_experts: Experts E of a block.
        experts_per_token: How many of them each token passes, k.
        normalise_weights: Whether the weights of a token's experts sum to 1.
        capacity_factor: In training an expert takes at most this times tokens k / E of a micro-batch, the others pass
            it by; None: all, as in transformers.
        rope_theta: Base of the wavelengths of rotary positions.
        rope_scaling: How they are stretched: `rope_type` is linear, llama3 or yarn, the other keys are those of
            transformers' config.json. None: not at all.
        norm_eps: Epsilon of the norms.
        tie_embeddings: Whether the head uses the weight of the token embedding.
        bias: Whether the projections of attention have biases.
        attention_dropout: Dropout on the attention weights, after the softmax.
        init: Of matrices. "llama": N(0, 0.02); "gpt2": N(0, 0.02 / sqrt(2 n_layer)) for the two per block that add to
            the residual stream; "small": N(0, sqrt(2 / (5 C))), and N(0, 2 / (n_layer sqrt(C))) for those two;
            "mup": N(0, 1 / sqrt(inputs)), embeddings N(0, 1), the head 0: arXiv:2203.03466.
        init_std: Patterns of module names -> standard deviation, over `init`: `{embed_tokens: 0.01}`; experts are
            `layers.*.mlp.experts.up_proj` and so on, routers `layers.*.mlp.router`.

    Raises:
        ConfigError: If a value is out of range or a size does not divide another.

    Example:
        model:
          network:
            class_path: Qwen3MoE
            init_args: {n_layer: 4, n_head: 4, n_kv_head: 2, n_embd: 256, intermediate_size: 256, n_experts: 8, experts_per_token: 2, max_sequence_length: 512}
    """

    deferred_init = True

    hugging_face = HuggingFaceForm(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        renames=ENDS + PRE_NORMS + EXPERTS,
        arguments={key: name for key, name in SIZES.items() if key != "intermediate_size"}
        | {
            "attention_bias": "bias",
            "moe_intermediate_size": "intermediate_size",
            "num_experts_per_tok": "experts_per_token",
            "norm_topk_prob": "normalise_weights",
        },
        defaults=DEFAULTS
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        constants=SWIGLU | {"use_sliding_window": False, "decoder_sparse_step": 1},
        to_config=lambda arguments: to_config(arguments) | {"num_experts": arguments["n_experts"]},
        to_arguments=_to_arguments,
    )

    def __init__(
        self,
        vocab_size: int = 151936,
        n_layer: int = 48,
        n_head: int = 32,
        n_embd: int = 2048,
        max_sequence_length: int = 40960,
        n_kv_head: int | None = 4,
        head_dim: int | None = 128,
        intermediate_size: int = 768,
        n_experts: int = 128,
        experts_per_token: int = 8,
        normalise_weights: bool = True,
        capacity_factor: float | None = None,
        rope_theta: float = 1000000.0,
        rope_scaling: dict[str, Any] | None = None,
        norm_eps: float = 1e-6,
        tie_embeddings: bool = False,
        bias: bool = False,
        attention_dropout: float = 0.0,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        sizes = check_sizes(Qwen3MoE, locals())
        check_experts("Qwen3MoE", n_experts, experts_per_token)
        rope = Rope(sizes["head_dim"], rope_theta, rope_scaling)
        super().__init__(**sizes, layers=[Layer(rope)] * n_layer)
        norm = partial(new_norm, "rmsnorm", n_embd, norm_eps)
        qk_norm = partial(new_norm, "rmsnorm", eps=norm_eps)

        def new_block(index: int) -> Block:
            attention = self.new_attention(bias, attention_dropout, qk_norm="head", new_norm=qk_norm)
            mlp = new_sparse_mlp(
                n_embd,
                n_experts,
                experts_per_token,
                intermediate_size,
                normalise=normalise_weights,
                capacity_factor=capacity_factor,
            )
            return Block(attention, mlp, norm, "pre")

        self.build(new_block, norm, tie_embeddings)
