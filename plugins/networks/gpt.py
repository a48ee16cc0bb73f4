"""A decoder-only transformer with the design choices in which GPT-2, Llama and related models differ.

Shapes: B sequences, T tokens, C = `n_embd`, H query heads and G key-value heads of D = C / H features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.networks import gpt_plans
from plugins.networks.gpt_block import MLP, Attention, Block, attention_mask
from plugins.networks.kv_cache import KVCache

NORM_EPS = 1e-5
INIT_STD = 0.02


def sinusoid_table(length: int, dim: int, theta: float) -> Tensor:
    """Returns (length, dim): sines of position * theta^(-2i/dim), then their cosines; i < dim / 2."""
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), rates)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


@technique(
    paper="GPT-2 (Radford et al., 2019); arXiv:2104.09864 rotary, 1910.07467 RMSNorm, 2305.13245 GQA",
    maturity="stable",
)
class GPT(Network):
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

    layers: nn.ModuleList
    position_table: Tensor
    max_sequence_length: int

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
        _check(locals())
        super().__init__()
        at_embedding, at_attention, at_residual = (
            dropout if own is None else own
            for own in (embedding_dropout, attention_dropout, residual_dropout)
        )
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.n_layer, self.n_embd, self.n_head, self.n_kv_head = n_layer, n_embd, n_head, n_kv_head or n_head
        self.position, self.init, self.rope_theta = position, init, rope_theta
        width = math.ceil(8 * n_embd / (3 * 64)) * 64 if activation == "swiglu" else 4 * n_embd
        pre_norm = norm_position == "pre"
        new_norm = partial(nn.LayerNorm, bias=bias) if norm == "layernorm" else nn.RMSNorm

        def new_block() -> Block:
            attention = Attention(n_embd, n_head, n_kv_head or n_head, bias, at_attention)
            mlp = MLP(n_embd, intermediate_size or width, activation, bias)
            return Block(
                attention, mlp, [new_norm(n_embd, NORM_EPS) for _ in range(2)], pre_norm, at_residual
            )

        device = torch.get_default_device()
        with torch.device("meta"):  # skips the modules' own initialisation, which would draw random numbers
            self._add_modules(
                new_block, partial(new_norm, n_embd, NORM_EPS), at_embedding, pre_norm, tie_embeddings
            )
        matrices = (weight for weight in self.layers.parameters() if weight.ndim == 2)
        self._matmul_parameters = sum(weight.numel() for weight in matrices) + vocab_size * n_embd
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def _add_modules(
        self,
        new_block: Callable[[], Block],
        new_norm: Callable[[], nn.Module],
        dropout: float,
        pre_norm: bool,
        tie_embeddings: bool,
    ) -> None:
        """Adds embeddings, blocks, norms and head, in the order of the parameters in checkpoints."""
        self.embed_tokens = nn.Embedding(self.vocab_size, self.n_embd)
        if self.position == "learned":
            self.embed_positions = nn.Embedding(self.max_sequence_length, self.n_embd)
        else:
            dim = self.n_embd // self.n_head if self.position == "rotary" else self.n_embd
            self.register_buffer(
                "position_table", torch.empty(self.max_sequence_length, dim), persistent=False
            )
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(new_block() for _ in range(self.n_layer))
        self.embed_norm = nn.Identity() if pre_norm else new_norm()
        self.norm = new_norm() if pre_norm else nn.Identity()
        self.lm_head = None if tie_embeddings else nn.Linear(self.n_embd, self.vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialises every parameter and buffer in place; call it after `to_empty`."""
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            elif isinstance(module, nn.Linear):
                self._init_projection(module, residual=name.endswith((".o_proj", ".down_proj")))
        if self.position != "learned":
            length, dim = self.position_table.shape
            self.position_table.copy_(sinusoid_table(length, dim, self.rope_theta))

    def _init_projection(self, linear: nn.Linear, residual: bool) -> None:
        if self.init == "normal":
            nn.init.normal_(linear.weight, std=INIT_STD / math.sqrt(2 * self.n_layer if residual else 1))
        else:
            fill = nn.init.xavier_uniform_ if self.init == "xavier" else nn.init.kaiming_normal_
            fill(linear.weight)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)

    def forward(self, batch: Mapping[str, Tensor], cache: list[KVCache] | None = None) -> Tensor:
        """Returns hidden states (B, T, C) after the last norm.

        By default `position_ids` continue after the cached tokens. Attention stays within equal `document_ids`.

        Raises:
            ConfigError: If the sequence, with the cached tokens, is too long, or if a cache is used with
                `document_ids`.
        """
        return self.forward_blocks(batch, None, range(self.n_layer), cache)

    def forward_blocks(
        self,
        batch: Mapping[str, Tensor],
        hidden: Tensor | None,
        blocks: range,
        cache: list[KVCache] | None = None,
    ) -> Tensor:
        """Runs some blocks on hidden states (B, T, C), or on the embeddings if `hidden` is None."""
        input_ids, document_ids = batch["input_ids"], batch.get("document_ids")
        start, limit = (cache[0].length, cache[0].max_length) if cache else (0, self.max_sequence_length)
        end = start + input_ids.shape[1]
        if end > limit:
            what = "the cache's length" if cache else "max_sequence_length"
            raise ConfigError(f"GPT: a sequence of {end} tokens is longer than {what}, {limit}.")
        if cache and document_ids is not None:
            raise ConfigError("GPT: document_ids cannot be used with a cache: generate one document a row.")
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(start, end, device=input_ids.device)
        rope = self.position_table[positions].unsqueeze(-3) if self.position == "rotary" else None
        x = self._embedded(input_ids, positions) if hidden is None else hidden
        mask = attention_mask(start, end, document_ids, x.device)
        for index in blocks:
            x = self.layers[index](x, rope, mask, cache[index] if cache else None)
        return self.norm(x) if blocks.stop == self.n_layer else x

    def _embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        if self.position == "learned":
            x = x + self.embed_positions(positions)
        elif self.position == "sinusoidal":
            x = x * math.sqrt(self.n_embd) + self.position_table[positions]
        return self.dropout(self.embed_norm(x))

    def new_cache(self, batch_size: int, max_length: int) -> list[KVCache]:
        """Returns an empty cache per layer, for at most `max_sequence_length` tokens."""
        return [KVCache(batch_size, min(max_length, self.max_sequence_length)) for _ in self.layers]

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]  # torch does not declare it a Sequence
        """The transformer blocks, in order."""
        return self.layers

    @property
    def output_weight(self) -> Tensor:
        """The (V, C) weight of the head: that of the token embedding if they are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def flops_per_token(self, sequence_length: int) -> float:
        """Returns 6 N + 12 n_layer C T for forward and backward, as in PaLM, arXiv:2204.02311, appendix B.

        N: weights of the blocks' projections and of the head, tied or not. Causal attention is not halved.
        """
        return 6.0 * self._matmul_parameters + 12.0 * self.n_layer * self.n_embd * sequence_length

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Shards heads and MLP width; embeddings, norms and head stay replicated. The number of ranks must divide G."""
        return gpt_plans.tensor_parallel(self)

    def sequence_parallel_plan(self) -> dict[str, Any]:
        """Shards tokens between embedding and last norm, except in attention and MLP; as in arXiv:2205.05198."""
        return gpt_plans.sequence_parallel(self)

    @property
    def attention_heads(self) -> tuple[int, int]:
        """H and G."""
        return self.n_head, self.n_kv_head

    def replace_attention(self, attention: Callable[..., Tensor]) -> bool:
        """Replaces the attention function of every block."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.attend = attention
        return True

    def select_rows(self, arguments: tuple[Any, ...], rows: Tensor) -> tuple[Any, ...] | None:
        """Selects rows of rotary positions ([B,] 1, T, D) and mask ([B, 1,] T, T) that have a batch dimension."""
        rope, mask, cache = arguments
        if cache is not None:
            return None
        return *(x[rows] if x is not None and x.ndim == 4 else x for x in (rope, mask)), None

    @property
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Embeddings with their norm; the last norm and the head."""
        first: list[nn.Module] = [
            self.embed_tokens,
            self.embed_norm,
            *([self.embed_positions] if self.position == "learned" else []),
        ]
        return first, [self.norm, self.embed_tokens if self.lm_head is None else self.lm_head]


