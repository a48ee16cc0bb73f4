"""OLMoE: many small experts, and norms over all queries and all keys."""

from __future__ import annotations

from functools import partial
from typing import Any

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


@technique(paper="OLMoE, arXiv:2409.02060")
class OLMoE(SparseDecoder):
    """OLMoE and all of its shape; the defaults are OLMoE 1B-7B's: 6.9B parameters, of which a token passes 1.3B.

    The losses that balance the experts are those of the objective BalancedRouting; the callback RoutingMonitor
    logs how the experts are used.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_head: Number of query heads.
        n_embd: Width C.
        max_sequence_length: Largest T.
        n_kv_head: Number of key-value heads, a divisor of `n_head`; None: `n_head`.
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
            class_path: OLMoE
            init_args: {n_layer: 4, n_head: 4, n_kv_head: 2, n_embd: 256, intermediate_size: 256, n_experts: 8, experts_per_token: 2, max_sequence_length: 512}
    """

    deferred_init = True

    hugging_face = HuggingFaceForm(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        renames=ENDS + PRE_NORMS + EXPERTS,
        arguments=SIZES
        | {
            "attention_bias": "bias",
            "num_experts": "n_experts",
            "num_experts_per_tok": "experts_per_token",
            "norm_topk_prob": "normalise_weights",
        },
        defaults=DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        constants=SWIGLU | {"clip_qkv": None},
        to_config=to_config,
        to_arguments=lambda config: {k: v for k, v in to_arguments(config).items() if k != "head_dim"},
    )

    def __init__(
        self,
        vocab_size: int = 50304,
        n_layer: int = 16,
        n_head: int = 16,
        n_embd: int = 2048,
        max_sequence_length: int = 4096,
        n_kv_head: int | None = None,
        intermediate_size: int = 1024,
        n_experts: int = 64,
        experts_per_token: int = 8,
        normalise_weights: bool = False,
        capacity_factor: float | None = None,
        rope_theta: float = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
        bias: bool = False,
        attention_dropout: float = 0.0,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        sizes = check_sizes(OLMoE, locals())
        check_experts("OLMoE", n_experts, experts_per_token)
        rope = Rope(sizes["head_dim"], rope_theta, rope_scaling)
        super().__init__(**sizes, layers=[Layer(rope)] * n_layer)
        norm = partial(new_norm, "rmsnorm", n_embd, norm_eps)
        qk_norm = partial(new_norm, "rmsnorm", eps=norm_eps)

        def new_block(index: int) -> Block:
            attention = self.new_attention(bias, attention_dropout, qk_norm="all", new_norm=qk_norm)
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
