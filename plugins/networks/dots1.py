"""dots.llm1: DeepSeek-V3's mixture of experts in blocks with grouped queries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.networks.parts.arguments import check_sizes
from plugins.networks.parts.block import Block
from plugins.networks.parts.decoder import Layer
from plugins.networks.parts.deepseek import ARGUMENTS, new_mlps
from plugins.networks.parts.families import DEFAULTS, ENDS, PRE_NORMS, SIZES, SWIGLU, to_arguments, to_config
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.positions import Rope
from plugins.networks.parts.sparse_decoder import EXPERTS, SparseDecoder, check_experts
from toolkit.hugging_face import HuggingFaceForm


def _to_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    if config.get("sliding_window") and config.get("max_window_layers", 62) < layers:
        raise ConfigError(
            f"config.json: sliding_window is {config['sliding_window']}; Dots1 is read without one."
        )
    return to_arguments(config)


@technique(paper="dots.llm1, arXiv:2506.05767; its experts: DeepSeek-V3, arXiv:2412.19437, section 2.1.2")
class Dots1(SparseDecoder):
    """dots.llm1 and all of its shape; the defaults are those of dots.llm1.base: 142B parameters, of which a token passes 14B.

    The losses that balance the experts are those of the objective BalancedRouting, and the callback BiasBalancing balances
    them without a loss; the callback RoutingMonitor
    logs how the experts are used.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_head: Number of query heads.
        n_embd: Width C.
        max_sequence_length: Largest T.
        n_kv_head: Number of key-value heads, a divisor of `n_head`; None: `n_head`.
        head_dim: Features of a head, an even number; None: C / `n_head`.
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
            class_path: Dots1
            init_args: {n_layer: 4, n_head: 4, n_kv_head: 2, n_embd: 256, intermediate_size: 256, n_experts: 8, experts_per_token: 2, max_sequence_length: 512, expert_size: 128, dense_layers: 1}
    """

    deferred_init = True

    hugging_face = HuggingFaceForm(
        architecture="Dots1ForCausalLM",
        model_type="dots1",
        renames=ENDS + PRE_NORMS + EXPERTS,
        arguments=SIZES | ARGUMENTS,
        defaults=DEFAULTS
        | {
            "num_key_value_heads": 32,
            "attention_bias": False,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
        constants=SWIGLU,
        to_config=lambda arguments: to_config(arguments) | {"sliding_window": None},
        to_arguments=_to_arguments,
    )

    def __init__(
        self,
        vocab_size: int = 152064,
        n_layer: int = 62,
        n_head: int = 32,
        n_embd: int = 4096,
        max_sequence_length: int = 32768,
        n_kv_head: int | None = 32,
        head_dim: int | None = None,
        intermediate_size: int = 10944,
        n_experts: int = 128,
        experts_per_token: int = 6,
        expert_size: int = 1408,
        n_shared_experts: int = 2,
        dense_layers: int = 1,
        groups: int = 1,
        groups_per_token: int = 1,
        normalise_weights: bool = True,
        routing_scale: float = 2.5,
        capacity_factor: float | None = None,
        rope_theta: float = 10000000.0,
        rope_scaling: dict[str, Any] | None = None,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
        bias: bool = False,
        attention_dropout: float = 0.0,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        sizes = check_sizes(Dots1, locals())
        check_experts("Dots1", n_experts, experts_per_token, groups, groups_per_token)
        new_mlp = new_mlps(locals())
        rope = Rope(sizes["head_dim"], rope_theta, rope_scaling)
        super().__init__(**sizes, layers=[Layer(rope)] * n_layer)
        norm = partial(new_norm, "rmsnorm", n_embd, norm_eps)
        qk_norm = partial(new_norm, "rmsnorm", eps=norm_eps)

        def new_block(index: int) -> Block:
            attention = self.new_attention(bias, attention_dropout, qk_norm="head", new_norm=qk_norm)
            return Block(attention, new_mlp(index), norm, "pre")

        self.build(new_block, norm, tie_embeddings)