def _check(a: Mapping[str, Any]) -> None:
    """Raises a ConfigError for the first invalid argument of the constructor."""
    for name, hint in get_type_hints(GPT.__init__).items():
        value, options = a[name], get_args(hint)
        if get_origin(hint) is Literal and value not in options:
            raise ConfigError(f"GPT: {name}={value!r} is none of {options}.{nearest(str(value), options)}")
        if hint in (int, int | None) and value is not None and value < 1:
            raise ConfigError(f"GPT: {name}={value} must be at least 1.")
    for name in ("dropout", "embedding_dropout", "attention_dropout", "residual_dropout"):
        if a[name] is not None and not 0 <= a[name] < 1:
            raise ConfigError(f"GPT: {name}={a[name]} must be at least 0 and below 1.")
    if not a["rope_theta"] > 0:
        raise ConfigError(f"GPT: rope_theta={a['rope_theta']} must be above 0.")
    n_embd, n_head, n_kv_head = a["n_embd"], a["n_head"], a["n_kv_head"] or a["n_head"]
    if (fits := n_embd + -n_embd % n_head) != n_embd:
        raise ConfigError(f"GPT: n_embd={n_embd} is not divisible by n_head={n_head}; {fits} is.")
    if n_head % n_kv_head:
        raise ConfigError(f"GPT: n_kv_head={n_kv_head} does not divide n_head={n_head}.")
    dim = {"sinusoidal": n_embd, "rotary": n_embd // n_head}.get(a["position"], 0)
    if dim % 2:
        width = "n_embd" if dim == n_embd else "n_embd / n_head"
        raise ConfigError(f"GPT: position={a['position']} needs an even {width}, not {dim}.")
