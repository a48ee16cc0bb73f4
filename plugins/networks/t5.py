"""T5: an encoder that sees its input in both directions, and a decoder that sees the encoder's states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError
from core.technique import technique
from plugins.networks.parts import plans
from plugins.networks.parts.arguments import check_arguments
from plugins.networks.parts.attention import Attention, document_mask
from plugins.networks.parts.block import Block, parts_of
from plugins.networks.parts.mlp import MLP
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.relative_bias import RelativeBias
from plugins.networks.parts.t5_names import GATED, PLAIN
from toolkit.initial_values import Start, draw, normal


class CrossBlock(Block):
    """A block with attention to the encoder's states between attention and MLP.

    Args:
        attention: See :class:`Block`, as for the others.
        cross: Called with the states as its source.
        mlp: See there.
        new_norm: See there.
        dropout: See there.
    """

    def __init__(self, attention: Attention, cross: Attention, mlp: nn.Module, new_norm: Any, dropout: float):
        super().__init__(attention, mlp, new_norm, "pre", dropout)
        self.cross_norm, self.cross = new_norm(), cross

    def forward(  # type: ignore[override]  # two sequences
        self, x: Tensor, mask: Tensor, states: Tensor, cross_mask: Tensor | None
    ) -> Tensor:
        """Maps x (B, S, C) to (B, S, C), given the encoder's states (B, T, C)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), None, mask, None))
        x = x + self.dropout(self.cross(self.cross_norm(x), None, cross_mask, None, states))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def parts(self) -> dict[str, list[nn.Module]]:
        """As those of :class:`Block`, with both attentions."""
        found = super().parts()
        return found | {"attention": [*found["attention"], self.cross]}


