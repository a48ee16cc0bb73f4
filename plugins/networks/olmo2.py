"""OLMo 2: norms behind attention and MLP, and over all queries and all keys."""

from __future__ import annotations

from functools import partial
from typing import Any

from core.technique import technique
from plugins.networks.parts.arguments import check_sizes
from plugins.networks.parts.block import Block
from plugins.networks.parts.decoder import Decoder, Layer
from plugins.networks.parts.families import DEFAULTS, ENDS, SIZES, SWIGLU, to_arguments, to_config
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.mlp import MLP
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.positions import Rope
from toolkit.hugging_face import HuggingFaceForm, Rename


@technique(paper="2 OLMo 2 Furious, arXiv:2501.00656")
class OLMo2(Decoder):
    """OLMo 2 and all of its shape; the defaults are OLMo 2 1B's.

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
            class_path: OLMo2
            init_args: {n_layer: 6, n_head: 6, n_kv_head: 2, n_embd: 384, intermediate_size: 1024, max_sequence_length: 1024}
    """

    deferred_init = True

    hugging_face = HuggingFaceForm(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        renames=(
            *ENDS,
            Rename("layers.*.attention_out_norm", "model.layers.*.post_attention_layernorm"),
            Rename("layers.*.mlp_out_norm", "model.layers.*.post_feedforward_layernorm"),
        ),
        arguments=SIZES | {"attention_bias": "bias"},
        defaults=DEFAULTS | {"rms_norm_eps": 1e-5, "attention_bias": False},
        constants=SWIGLU,
        to_config=to_config,
        to_arguments=to_arguments,
    )

    def __init__(
        self,
        vocab_size: int = 100352,
        n_layer: int = 16,
        n_head: int = 16,
        n_embd: int = 2048,
        max_sequence_length: int = 4096,
        n_kv_head: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int = 8192,
        rope_theta: float = 500000.0,
        rope_scaling: dict[str, Any] | None = None,
        norm_eps: float = 1e-6,
        tie_embeddings: bool = False,
        bias: bool = False,
        attention_dropout: float = 0.0,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        sizes = check_sizes(OLMo2, locals())
        qk_norm = partial(new_norm, "rmsnorm", eps=norm_eps)
        rope = Rope(sizes["head_dim"], rope_theta, rope_scaling)
        super().__init__(**sizes, layers=[Layer(rope)] * n_layer)
        norm = partial(new_norm, "rmsnorm", n_embd, norm_eps)

        def new_block(index: int) -> Block:
            attention = self.new_attention(bias, attention_dropout, qk_norm="all", new_norm=qk_norm)
            mlp = MLP(n_embd, intermediate_size, "silu", False, gated=True)
            return Block(attention, mlp, norm, "after")

        self.build(new_block, norm, tie_embeddings)
