"""Qwen 3: Llama with queries and keys normalised in each head."""

from __future__ import annotations

from functools import partial
from typing import Any

from core.technique import technique
from plugins.networks.parts.arguments import check_sizes
from plugins.networks.parts.block import Block
from plugins.networks.parts.decoder import Decoder, Layer
from plugins.networks.parts.families import (
    DEFAULTS,
    ENDS,
    PRE_NORMS,
    SIZES,
    SWIGLU,
    to_arguments,
    to_config,
    windows_to_arguments,
    windows_to_config,
)
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.mlp import MLP
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.positions import Rope
from toolkit.hugging_face import HuggingFaceForm


@technique(paper="Qwen3, arXiv:2505.09388")
class Qwen3(Decoder):
    """Qwen 3, dense, and all of its shape; the defaults are Qwen3 0.6B's.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_head: Number of query heads.
        n_embd: Width C.
        max_sequence_length: Largest T.
        n_kv_head: Number of key-value heads, a divisor of `n_head`; None: `n_head`.
        head_dim: Features of a head, an even number; None: C / `n_head`.
        intermediate_size: Width of the MLP.
        rope_theta: Base of the wavelengths of rotary positions.
        rope_scaling: How they are stretched: `rope_type` is linear, llama3 or yarn, the other keys are those of
            transformers' config.json. None: not at all.
        sliding_window: Tokens that a query sees, itself included, in the blocks from `max_window_layers` on; None: all.
        max_window_layers: How many blocks from the first on see all tokens.
        norm_eps: Epsilon of the norms.
        tie_embeddings: Whether the head uses the weight of the token embedding.
        bias: Whether the projections of attention have biases.
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
            class_path: Qwen3
            init_args: {n_layer: 6, n_head: 6, n_kv_head: 2, n_embd: 384, head_dim: 64, intermediate_size: 1024, max_sequence_length: 1024}
    """

    deferred_init = True

    hugging_face = HuggingFaceForm(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        renames=ENDS + PRE_NORMS,
        arguments=SIZES | {"attention_bias": "bias"},
        defaults=DEFAULTS
        | {
            "num_key_value_heads": 32,
            "max_window_layers": 28,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "head_dim": 128,
            "attention_bias": False,
        },
        constants=SWIGLU,
        to_config=lambda arguments: to_config(arguments) | windows_to_config(arguments),
        to_arguments=lambda config: to_arguments(config) | windows_to_arguments(config),
    )

    def __init__(
        self,
        vocab_size: int = 151936,
        n_layer: int = 28,
        n_head: int = 16,
        n_embd: int = 1024,
        max_sequence_length: int = 40960,
        n_kv_head: int | None = 8,
        head_dim: int | None = 128,
        intermediate_size: int = 3072,
        rope_theta: float = 1000000.0,
        rope_scaling: dict[str, Any] | None = None,
        sliding_window: int | None = None,
        max_window_layers: int = 28,
        norm_eps: float = 1e-6,
        tie_embeddings: bool = True,
        bias: bool = False,
        attention_dropout: float = 0.0,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        sizes = check_sizes(Qwen3, locals())
        rope = Rope(sizes["head_dim"], rope_theta, rope_scaling)
        first = max_window_layers if sliding_window else n_layer
        qk_norm = partial(new_norm, "rmsnorm", eps=norm_eps)
        super().__init__(
            **sizes, layers=[Layer(rope, sliding_window if i >= first else None) for i in range(n_layer)]
        )
        norm = partial(new_norm, "rmsnorm", n_embd, norm_eps)

        def new_block(index: int) -> Block:
            attention = self.new_attention(bias, attention_dropout, qk_norm="head", new_norm=qk_norm)
            mlp = MLP(n_embd, intermediate_size, "silu", False, gated=True)
            return Block(attention, mlp, norm, "pre")

        self.build(new_block, norm, tie_embeddings)
