"""DeepSeek-V3: multi-head latent attention and a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.networks.parts.arguments import check_even, check_sizes
from plugins.networks.parts.block import Block
from plugins.networks.parts.decoder import Layer
from plugins.networks.parts.deepseek import ARGUMENTS, new_mlps
from plugins.networks.parts.families import DEFAULTS, ENDS, PRE_NORMS, SIZES, SWIGLU, read_rope
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.latent_attention import LatentAttention
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.positions import Rope, yarn_mscale
from plugins.networks.parts.sparse_decoder import EXPERTS, SparseDecoder, check_experts
from toolkit.hugging_face import HuggingFaceForm, Rename

LATENTS = tuple(
    Rename(f"layers.*.attention.{ours}", f"model.layers.*.self_attn.{theirs}")
    for ours, theirs in {
        "q_a_norm": "q_a_layernorm",
        "kv_a_norm": "kv_a_layernorm",
        "kv_a_proj": "kv_a_proj_with_mqa",
    }.items()
)

ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Keys of DeepSeek's own config.json, which transformers does not read, and the values that it computes."""

EPSILON = 1e-6
"""Of the norms of latents, as in transformers whatever `rms_norm_eps` is."""


def _to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default"} | dict(arguments["rope_scaling"] or {})
    return {
        "num_key_value_heads": arguments["n_head"],
        "rope_parameters": rope | {"rope_theta": float(arguments["rope_theta"])},
    }


def _to_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    for key, value in (ROUTING | {"num_key_value_heads": heads}).items():
        if config.get(key) not in (None, value):
            raise ConfigError(f"config.json: {key} is {config[key]!r}; DeepSeekV3 is read with {value!r}.")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    return read_rope(rope, config, 10000.0)


