"""What all decoder families share: a stack of blocks between an embedding and a head, and what strategies ask of it.

Shapes: B sequences, T tokens, C = `n_embd` features, H query heads and G key-value heads of D features each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError
from plugins.networks.parts import plans
from plugins.networks.parts.attention import Attention, Cache, attention_mask
from plugins.networks.parts.block import parts_of
from plugins.networks.parts.initialisation import Init, std_of
from plugins.networks.parts.kv_cache import KVCache, SlidingKVCache
from plugins.networks.parts.latent_attention import LatentAttention
from plugins.networks.parts.norms import GemmaRMSNorm, soft_cap
from plugins.networks.parts.padded_cache import PaddedCache
from plugins.networks.parts.positions import Rope
from toolkit.fused_masks import masked_attention, takes_fused_masks
from toolkit.initial_values import Start, draw, normal
from toolkit.prefixes import PREFIX


class Layer(NamedTuple):
    """What one block of a decoder sees.

    Attributes:
        rope: Its rotary positions; None: it has none.
        window: How many tokens a query sees, itself included; None: all before it.
    """

    rope: Rope | None = None
    window: int | None = None


class Decoder(Network):
    """A decoder-only transformer. A family is a subclass whose constructor checks arguments and calls two methods.

    First this constructor, with the sizes, and then :meth:`build`, with what makes its parts.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_embd: Width C.
        n_head: H.
        n_kv_head: G.
        head_dim: D.
        value_dim: Features of a head's value; None: D.
        max_sequence_length: Largest T.
        layers: For each block what it sees. Tables and masks are made once for those that are alike.
        init: See :func:`std_of`.
        init_std: As its `own`.
        embedding_scale: What embeddings are multiplied with.
        final_soft_cap: Logits are kept within this: `forward` then returns them, and no hidden states.
    """

    layers: nn.ModuleList
    norm: nn.Module
    lm_head: nn.Linear | None
    max_sequence_length: int

    @abstractmethod
    def __init__(
        self,
        *,
        vocab_size: int,
        n_embd: int,
        n_head: int,
        n_kv_head: int,
        head_dim: int,
        value_dim: int | None = None,
        max_sequence_length: int,
        layers: Sequence[Layer],
        init: Init = "llama",
        init_std: Mapping[str, float] | None = None,
        embedding_scale: float | None = None,
        final_soft_cap: float | None = None,
    ):
        super().__init__()
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.n_layer, self.n_embd, self.head_dim = len(layers), n_embd, head_dim
        self.n_head, self.n_kv_head, self.value_dim = n_head, n_kv_head, value_dim or head_dim
        self.weight_init, self.init_std = init, dict(init_std or {})
        self.embedding_scale, self.final_soft_cap = embedding_scale, final_soft_cap
        # a window that no sequence leaves is none: attention stays one call without a mask
        layers = [
            layer._replace(window=None if (layer.window or 0) >= max_sequence_length else layer.window)
            for layer in layers
        ]
        self._ropes: list[Rope] = []
        for layer in layers:
            if layer.rope is not None and layer.rope not in self._ropes:
                self._ropes.append(layer.rope)
        self._tables = [None if one.rope is None else self._ropes.index(one.rope) for one in layers]
        self.windows = [layer.window for layer in layers]

    def new_attention(self, bias: bool, dropout: float, **options: Any) -> Attention:
        """Returns attention of the network's sizes for one block; the arguments are those of :class:`Attention`."""
        sizes = self.n_embd, self.n_head, self.n_kv_head
        return Attention(*sizes, bias, dropout, head_dim=self.head_dim, **options)

    def build(
        self,
        new_block: Callable[[int], nn.Module],
        new_norm: Callable[[], nn.Module],
        tie_embeddings: bool,
        dropout: float = 0.0,
    ) -> None:
        """Adds the modules and, unless on the meta device, initialises them.

        Args:
            new_block: Returns a block, given its index; called as :class:`Block` is.
            new_norm: Returns the norm after the last block.
            tie_embeddings: Whether the head uses the weight of the token embedding.
            dropout: Of the embeddings.
        """
        if tie_embeddings and self.weight_init == "mup":
            raise ConfigError(
                f"{type(self).__name__}: init=mup begins with a head of zeros, which tied embeddings would share: set "
                "tie_embeddings to false where the network has it, or take another init."
            )
        device = torch.get_default_device()
        with torch.device("meta"):  # skips the modules' own initialisation, which would draw random numbers
            self._add_modules(new_block, new_norm, tie_embeddings, dropout)
        self._matmul_weights = [self._count_weights(block) for block in self.layers]
        self._head_weights = self.vocab_size * self.n_embd
        self._has_own_attention = True
        self._has_attention_dropout = any(one.dropout for one in self._attentions)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def _add_modules(
        self,
        new_block: Callable[[int], nn.Module],
        new_norm: Callable[[], nn.Module],
        tie_embeddings: bool,
        dropout: float,
    ) -> None:
        """Adds embeddings, blocks, norm and head, in the order of the parameters in checkpoints."""
        self.embed_tokens = nn.Embedding(self.vocab_size, self.n_embd)
        for index, rope in enumerate(self._ropes):
            table = torch.empty(self.max_sequence_length, rope.dim)
            self.register_buffer(f"rope_table_{index}", table, persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(new_block(index) for index in range(self.n_layer))
        self.norm = new_norm()
        self.lm_head = None if tie_embeddings else nn.Linear(self.n_embd, self.vocab_size, bias=False)

    def _count_weights(self, block: nn.Module) -> int:
        """Returns how many weights of a block each token is multiplied with."""
        return sum(weight.numel() for weight in block.parameters() if weight.ndim == 2)

    def init_weights(self) -> None:
        """Initialises every parameter and buffer in place; call it after `to_empty`."""
        draw(self)

    def initial_value(self, name: str, tensor: Tensor) -> Start | None:
        """Returns how a parameter or buffer begins; see `toolkit.initial_values`."""
        owner, _, leaf = name.rpartition(".")
        module = self.get_submodule(owner)
        if module is self:
            return self._table(leaf, tensor)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            return 0.0 if leaf == "bias" or isinstance(module, GemmaRMSNorm) else 1.0
        if isinstance(module, nn.Embedding | nn.Linear):
            return 0.0 if leaf == "bias" else self._matrix(owner, tensor)
        return None

    def _matrix(self, name: str, weight: Tensor) -> Start:
        """Returns how a matrix begins, given the name of its module."""
        sizes = self.n_layer, self.n_embd, self.init_std, weight.shape[-1]
        return normal(std_of(name, self.weight_init, *sizes))

    def _table(self, name: str, table: Tensor) -> Tensor | None:
        """Returns the values of a table of the network itself."""
        index = name.removeprefix("rope_table_")
        return self._ropes[int(index)].table(len(table)) if index != name else None

    def forward(self, batch: Mapping[str, Tensor], cache: list[Cache] | None = None) -> Tensor:
        """Returns hidden states (B, T, C) after the last norm; with `final_soft_cap` logits (B, T, V).

        By default `position_ids` continue after the cached tokens. Attention stays within equal `document_ids`, and is
        in both directions within a `prefix`.

        Raises:
            ConfigError: If the sequence, with the cached tokens, is too long, or if a cache is used with
                `document_ids` or a `prefix`.
        """
        return self.forward_blocks(batch, None, range(self.n_layer), cache)

    def forward_blocks(
        self,
        batch: Mapping[str, Tensor],
        hidden: Tensor | None,
        blocks: range,
        cache: list[Cache] | None = None,
    ) -> Tensor:
        """Runs some blocks on hidden states (B, T, C), or on the embeddings if `hidden` is None."""
        x = self._run({index: self.layers[index] for index in blocks}, batch, hidden, cache)
        return self._output(x) if blocks.stop == self.n_layer else x

    def run_further_block(self, block: nn.Module, batch: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Runs a copy of the last block on hidden states (B, T, C); see `toolkit.further_blocks`."""
        return self._run({self.n_layer - 1: block}, batch, hidden)

    def _run(
        self,
        blocks: Mapping[int, nn.Module],
        batch: Mapping[str, Tensor],
        hidden: Tensor | None,
        cache: list[Cache] | None = None,
    ) -> Tensor:
        """Runs blocks, given by the index whose positions, mask and cache they have."""
        input_ids, document_ids, prefix = batch["input_ids"], batch.get("document_ids"), batch.get(PREFIX)
        start, end = self._span(input_ids, document_ids, cache)
        if cache and prefix is not None:
            raise ConfigError(f"{type(self).__name__}: a prefix cannot be used with a cache.")
        positions = batch.get("position_ids")
        visible = cache.visible if isinstance(cache, PaddedCache) else None
        if positions is None and isinstance(cache, PaddedCache) and visible is not None:
            positions = cache.positions(start, end)
        elif positions is None:
            positions = torch.arange(start, end, device=input_ids.device)
        x = self._embedded(input_ids, positions) if hidden is None else hidden
        ropes = self._rotary(positions)
        masks = self._masks(start, end, document_ids, positions, visible, prefix, bool(cache))
        for index, block in blocks.items():
            x = block(x, ropes[index], masks[index], cache[index] if cache else None)
        return x

    def _masks(
        self,
        start: int,
        end: int,
        document_ids: Tensor | None,
        positions: Tensor,
        visible: Tensor | None,
        prefix: Tensor | None,
        cached: bool,
    ) -> list[Any]:
        """Returns for each block what it is given as a mask; the arguments are those of :func:`attention_mask`.

        Where `_fuses` says so, masks of documents and windows are FlexAttention's.
        """
        device, fused = positions.device, not cached and self._fuses(positions.device, end)
        masks = {
            window: attention_mask(start, end, document_ids, device, window, visible, prefix, fused)
            for window in dict.fromkeys(self.windows)
        }
        return [masks[window] for window in self.windows]

    def _fuses(self, device: torch.device, length: int) -> bool:
        """Whether blocks take masks of `toolkit.fused_masks`, which have no dropout, without a cache."""
        dropout = self.training and self._has_attention_dropout
        return self._has_own_attention and not dropout and takes_fused_masks(device, length)

    def _span(
        self, input_ids: Tensor, document_ids: Tensor | None, cache: list[Cache] | None
    ) -> tuple[int, int]:
        """Returns the places of the new tokens in the sequence, [start, end)."""
        name = type(self).__name__
        start, limit = (cache[0].length, cache[0].max_length) if cache else (0, self.max_sequence_length)
        end = start + input_ids.shape[1]
        if end > limit:
            what = "the cache's length" if cache else "max_sequence_length"
            raise ConfigError(f"{name}: a sequence of {end} tokens is longer than {what}, {limit}.")
        if cache and document_ids is not None:
            raise ConfigError(
                f"{name}: document_ids cannot be used with a cache: generate one document a row."
            )
        return start, end

    def _rotary(self, positions: Tensor) -> list[Tensor | None]:
        """Returns for each block sines and cosines ([B,] 1, T, D) of positions ([B,] T)."""
        names = [f"rope_table_{index}" for index in range(len(self._ropes))]
        found = [self.get_buffer(name)[positions].unsqueeze(-3) for name in names]
        return [None if index is None else found[index] for index in self._tables]

    def _embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        if self.embedding_scale is not None:
            x = x * x.new_full((), self.embedding_scale)  # in its data type, as Gemma was trained
        return self.dropout(x)

    def _output(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.final_soft_cap is None:
            return x
        return soft_cap(nn.functional.linear(x, self._head_weight), self.final_soft_cap)

    def new_cache(self, batch_size: int, max_length: int) -> list[Cache]:
        """Returns an empty cache per layer, for at most `max_sequence_length` tokens."""
        length = min(max_length, self.max_sequence_length)
        return [
            KVCache(batch_size, length) if window is None else SlidingKVCache(length, window)
            for window in self.windows
        ]

    def new_padded_cache(self, padding: Tensor, max_length: int) -> PaddedCache | None:
        """Returns an empty cache for rows that begin with `padding` (B,) ids; see `PadsPrompts`."""
        layers = self.new_cache(len(padding), max_length)
        return None if layers is None else PaddedCache(layers, padding)

    def select_cache_rows(self, cache: PaddedCache, rows: Tensor) -> None:
        """Changes a cache to these of its rows, (b,) indexes."""
        cache.select(rows)

    def keep_cache_prefix(self, cache: PaddedCache, length: int, max_length: int) -> bool:
        """Changes a cache to its first tokens; see `KeepsPrefix`."""
        return cache.keep(length, min(max_length, self.max_sequence_length))

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]  # torch does not declare it a Sequence
        """The transformer blocks, in order."""
        return self.layers

    @property
    def _head_weight(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def output_weight(self) -> Tensor | None:
        """The (V, C) weight of the head: that of the token embedding if they are tied. None with `final_soft_cap`."""
        return None if self.final_soft_cap is not None else self._head_weight

    def flops_per_token(self, sequence_length: int) -> float:
        """Returns 6 N + 12 H D T for each layer, forward and backward; PaLM, arXiv:2204.02311, appendix B.

        N: weights of the blocks' projections and of the head, tied or not. Causal attention is not halved; in a layer
        with a window T is at most the window. Where values have V features and not D, 2 D is D + V.
        """
        blocks = (self._block_flops(index, sequence_length) for index in range(self.n_layer))
        return 6.0 * self._head_weights + sum(blocks)

    def further_block_flops(self, sequence_length: int) -> float:
        """Returns those of :meth:`run_further_block`."""
        return self._block_flops(self.n_layer - 1, sequence_length)

    def _block_flops(self, index: int, sequence_length: int) -> float:
        seen = min(sequence_length, self.windows[index] or sequence_length)
        scores = 6.0 * self.n_head * (self.head_dim + self.value_dim) * seen
        return 6.0 * self._matmul_weights[index] + scores

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Shards heads and MLP width; embeddings, norms and head stay replicated. The number of ranks must divide G."""
        return plans.tensor_parallel(self)

    def sequence_parallel_plan(self) -> dict[str, Any]:
        """Shards tokens between embedding and last norm, except in attention and MLP; as in arXiv:2205.05198."""
        return plans.sequence_parallel(self)

    @property
    def attention_heads(self) -> tuple[int, int] | None:
        """H and G."""
        return self.n_head, self.n_kv_head

    @property
    def _attentions(self) -> list[Attention | LatentAttention]:
        return [module for module in self.modules() if isinstance(module, Attention | LatentAttention)]

    @property
    def attends_to_prefixes(self) -> bool:
        """Whether all blocks attend with the mask that they are given, to all tokens; see `toolkit.prefixes`."""
        return len(self._attentions) >= self.n_layer and all(window is None for window in self.windows)

    def replace_attention(self, attention: Callable[..., Tensor]) -> bool:
        """Replaces the attention function of every block; False with a window, a cap, a scale or latents, which it could not keep.

        Another function than torch's is given masks of booleans alone; torch's brings the network's own back.
        """
        found = self._attentions
        if any(window is not None for window in self.windows) or not all(one.is_plain for one in found):
            return False
        self._has_own_attention = attention is nn.functional.scaled_dot_product_attention
        for module in found:
            if isinstance(module, Attention):
                module.attend = masked_attention if self._has_own_attention else attention
        return True

    def select_rows(self, arguments: tuple[Any, ...], rows: Tensor) -> tuple[Any, ...] | None:
        """Selects rows of rotary positions ([B,] 1, T, D) and mask ([B, 1,] T, T) that have a batch dimension.

        None with FlexAttention's masks, which are made for all rows.
        """
        rope, mask, cache = arguments
        if cache is not None or not (mask is None or isinstance(mask, Tensor)):
            return None
        return *(x[rows] if x is not None and x.ndim == 4 else x for x in (rope, mask)), None

    def parts_by_kind(self) -> dict[str, list[nn.Module]]:
        """The modules of each kind; see `toolkit.network_parts`."""
        first, last = self.ends
        return parts_of(self.layers) | {"embedding": first, "head": last[1:]}

    @property
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The embedding; the last norm and the head."""
        return [self.embed_tokens], [self.norm, self.embed_tokens if self.lm_head is None else self.lm_head]
