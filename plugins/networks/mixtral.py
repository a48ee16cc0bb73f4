"""Mixtral: Mistral with a mixture of experts for each MLP."""

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
from plugins.networks.parts.sparse_decoder import SparseDecoder, check_experts, new_sparse_mlp
from toolkit.hugging_face import HuggingFaceForm, Rename

EXPERTS = (
    Rename("layers.*.mlp.router", "model.layers.*.block_sparse_moe.gate"),
    *(
        Rename(
            f"layers.*.mlp.experts.{ours}",
            f"model.layers.*.block_sparse_moe.experts.*.{theirs}.weight",
            stacked=True,
        )
        for ours, theirs in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items()
    ),
)


@technique(paper="Mixtral of Experts, arXiv:2401.04088")
class Mixtral(SparseDecoder):
    """Mixtral and all of its shape; the defaults are Mixtral 8x7B's: 46.7B parameters, of which a token passes 12.9B.

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
        capacity_factor: In training an expert takes at most this times tokens k / E of a micro-batch, the others pass
            it by; None: all, as in transformers.
        rope_theta: Base of the wavelengths of rotary positions.
        rope_scaling: How they are stretched: `rope_type` is linear, llama3 or yarn, the other keys are those of
            transformers' config.json. None: not at all.
        sliding_window: Tokens that a query sees in every block, itself included; None: all before it.
        norm_eps: Epsilon of the norms.
        tie_embeddings: Whether the head uses the weight of the token embedding.
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
            class_path: Mixtral
            init_args: {n_layer: 4, n_head: 4, n_kv_head: 2, n_embd: 256, intermediate_size: 256, n_experts: 8, experts_per_token: 2, max_sequence_length: 512}
    """

    deferred_init = True

    hugging_face = HuggingFaceForm(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        renames=ENDS + PRE_NORMS + EXPERTS,
        arguments=SIZES
        | {
            "sliding_window": "sliding_window",
            "num_local_experts": "n_experts",
            "num_experts_per_tok": "experts_per_token",
        },
        defaults=DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        constants=SWIGLU | {"router_jitter_noise": 0.0},
        to_config=to_config,
        to_arguments=partial(to_arguments, theta=1000000.0),
    )

    def __init__(
        self,
        vocab_size: int = 32000,
        n_layer: int = 32,
        n_head: int = 32,
        n_embd: int = 4096,
        max_sequence_length: int = 32768,
        n_kv_head: int | None = 8,
        head_dim: int | None = None,
        intermediate_size: int = 14336,
        n_experts: int = 8,
        experts_per_token: int = 2,
        capacity_factor: float | None = None,
        rope_theta: float = 1000000.0,
        rope_scaling: dict[str, Any] | None = None,
        sliding_window: int | None = None,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
        attention_dropout: float = 0.0,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        sizes = check_sizes(Mixtral, locals())
        check_experts("Mixtral", n_experts, experts_per_token)
        rope = Rope(sizes["head_dim"], rope_theta, rope_scaling)
        super().__init__(**sizes, layers=[Layer(rope, sliding_window)] * n_layer)
        norm = partial(new_norm, "rmsnorm", n_embd, norm_eps)

        def new_block(index: int) -> Block:
            attention = self.new_attention(False, attention_dropout)
            mlp = new_sparse_mlp(
                n_embd, n_experts, experts_per_token, intermediate_size, capacity_factor=capacity_factor
            )
            return Block(attention, mlp, norm, "pre")

        self.build(new_block, norm, tie_embeddings)
