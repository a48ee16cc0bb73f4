"""A decoder whose blocks mix tokens in different ways, by a list: attention, linear attention, a state space."""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

from torch import nn

from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.networks.parts.arguments import check_sizes
from plugins.networks.parts.block import Block
from plugins.networks.parts.block_sparse import SparsePattern
from plugins.networks.parts.decoder import Layer
from plugins.networks.parts.gated_delta_net import GatedDeltaNet
from plugins.networks.parts.gated_linear_attention import GatedLinearAttention
from plugins.networks.parts.hybrid_decoder import HybridDecoder
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.mlp import MLP
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.positions import Rope
from plugins.networks.parts.state_space import StateSpace

Mixer = Literal[
    "attention", "sliding_window", "block_sparse", "gated_linear_attention", "gated_delta_net", "mamba2"
]
RECURRENT = ("gated_linear_attention", "gated_delta_net", "mamba2")


@technique(
    paper="Gated linear attention, arXiv:2312.06635; gated DeltaNet, arXiv:2412.06464; Mamba-2, arXiv:2405.21060"
)
class Hybrid(HybridDecoder):
    """Llama's blocks with other mixers of tokens in attention's place, one kind after another.

    `mixers` is repeated over the blocks. Its kinds:

    - attention: rotary positions, all tokens before;
    - sliding_window: the last `sliding_window` tokens;
    - block_sparse: these, the first `sinks`, and the last block of each `block_stride` blocks;
    - gated_linear_attention, gated_delta_net, mamba2: no positions; in generation a state of one size in place of keys and
      values. Training computes them by chunks, in time linear in T.

    sliding_window and block_sparse are computed by FlexAttention on CUDA, elsewhere with a mask.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_head: Number of query heads, and of heads of linear attention.
        n_embd: Width C.
        max_sequence_length: Largest T.
        mixers: Kinds, in the order of the blocks; the first follows the last.
        n_kv_head: Number of key-value heads of attention, a divisor of `n_head`; None: `n_head`.
        head_dim: Features of a head, an even number; None: C / `n_head`.
        intermediate_size: Width of the MLP.
        rope_theta: Base of the wavelengths of rotary positions.
        sliding_window: Tokens that a query sees in sliding_window and block_sparse, itself included.
        sinks: First tokens of a document that all later ones see in block_sparse; 0: none.
        block_size: Tokens of a block in block_sparse.
        block_stride: Every how many blocks one is seen by all later tokens in block_sparse; None: none.
        key_dim: Features of a key of linear attention; None: `head_dim`.
        value_dim: Features of its values; None: `head_dim`.
        state_size: Features of B and C in mamba2, whose width is 2 C, in heads of `head_dim` features.
        norm_eps: Epsilon of the norms.
        tie_embeddings: Whether the head uses the weight of the token embedding.
        init: Of matrices. "llama": N(0, 0.02); "gpt2": N(0, 0.02 / sqrt(2 n_layer)) for the two per block that add to
            the residual stream; "small": N(0, sqrt(2 / (5 C))), and N(0, 2 / (n_layer sqrt(C))) for those two.
        init_std: Patterns of module names -> standard deviation, over `init`: `{embed_tokens: 0.01}`.

    Raises:
        ConfigError: If a value is out of range, a size does not divide another, or a kind is not known.

    Example:
        model:
          network:
            class_path: Hybrid
            init_args: {n_layer: 4, n_head: 4, n_embd: 256, intermediate_size: 768, max_sequence_length: 1024, mixers: [gated_delta_net, gated_delta_net, gated_delta_net, attention]}
    """

    deferred_init = True

    def __init__(
        self,
        vocab_size: int = 50304,
        n_layer: int = 24,
        n_head: int = 8,
        n_embd: int = 1024,
        max_sequence_length: int = 4096,
        mixers: list[Mixer] = ["gated_delta_net", "gated_delta_net", "gated_delta_net", "attention"],  # noqa: B006
        n_kv_head: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int = 2816,
        rope_theta: float = 10000.0,
        sliding_window: int = 512,
        sinks: int = 4,
        block_size: int = 64,
        block_stride: int | None = 8,
        key_dim: int | None = None,
        value_dim: int | None = None,
        state_size: int = 128,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = True,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        sizes = check_sizes(Hybrid, locals())
        size, kinds = sizes["head_dim"], _kinds(mixers, n_layer)
        if "mamba2" in kinds and 2 * n_embd % size:
            raise ConfigError(
                f"Hybrid: head_dim={size} does not divide mamba2's width, 2 n_embd={2 * n_embd}."
            )
        whole = sliding_window >= max_sequence_length
        patterns = {
            "sliding_window": None if whole else SparsePattern(sliding_window),
            "block_sparse": None if whole else SparsePattern(sliding_window, sinks, block_size, block_stride),
        }
        rope = Rope(size, rope_theta)
        windows = {"sliding_window": sliding_window}
        super().__init__(
            **sizes,
            layers=[Layer() if kind in RECURRENT else Layer(rope, windows.get(kind)) for kind in kinds],
            recurrent=[kind in RECURRENT for kind in kinds],
            patterns=[patterns.get(kind) for kind in kinds],
        )
        norm = partial(new_norm, "rmsnorm", n_embd, norm_eps)

        def new_mixer(kind: str) -> nn.Module:
            key, value = key_dim or size, value_dim or size
            if kind == "gated_linear_attention":
                return GatedLinearAttention(n_embd, n_head, key, value, norm_eps)
            if kind == "gated_delta_net":
                return GatedDeltaNet(n_embd, n_head, n_head, key, value, norm_eps)
            if kind == "mamba2":
                return StateSpace(n_embd, 2 * n_embd // size, size, state_size, 1, norm_eps)
            return self.new_attention(False, 0.0)

        def new_block(index: int) -> Block:
            mlp = MLP(n_embd, intermediate_size, "silu", False, gated=True)
            return Block(new_mixer(kinds[index]), mlp, norm, "pre")

        self.build(new_block, norm, tie_embeddings)


def _kinds(mixers: list[Mixer], n_layer: int) -> list[str]:
    if not mixers:
        raise ConfigError("Hybrid: mixers is empty; [gated_delta_net, attention] alternates two kinds.")
    known = get_args(Mixer)
    for kind in mixers:
        if kind not in known:
            raise ConfigError(
                f"Hybrid: mixers has {kind!r}, none of {', '.join(known)}.{nearest(str(kind), known)}"
            )
    return [mixers[index % len(mixers)] for index in range(n_layer)]
