"""A decoder-only transformer with the choices that GPT-2, Llama and their kin make differently.

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
    """A decoder-only transformer; the defaults are GPT-2's 124M model, but for its dropout of 0.1.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Blocks.
        n_head: Query heads.
        n_embd: Width C, a multiple of `n_head`.
        max_sequence_length: Longest T.
        n_kv_head: Key-value heads, a divisor of `n_head`; None: `n_head`.
        position: "learned" embeddings; "sinusoidal" waves, added to sqrt(C) times the embedding as in
            arXiv:1706.03762, section 3; "rotary" queries and keys, in pairs (i, i + D/2) as in Llama.
        norm: Of either kind with epsilon 1e-5.
        norm_position: "pre" and one after the blocks, as GPT-2; "post" and one on the embeddings, as BERT.
        activation: "gelu_tanh" is GPT-2's, "gelu" the exact one, "swiglu" that of arXiv:2002.05202.
        intermediate_size: Width of the MLP; None: 4 C, or with swiglu 8/3 C rounded up to a multiple of 64.
        tie_embeddings: Whether the token embedding is the head, too.
        dropout: Probability, on embeddings, attention weights and what attention and MLP add.
        bias: Whether projections and layer norms have biases.
        init: Of projections. "normal": N(0, 0.02), and N(0, 0.02 / sqrt(2 n_layer)) for the two per block
            that add to the residual stream; "xavier": uniform; "he": normal, fan-in. Embeddings: N(0, 0.02).
        rope_theta: Base of the wavelengths of rotary (and sinusoidal) positions.

    Raises:
        ConfigError: If a value is out of range or sizes do not divide.

    Example:
        model:
          network:
            class_path: GPT
            init_args: {n_layer: 6, n_head: 6, n_embd: 384, position: rotary, norm: rmsnorm}
    """

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
    ):
        _check(locals())
        super().__init__()
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.n_layer, self.n_embd, self.n_head, self.n_kv_head = n_layer, n_embd, n_head, n_kv_head or n_head
        self.position, self.init, self.rope_theta = position, init, rope_theta
        width = math.ceil(8 * n_embd / (3 * 64)) * 64 if activation == "swiglu" else 4 * n_embd
        pre_norm = norm_position == "pre"
        new_norm = partial(nn.LayerNorm, bias=bias) if norm == "layernorm" else nn.RMSNorm

        def new_block() -> Block:
            attention = Attention(n_embd, n_head, n_kv_head or n_head, bias, dropout)
            mlp = MLP(n_embd, intermediate_size or width, activation, bias)
            return Block(attention, mlp, [new_norm(n_embd, NORM_EPS) for _ in range(2)], pre_norm, dropout)

        device = torch.get_default_device()
        with torch.device("meta"):  # the modules' own initialisation would cost time and random numbers
            self.embed_tokens = nn.Embedding(vocab_size, n_embd)
            if position == "learned":
                self.embed_positions = nn.Embedding(max_sequence_length, n_embd)
            else:
                table = torch.empty(max_sequence_length, n_embd // (n_head if position == "rotary" else 1))
                self.register_buffer("position_table", table, persistent=False)
            self.dropout = nn.Dropout(dropout)
            self.layers = nn.ModuleList(new_block() for _ in range(n_layer))
            self.embed_norm = nn.Identity() if pre_norm else new_norm(n_embd, NORM_EPS)
            self.norm = new_norm(n_embd, NORM_EPS) if pre_norm else nn.Identity()
            self.lm_head = None if tie_embeddings else nn.Linear(n_embd, vocab_size, bias=False)
        matrices = (weight for weight in self.layers.parameters() if weight.ndim == 2)
        self._matmul_parameters = sum(weight.numel() for weight in matrices) + vocab_size * n_embd
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialises every parameter and buffer in place: also after `to_empty` from the meta device."""
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            elif isinstance(module, nn.Linear):
                self._init_projection(module, residual=name.endswith((".o_proj", ".down_proj")))
        if self.position != "learned":
            self.position_table.copy_(sinusoid_table(*self.position_table.shape, self.rope_theta))

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

        `position_ids` count on from the cache by default. Attention does not cross `document_ids`, which
        a cache excludes. ConfigError where the sequence, with what is cached, is too long.
        """
        return self.forward_blocks(batch, None, range(self.n_layer), cache)

    def forward_blocks(
        self,
        batch: Mapping[str, Tensor],
        hidden: Tensor | None,
        blocks: range,
        cache: list[KVCache] | None = None,
    ) -> Tensor:
        """Runs some blocks on hidden states (B, T, C), or on the embedding where there are none yet."""
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
        """Returns an empty cache per layer; it never holds more than `max_sequence_length` tokens."""
        return [KVCache(batch_size, min(max_length, self.max_sequence_length)) for _ in self.layers]

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, in order."""
        return self.layers

    @property
    def output_weight(self) -> Tensor:
        """The (V, C) weight of the head: the token embedding's where they are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def flops_per_token(self, sequence_length: int) -> float:
        """Returns 6 N + 12 n_layer C T for forward and backward, as in PaLM, arXiv:2204.02311, appendix B.

        N: weights of the blocks' projections and of the head, tied or not. No halving of causal attention.
        """
        return 6.0 * self._matmul_parameters + 12.0 * self.n_layer * self.n_embd * sequence_length

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Splits heads and MLP width; embeddings, norms and head stay whole. Ranks must divide G."""
        return gpt_plans.tensor_parallel(self)

    def sequence_parallel_plan(self) -> dict[str, Any]:
        """Splits tokens from behind the embedding to the last norm, but for attention and MLP; as in arXiv:2205.05198."""
        return gpt_plans.sequence_parallel(self)

    @property
    def attention_heads(self) -> tuple[int, int]:
        """H and G."""
        return self.n_head, self.n_kv_head

    def replace_attention(self, attention: Callable[..., Tensor]) -> bool:
        """Makes every block attend through another function."""
        for layer in self.layers:
            layer.attention.attend = attention
        return True

    @property
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Embeddings with their norm; the last norm and the head."""
        first = [
            self.embed_tokens,
            self.embed_norm,
            *([self.embed_positions] if self.position == "learned" else []),
        ]
        return first, [self.norm, self.embed_tokens if self.lm_head is None else self.lm_head]


def _check(a: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first of the constructor's arguments that cannot be used."""
    for name, hint in get_type_hints(GPT.__init__).items():
        value, options = a[name], get_args(hint)
        if get_origin(hint) is Literal and value not in options:
            raise ConfigError(f"GPT: {name}={value!r} is none of {options}.{nearest(str(value), options)}")
        if hint in (int, int | None) and value is not None and value < 1:
            raise ConfigError(f"GPT: {name}={value} must be at least 1.")
    if not (0 <= a["dropout"] < 1 and a["rope_theta"] > 0):
        raise ConfigError("GPT: dropout must be at least 0 and below 1, rope_theta above 0.")
    n_embd, n_head, n_kv_head = a["n_embd"], a["n_head"], a["n_kv_head"] or a["n_head"]
    if (fits := n_embd + -n_embd % n_head) != n_embd:
        raise ConfigError(f"GPT: n_embd={n_embd} is not divisible by n_head={n_head}; {fits} is.")
    if n_head % n_kv_head:
        raise ConfigError(f"GPT: n_kv_head={n_kv_head} does not divide n_head={n_head}.")
    dim = {"sinusoidal": n_embd, "rotary": n_embd // n_head}.get(a["position"], 0)
    if dim % 2:
        width = "n_embd" if dim == n_embd else "n_embd / n_head"
        raise ConfigError(f"GPT: position={a['position']} needs an even {width}, not {dim}.")