@technique(
    paper="DeepSeek-V3, arXiv:2412.19437, section 2.1; latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1"
)
class DeepSeekV3(SparseDecoder):
    """DeepSeek-V3 and all of its shape; the defaults are its own: 671B parameters, of which a token passes 37B.

    A cache holds `kv_lora_rank` + `qk_rope_head_dim` values for a token and layer. The losses that balance the experts are
    those of the objective BalancedRouting, and the callback BiasBalancing balances them without a loss.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_head: Number of heads.
        n_embd: Width C.
        max_sequence_length: Largest T.
        q_lora_rank: Features of the latent of queries; None: they are projected from the hidden states, as in V2-Lite.
        kv_lora_rank: Features of the latent of keys and values.
        qk_nope_head_dim: Features of a head's queries and keys that are not rotated.
        qk_rope_head_dim: Features that are, an even number; those of keys are the same in all heads.
        v_head_dim: Features of a head's values.
        intermediate_size: Width of the MLP in the first blocks, those without experts.
        n_experts: Experts E of a block.
        experts_per_token: How many of them each token passes, k.
        expert_size: Width of an expert.
        n_shared_experts: Experts that every token passes, beside those that it is routed to.
        dense_layers: How many blocks from the first on have a plain MLP.
        groups: Groups of experts; a token chooses within `groups_per_token` of them.
        groups_per_token: See there.
        normalise_weights: Whether the weights of a token's experts sum to 1, before `routing_scale`.
        routing_scale: What they are multiplied with.
        capacity_factor: In training an expert takes at most this times tokens k / E of a micro-batch, the others pass
            it by; None: all, as in transformers.
        rope_theta: Base of the wavelengths of rotary positions.
        rope_scaling: How they are stretched: `rope_type` is linear, llama3 or yarn, the other keys are those of
            transformers' config.json; `mscale_all_dim` also scales attention's scores. None: not at all.
        norm_eps: Epsilon of the norms, except those of latents: 1e-6.
        tie_embeddings: Whether the head uses the weight of the token embedding.
        bias: Whether the projections to latents and the output projection of attention have biases.
        attention_dropout: Dropout on the attention weights, after the softmax.
        init: Of matrices. "llama": N(0, 0.02); "gpt2": N(0, 0.02 / sqrt(2 n_layer)) for the two per block that add to
            the residual stream; "small": N(0, sqrt(2 / (5 C))), and N(0, 2 / (n_layer sqrt(C))) for those two;
            "mup": N(0, 1 / sqrt(inputs)), embeddings N(0, 1), the head 0: arXiv:2203.03466.
        init_std: Patterns of module names -> standard deviation, over `init`: `{"*": 0.006}` is DeepSeek-V3's; experts
            are `layers.*.mlp.experts.up_proj` and so on, routers `layers.*.mlp.router`.

    Raises:
        ConfigError: If a value is out of range or a size does not divide another.

    Example:
        model:
          network:
            class_path: DeepSeekV3
            init_args: {n_layer: 4, n_head: 4, n_embd: 256, q_lora_rank: 96, kv_lora_rank: 64, qk_nope_head_dim: 32, qk_rope_head_dim: 16, v_head_dim: 32, intermediate_size: 512, n_experts: 8, experts_per_token: 2, expert_size: 128, dense_layers: 1, groups: 1, groups_per_token: 1, max_sequence_length: 512}
    """

    deferred_init = True

    hugging_face = HuggingFaceForm(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        renames=ENDS + PRE_NORMS + EXPERTS + LATENTS,
        arguments=SIZES
        | ARGUMENTS
        | {
            name: name
            for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        },
        defaults=DEFAULTS
        | {
            "attention_bias": False,
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        constants=SWIGLU | {"rope_interleave": True},
        to_config=_to_config,
        to_arguments=_to_arguments,
    )

    def __init__(
        self,
        vocab_size: int = 129280,
        n_layer: int = 61,
        n_head: int = 128,
        n_embd: int = 7168,
        max_sequence_length: int = 4096,
        q_lora_rank: int | None = 1536,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        intermediate_size: int = 18432,
        n_experts: int = 256,
        experts_per_token: int = 8,
        expert_size: int = 2048,
        n_shared_experts: int = 1,
        dense_layers: int = 3,
        groups: int = 8,
        groups_per_token: int = 4,
        normalise_weights: bool = True,
        routing_scale: float = 2.5,
        capacity_factor: float | None = None,
        rope_theta: float = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        norm_eps: float = 1e-6,
        tie_embeddings: bool = False,
        bias: bool = False,
        attention_dropout: float = 0.0,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        size = qk_nope_head_dim + qk_rope_head_dim
        sizes = check_sizes(DeepSeekV3, locals() | {"head_dim": size}, rotary=False)
        check_experts("DeepSeekV3", n_experts, experts_per_token, groups, groups_per_token)
        check_even("DeepSeekV3", qk_rope_head_dim, "qk_rope_head_dim")
        new_mlp = new_mlps(locals())
        rope = Rope(qk_rope_head_dim, rope_theta, rope_scaling)
        super().__init__(**sizes, value_dim=v_head_dim, layers=[Layer(rope)] * n_layer)
        norm = partial(new_norm, "rmsnorm", n_embd, norm_eps)
        scaling = rope_scaling or {}
        weight = scaling.get("mscale_all_dim")
        more = yarn_mscale(scaling["factor"], weight) ** 2 if weight else 1.0

        def new_block(index: int) -> Block:
            attention = LatentAttention(
                n_embd,
                n_head,
                kv_lora_rank=kv_lora_rank,
                q_lora_rank=q_lora_rank,
                nope_dim=qk_nope_head_dim,
                rope_dim=qk_rope_head_dim,
                value_dim=v_head_dim,
                bias=bias,
                dropout=attention_dropout,
                scale=size**-0.5 * more,
                new_norm=partial(new_norm, "rmsnorm", eps=EPSILON),
            )
            return Block(attention, new_mlp(index), norm, "pre")

        self.build(new_block, norm, tie_embeddings)