@technique(
    paper="T5, arXiv:1910.10683, section 2.1; version 1.1: arXiv:2002.05202",
    offers=("bidirectional", "encoder_decoder"),
)
class T5(Network):
    """T5 1.0 and 1.1; the defaults are those of T5 small.

    The encoder reads `input_ids` (B, T), the decoder `decoder_input_ids` (B, S), and `forward` returns the states of the
    decoder. Without `decoder_input_ids` the decoder reads the encoder's tokens, each one place later. Where a batch has
    `document_ids` and `decoder_document_ids`, the tokens of a document see its own tokens alone.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks of the encoder.
        n_head: Number of heads.
        n_embd: Width C.
        n_decoder_layer: Number of blocks of the decoder; None: `n_layer`.
        head_dim: Features of a head; None: C / `n_head`.
        intermediate_size: Width of the MLP.
        activation: Of the MLP: "relu" as version 1.0, "gated_gelu" as 1.1.
        buckets: Ranges of distances in the relative position bias, an even number of at least 4.
        max_distance: Distance from which on there is one range; above a half of `buckets`.
        tie_embeddings: Whether the head uses the weight of the token embedding, and states are divided by the root of C, as
            in version 1.0; 1.1 has a head of its own.
        dropout: On embeddings, attention weights, the inner states of the MLP, and all that is added to the residual stream.
        norm_eps: Epsilon of the norms.
        decoder_start_id: The id that the decoder begins with.

    Raises:
        ConfigError: If a value is out of range or a size does not divide another.

    Example:
        model:
          network:
            class_path: T5
            init_args: {n_layer: 2, n_head: 4, n_embd: 128, head_dim: 32, intermediate_size: 256, dropout: 0.0}
          objective: SpanCorruption
        data:
          class_path: SpanCorruptionDataModule
          init_args:
            reader: TextDocuments
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 2048}}
            writer: TokenShards
            packing: Concatenate
            extra_ids: 100
    """

    hugging_face = PLAIN
    deferred_init = True
    max_sequence_length = None

    def __init__(
        self,
        vocab_size: int = 32128,
        n_layer: int = 6,
        n_head: int = 8,
        n_embd: int = 512,
        n_decoder_layer: int | None = None,
        head_dim: int | None = 64,
        intermediate_size: int = 2048,
        activation: Literal["relu", "gated_gelu"] = "relu",
        buckets: int = 32,
        max_distance: int = 128,
        tie_embeddings: bool = True,
        dropout: float = 0.1,
        norm_eps: float = 1e-6,
        decoder_start_id: int = 0,
    ):
        check_arguments(T5, locals() | {"decoder_start_id": decoder_start_id + 1})
        if buckets < 4 or buckets % 2 or max_distance <= buckets // 2:
            raise ConfigError(
                f"T5: buckets={buckets} must be even and at least 4, and max_distance={max_distance} above its half."
            )
        if decoder_start_id >= vocab_size:
            raise ConfigError(
                f"T5: decoder_start_id={decoder_start_id} is not below vocab_size={vocab_size}."
            )
        super().__init__()
        self.vocab_size, self.n_layer, self.n_head, self.n_embd = vocab_size, n_layer, n_head, n_embd
        self.head_dim, self.decoder_start_id = head_dim or n_embd // n_head, decoder_start_id
        self.n_decoder_layer = n_decoder_layer or n_layer
        gated = activation == "gated_gelu"
        if gated:
            self.hugging_face = GATED
        norm = partial(new_norm, "rmsnorm", n_embd, norm_eps)

        def attention() -> Attention:
            size = self.head_dim
            return Attention(
                n_embd, n_head, n_head, False, dropout, head_dim=size, query_scale=1.0, causal=False
            )

        def mlp() -> MLP:
            return MLP(n_embd, intermediate_size, "gelu_tanh" if gated else "relu", False, gated, dropout)

        device = torch.get_default_device()
        with torch.device("meta"):  # skips the modules' own initialisation, which would draw random numbers
            self.embed_tokens = nn.Embedding(vocab_size, n_embd)
            self.dropout = nn.Dropout(dropout)
            self.encoder_bias = RelativeBias(n_head, buckets, max_distance, both_ways=True)
            self.encoder_layers = nn.ModuleList(
                Block(attention(), mlp(), norm, "pre", dropout) for _ in range(n_layer)
            )
            self.encoder_norm = norm()
            self.decoder_bias = RelativeBias(n_head, buckets, max_distance, both_ways=False)
            self.decoder_layers = nn.ModuleList(
                CrossBlock(attention(), attention(), mlp(), norm, dropout)
                for _ in range(self.n_decoder_layer)
            )
            self.norm = norm()
            self.lm_head = None if tie_embeddings else nn.Linear(n_embd, vocab_size, bias=False)
        self._matmul_weights = self._count_weights()
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def _count_weights(self) -> tuple[int, int]:
        """Returns how many weights a token of the encoder is multiplied with, and one of the decoder."""
        stacks = (self.encoder_layers, self.decoder_layers)
        encoder, decoder = (
            sum(one.numel() for one in stack.parameters() if one.ndim == 2) for stack in stacks
        )
        # keys and values of the attention to the encoder's states are of its tokens
        states = 2 * self.n_decoder_layer * self.n_embd * self.n_head * self.head_dim
        return encoder + states, decoder - states + self.vocab_size * self.n_embd

    def init_weights(self) -> None:
        """Initialises every parameter in place; call it after `to_empty`."""
        draw(self)

    def initial_value(self, name: str, tensor: Tensor) -> Start:
        """Returns how a parameter begins, as T5's authors did; see `toolkit.initial_values`."""
        owner = name.rpartition(".")[0]
        if isinstance(self.get_submodule(owner), nn.RMSNorm):
            return 1.0
        wide, inner = self.n_embd**-0.5, (self.n_head * self.head_dim) ** -0.5
        stds = {"embed_tokens": 1.0, "lm_head": 1.0, "o_proj": inner, "q_proj": wide * self.head_dim**-0.5}
        stds["down_proj"] = tensor.shape[-1] ** -0.5
        return normal(stds.get(owner.rpartition(".")[2], wide))

    def forward(self, batch: Mapping[str, Tensor], cache: Any = None) -> Tensor:
        """Returns the decoder's states (B, S, C) after the last norm.

        Raises:
            ConfigError: If a cache is given.
        """
        if cache is not None:
            raise ConfigError("T5 has no cache.")
        documents = batch.get("document_ids")
        states = self._encoded(batch["input_ids"], documents)
        ids, own = batch.get("decoder_input_ids"), batch.get("decoder_document_ids")
        if ids is None:
            ids, own = self._shifted(batch["input_ids"], documents), documents
        length = ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        cross = None
        if own is not None and documents is not None:
            seen = seen & document_mask(own, own)
            cross = (
                document_mask(own, documents) | (own < 0)[:, None, :, None]
            )  # padding sees all, or would be NaN
        mask = _added(self.decoder_bias(length), seen)
        x = self.dropout(self.embed_tokens(ids))
        for block in self.decoder_layers:
            x = block(x, mask, states, cross)
        x = self.dropout(self.norm(x))
        return x * self.n_embd**-0.5 if self.lm_head is None else x

    def _encoded(self, ids: Tensor, documents: Tensor | None) -> Tensor:
        bias = self.encoder_bias(ids.shape[1])
        mask = bias if documents is None else _added(bias, document_mask(documents, documents))
        x = self.dropout(self.embed_tokens(ids))
        for block in self.encoder_layers:
            x = block(x, None, mask, None)
        # Under CUDA's autocast norms return float32, which blocks that compute in bf16 without it cannot multiply.
        return self.dropout(self.encoder_norm(x).to(x.dtype))

    def _shifted(self, ids: Tensor, documents: Tensor | None) -> Tensor:
        """Returns tokens one place later in their document, behind the id that the decoder begins with."""
        found = ids.roll(1, dims=1)
        found[:, 0] = self.decoder_start_id
        if documents is not None:
            found[:, 1:].masked_fill_(documents[:, 1:] != documents[:, :-1], self.decoder_start_id)
        return found

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of the encoder, then those of the decoder."""
        return [*self.encoder_layers, *self.decoder_layers]

    def parts_by_kind(self) -> dict[str, list[nn.Module]]:
        """The modules of each kind; see `toolkit.network_parts`."""
        head: list[nn.Module] = [] if self.lm_head is None else [self.lm_head]
        return parts_of(self.blocks) | {"embedding": [self.embed_tokens], "head": head}

    @property
    def output_weight(self) -> Tensor:
        """The (V, C) weight of the head: that of the token embedding if they are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def flops_per_token(self, sequence_length: int) -> float:
        """Returns 6 N + 12 H D T for each attention, forward and backward, where encoder and decoder read T tokens each.

        N: weights of all projections and of the head.
        """
        return self._row_flops(sequence_length, sequence_length) / sequence_length

    def flops_of_batch(self, batch: Mapping[str, Tensor]) -> float:
        """Returns the same where the decoder reads S tokens: those of the encoder and of the decoder by their numbers."""
        rows, length = batch["input_ids"].shape
        return rows * self._row_flops(length, batch.get("decoder_input_ids", batch["input_ids"]).shape[1])

    def _row_flops(self, length: int, decoder_length: int) -> float:
        of_encoder, of_decoder = self._matmul_weights
        pairs = self.n_layer * length**2 + self.n_decoder_layer * decoder_length * (length + decoder_length)
        weights = of_encoder * length + of_decoder * decoder_length
        return 6.0 * weights + 12.0 * self.n_head * self.head_dim * pairs

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Shards heads, with their relative position bias, and MLP width."""
        from torch.distributed.tensor.parallel import ColwiseParallel

        biases = {f"{stack}_bias.table": ColwiseParallel() for stack in ("encoder", "decoder")}
        return plans.tensor_parallel(self) | biases

    @property
    def attention_heads(self) -> tuple[int, int]:
        """H, twice."""
        return self.n_head, self.n_head


def _added(bias: Tensor, seen: Tensor) -> Tensor:
    """Returns what is added to scores: the bias where a query sees a key, else minus infinity."""
    return bias.masked_fill(~seen, -math.inf)
