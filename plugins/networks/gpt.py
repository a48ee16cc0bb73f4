"""A decoder-only transformer with the design choices in which GPT-2, Llama and related models differ.

Shapes: B sequences, T tokens, C = `n_embd`, H query heads and G key-value heads of D = C / H features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from core.technique import technique
from plugins.networks.parts.arguments import check_arguments, check_even
from plugins.networks.parts.attention import Attention
from plugins.networks.parts.block import Block
from plugins.networks.parts.decoder import Decoder, Layer
from plugins.networks.parts.gpt2 import GPT2, swiglu_width
from plugins.networks.parts.initialisation import std_of
from plugins.networks.parts.mlp import MLP
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.positions import sinusoid_table
from toolkit.initial_values import Start, normal, uniform

NORM_EPS = 1e-5


@technique(
    paper="GPT-2 (Radford et al., 2019); arXiv:2104.09864 rotary, 1910.07467 RMSNorm, 2305.13245 GQA",
    maturity="stable",
)
class GPT(Decoder):
    """A decoder-only transformer; the defaults are those of GPT-2 124M, except for its dropout of 0.1.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_head: Number of query heads.
        n_embd: Width C, a multiple of `n_head`.
        max_sequence_length: Largest T.
        n_kv_head: Number of key-value heads, a divisor of `n_head`; None: `n_head`.
        position: "learned" embeddings; "sinusoidal" waves, added to sqrt(C) times the embedding as in
            arXiv:1706.03762, section 3; "rotary" queries and keys, in pairs (i, i + D/2) as in Llama.
        norm: Kind of norm, with epsilon 1e-5.
        norm_position: "pre": before attention and MLP, and one after the last block, as GPT-2; "post": after each residual
            addition, and one on the embeddings, as BERT.
        activation: "gelu_tanh" as GPT-2; "gelu" without its approximation; "swiglu" as arXiv:2002.05202.
        intermediate_size: Width of the MLP; None: 4 C, or with swiglu 8/3 C rounded up to a multiple of 64.
        tie_embeddings: Whether the head uses the weight of the token embedding.
        dropout: Default probability of the three dropouts below.
        bias: Whether projections and layer norms have biases.
        init: Of projections. "normal": N(0, 0.02), and N(0, 0.02 / sqrt(2 n_layer)) for the two per block
            that add to the residual stream; "xavier": uniform; "he": normal, fan-in. Embeddings: N(0, 0.02).
        rope_theta: Base of the wavelengths of rotary (and sinusoidal) positions.
        embedding_dropout: Dropout on the embeddings, with positions added; None: `dropout`. The three are GPT-2's
            embd_pdrop, attn_pdrop and resid_pdrop.
        attention_dropout: Dropout on the attention weights, after the softmax; None: `dropout`.
        residual_dropout: Dropout on the outputs of attention and MLP; None: `dropout`.

    Raises:
        ConfigError: If a value is out of range or a size does not divide another.

    Example:
        model:
          network:
            class_path: GPT
            init_args: {n_layer: 6, n_head: 6, n_embd: 384, position: rotary, norm: rmsnorm}
    """

    hugging_face = GPT2
    position_table: Tensor

    deferred_init = True

    def __init__(
        self,
        vocab_size: int = 50257,
        n_layer: int = 12,
        n_head: int = 12,
        n_embd: int = 768,
        max_sequence_length: int = 1024,
        n_kv_head: int | None = None,
        position: Literal["learned", "sinusoidal", "rotary"] = "learned",
        norm: Literal["layernorm", "rmsnorm"] = "layernorm",
        norm_position: Literal["pre", "post"] = "pre",
        activation: Literal["gelu", "gelu_tanh", "relu", "swiglu"] = "gelu_tanh",
        intermediate_size: int | None = None,
        tie_embeddings: bool = True,
        dropout: float = 0.0,
        bias: bool = True,
        init: Literal["normal", "xavier", "he"] = "normal",
        rope_theta: float = 10000.0,
        embedding_dropout: float | None = None,
        attention_dropout: float | None = None,
        residual_dropout: float | None = None,
    ):
        check_arguments(GPT, locals())
        dim = {"sinusoidal": n_embd, "rotary": n_embd // n_head}.get(position, 0)
        check_even("GPT", dim, "n_embd" if dim == n_embd else "n_embd / n_head", position)
        at_embedding, at_attention, at_residual = (
            dropout if own is None else own
            for own in (embedding_dropout, attention_dropout, residual_dropout)
        )
        super().__init__(
            vocab_size=vocab_size,
            n_embd=n_embd,
            n_head=n_head,
            n_kv_head=n_kv_head or n_head,
            head_dim=n_embd // n_head,
            max_sequence_length=max_sequence_length,
            layers=[Layer()] * n_layer,
        )
        self.position, self.init, self.rope_theta = position, init, rope_theta
        self.norm_position = norm_position
        gated = activation == "swiglu"
        width = swiglu_width(n_embd) if gated else 4 * n_embd
        a_norm = partial(new_norm, norm, n_embd, NORM_EPS, bias)

        def new_block(index: int) -> Block:
            attention = Attention(n_embd, n_head, n_kv_head or n_head, bias, at_attention)
            mlp = MLP(n_embd, intermediate_size or width, "silu" if gated else activation, bias, gated)
            return Block(attention, mlp, a_norm, norm_position, at_residual)

        self.build(new_block, a_norm, tie_embeddings, at_embedding)

    def _add_modules(
        self,
        new_block: Callable[[int], nn.Module],
        new_norm: Callable[[], nn.Module],
        tie_embeddings: bool,
        dropout: float,
    ) -> None:
        self.embed_tokens = nn.Embedding(self.vocab_size, self.n_embd)
        if self.position == "learned":
            self.embed_positions = nn.Embedding(self.max_sequence_length, self.n_embd)
        else:
            dim = self.head_dim if self.position == "rotary" else self.n_embd
            table = torch.empty(self.max_sequence_length, dim)
            self.register_buffer("position_table", table, persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(new_block(index) for index in range(self.n_layer))
        pre_norm = self.norm_position == "pre"
        self.embed_norm = nn.Identity() if pre_norm else new_norm()
        self.norm = new_norm() if pre_norm else nn.Identity()
        self.lm_head = None if tie_embeddings else nn.Linear(self.n_embd, self.vocab_size, bias=False)

    def _matrix(self, name: str, weight: Tensor) -> Start:
        fan_out, fan_in = weight.shape
        if self.init == "normal" or isinstance(self.get_submodule(name), nn.Embedding):
            return normal(std_of(name, "gpt2", self.n_layer, self.n_embd))
        if self.init == "he":
            return normal(math.sqrt(2 / fan_in))
        bound = math.sqrt(6 / (fan_in + fan_out))
        return uniform(-bound, bound)

    def _table(self, name: str, table: Tensor) -> Tensor | None:
        length, dim = table.shape
        return sinusoid_table(length, dim, self.rope_theta) if name == "position_table" else None

    def _rotary(self, positions: Tensor) -> list[Tensor | None]:
        rotary = self.position == "rotary"
        return [self.position_table[positions].unsqueeze(-3) if rotary else None] * self.n_layer

    def _embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        if self.position == "learned":
            x = x + self.embed_positions(positions)
        elif self.position == "sinusoidal":
            x = x * math.sqrt(self.n_embd) + self.position_table[positions].type_as(x)
        return self.dropout(self.embed_norm(x))

    @property
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Embeddings with their norm; the last norm and the head."""
        first, last = super().ends
        positions = [self.embed_positions] if self.position == "learned" else []
        return [*first, self.embed_norm, *positions], last
