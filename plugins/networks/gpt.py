"""A decoder-only transformer with the choices that GPT-2, Llama and their kin make differently.

Shapes: B sequences, T tokens, C = `n_embd`, H query heads and G key-value heads of D = C / H features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.contracts import Network
from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.networks.kv_cache import KVCache

ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}
NORM_EPS = 1e-5
INIT_STD = 0.02


def sinusoid_table(length: int, dim: int, theta: float) -> Tensor:
    """Returns (length, dim): sines of position * theta^(-2i/dim), then their cosines; i < dim / 2."""
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), rates)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + D/2]) of x (B, heads, T, D) by the angles of `table` ([B,] 1, T, D)."""
    sin, cos = table.chunk(2, dim=-1)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def attention_mask(start: int, end: int, document_ids: Tensor | None, device: torch.device) -> Tensor | None:
    """Returns which of the keys [0, end) each query in [start, end) sees, as booleans ([B, 1,] T, end).

    None stands for the two cases that need no mask: as many keys as queries, or a single query.
    """
    if document_ids is None and (start == 0 or end - start == 1):
        return None
    mask = torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
    if document_ids is not None:
        mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return mask


class Attention(nn.Module):
    """Causal self-attention; where G < H, every key-value head serves H / G query heads."""

    def __init__(self, n_embd: int, n_head: int, n_kv_head: int, bias: bool, dropout: float):
        super().__init__()
        self.head_dim, self.dropout = n_embd // n_head, dropout
        self.q_proj = nn.Linear(n_embd, n_embd, bias)
        self.k_proj = nn.Linear(n_embd, n_kv_head * self.head_dim, bias)
        self.v_proj = nn.Linear(n_embd, n_kv_head * self.head_dim, bias)
        self.o_proj = nn.Linear(n_embd, n_embd, bias)

    def forward(self, x: Tensor, rope: Tensor | None, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """Maps x (B, T, C) to (B, T, C), for what `rotate`, `attention_mask` and `KVCache` return."""
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        # -1: under tensor parallelism a projection has only this rank's heads.
        q, k, v = (y.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        causal = mask is None and q.shape[2] == k.shape[2]
        dropout, grouped = self.dropout if self.training else 0.0, q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two projections with an activation between; "swiglu" adds a gate: down(silu(gate(x)) * up(x))."""

    def __init__(self, n_embd: int, intermediate_size: int, activation: str, bias: bool):
        super().__init__()
        self.activation = ACTIVATIONS.get(activation, F.silu)
        self.gate_proj = nn.Linear(n_embd, intermediate_size, bias) if activation == "swiglu" else None
        self.up_proj = nn.Linear(n_embd, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, n_embd, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., C) to (..., C)."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then MLP: x + f(norm(x)) for each with norms first, norm(x + f(x)) with norms last."""

    def __init__(self, attention: Attention, mlp: MLP, norms: list[nn.Module], pre: bool, dropout: float):
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp, self.pre_norm = attention, mlp, pre
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: Tensor | None, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """Maps x (B, T, C) to (B, T, C); the rest is for the attention."""
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.attention_norm(x), rope, mask, cache))
            return x + self.dropout(self.mlp(self.mlp_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x, rope, mask, cache)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


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
        self.n_layer, self.n_embd = n_layer, n_embd
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
        x, rope = self.embed_tokens(input_ids), None
        if self.position == "learned":
            x = x + self.embed_positions(positions)
        elif self.position == "sinusoidal":
            x = x * math.sqrt(self.n_embd) + self.position_table[positions]
        else:
            rope = self.position_table[positions].unsqueeze(-3)
        x, mask = self.dropout(self.embed_norm(x)), attention_mask(start, end, document_ids, x.device)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, mask, cache[index] if cache else None)
        return self.norm(x)

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
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        styles = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel)
        styles |= dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel)
        return {n: styles[leaf]() for n, _ in self.named_modules() if (leaf := n.split(".")[-1]) in styles}


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
