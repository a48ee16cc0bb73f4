"""BERT: tokens see each other in both directions, and a head predicts those that were masked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from core.errors import ConfigError
from core.technique import technique
from plugins.networks.parts.arguments import check_arguments
from plugins.networks.parts.attention import Attention, Cache, document_mask
from plugins.networks.parts.bert_names import AS_MASKED_LM
from plugins.networks.parts.block import Block
from plugins.networks.parts.decoder import Decoder, Layer
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.mlp import ACTIVATIONS, MLP
from plugins.networks.parts.norms import new_norm
from toolkit.fused_masks import fused_mask
from toolkit.initial_values import Start
from toolkit.label_positions import LABEL_POSITIONS


class PredictionHead(nn.Module):
    """What BERT's last hidden states pass before the output weight, and a bias for each token.

    Args:
        n_embd: Width C.
        vocab_size: V.
        activation: Between the projection and the norm.
        norm: Of C features.
    """

    def __init__(self, n_embd: int, vocab_size: int, activation: str, norm: nn.Module):
        super().__init__()
        self.dense = nn.Linear(n_embd, n_embd)
        self.activation, self.norm = ACTIVATIONS[activation], norm
        self.bias = nn.Parameter(torch.empty(vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (B, T, C) to (B, T, C)."""
        return self.norm(self.activation(self.dense(x)))


@technique(paper="BERT, arXiv:1810.04805, sections 3 and A.2", offers=("bidirectional", "encoder"))
class BERT(Decoder):
    """BERT and all of its shape, with the head that predicts masked tokens; the defaults are those of BERT base.

    A token sees all tokens of its document (`document_ids`). Segments are read from `token_type_ids` (B, T), where a batch
    has them. The head's output weight is that of the token embedding, as in BERT.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_head: Number of heads.
        n_embd: Width C, a multiple of `n_head`.
        max_sequence_length: Largest T.
        intermediate_size: Width of the MLP.
        token_types: Rows of the embedding of segments.
        activation: Of MLP and head.
        norm_eps: Epsilon of the norms.
        dropout: On the embeddings, and on the outputs of attention and MLP.
        attention_dropout: Dropout on the attention weights, after the softmax.
        head: Whether there is the head; without it `forward` returns the states of the last block, for embeddings of texts.
        init: Of matrices. "llama": N(0, 0.02), as BERT; "gpt2": N(0, 0.02 / sqrt(2 n_layer)) for the two per block that add
            to the residual stream; "small": N(0, sqrt(2 / (5 C))), and N(0, 2 / (n_layer sqrt(C))) for those two.
        init_std: Patterns of module names -> standard deviation, over `init`: `{embed_tokens: 0.01}`.

    Raises:
        ConfigError: If a value is out of range or a size does not divide another.

    Example:
        model:
          network:
            class_path: BERT
            init_args: {n_layer: 4, n_head: 4, n_embd: 128, intermediate_size: 512, max_sequence_length: 256, dropout: 0.0, attention_dropout: 0.0}
          objective: MaskedLM
        data:
          class_path: MaskedDataModule
          init_args:
            reader: TextDocuments
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 2048, special_tokens: ["[MASK]"]}}
            writer: TokenShards
            packing: Concatenate
    """

    hugging_face = AS_MASKED_LM
    may_lack = ("head.",)

    deferred_init = True

    def __init__(
        self,
        vocab_size: int = 30522,
        n_layer: int = 12,
        n_head: int = 12,
        n_embd: int = 768,
        max_sequence_length: int = 512,
        intermediate_size: int = 3072,
        token_types: int = 2,
        activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu",
        norm_eps: float = 1e-12,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        head: bool = True,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        check_arguments(BERT, locals())
        super().__init__(
            vocab_size=vocab_size,
            n_embd=n_embd,
            n_head=n_head,
            n_kv_head=n_head,
            head_dim=n_embd // n_head,
            max_sequence_length=max_sequence_length,
            layers=[Layer()] * n_layer,
            init=init,
            init_std=init_std,
        )
        self.token_types, self.has_head, self.activation = token_types, head, activation
        norm = partial(new_norm, "layernorm", n_embd, norm_eps)

        def new_block(index: int) -> Block:
            attention = Attention(n_embd, n_head, n_head, True, attention_dropout, causal=False)
            return Block(
                attention, MLP(n_embd, intermediate_size, activation, True, False), norm, "post", dropout
            )

        self.build(new_block, norm, True, dropout)
        self._head_weights += n_embd**2 * head

    def _add_modules(
        self,
        new_block: Callable[[int], nn.Module],
        new_norm: Callable[[], nn.Module],
        tie_embeddings: bool,
        dropout: float,
    ) -> None:
        self.embed_tokens = nn.Embedding(self.vocab_size, self.n_embd)
        self.embed_positions = nn.Embedding(self.max_sequence_length, self.n_embd)
        self.embed_token_types = nn.Embedding(self.token_types, self.n_embd)
        self.embed_norm = new_norm()
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(new_block(index) for index in range(self.n_layer))
        self.norm = nn.Identity()
        own = (self.n_embd, self.vocab_size, self.activation, new_norm())
        self.head = PredictionHead(*own) if self.has_head else None
        self.lm_head = None

    def initial_value(self, name: str, tensor: Tensor) -> Start | None:
        """As that of :class:`Decoder`; the head's biases begin at zero."""
        return 0.0 if name == "head.bias" else super().initial_value(name, tensor)

    def forward_blocks(
        self,
        batch: Mapping[str, Tensor],
        hidden: Tensor | None,
        blocks: range,
        cache: list[Cache] | None = None,
    ) -> Tensor:
        """Runs some blocks on hidden states (B, T, C), or on the embeddings if `hidden` is None."""
        if cache is not None:
            raise ConfigError("BERT has no cache: each token sees those after it.")
        documents = batch.get("document_ids")
        _, length = self._span(batch["input_ids"], documents, None)
        x = self._sum_of_embeddings(batch, length) if hidden is None else hidden
        mask: Any = None
        if documents is not None and self._fuses(documents.device, length):
            mask = fused_mask(length, length, documents.device, (documents, documents), causal=False)
        elif documents is not None:
            mask = document_mask(documents, documents)
        for index in blocks:
            x = self.layers[index](x, None, mask, None)
        return self._output(x) if blocks.stop == self.n_layer else x

    def _sum_of_embeddings(self, batch: Mapping[str, Tensor], length: int) -> Tensor:
        ids, types, places = batch["input_ids"], batch.get("token_type_ids"), batch.get("position_ids")
        x = self.embed_tokens(ids)
        x = x + self.embed_token_types(torch.zeros_like(ids) if types is None else types)
        x = x + self.embed_positions(torch.arange(length, device=x.device) if places is None else places)
        return self.dropout(self.embed_norm(x))

    def _output(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x if self.head is None else self.head(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Turns what `forward` returned, (..., C), into logits (..., V)."""
        found = nn.functional.linear(hidden, self._head_weight)
        return found if self.head is None else found + _like(found, self.head.bias)

    def flops_of_batch(self, batch: Mapping[str, Tensor]) -> float:
        """Returns `flops_per_token` for all positions, with logits of those alone that `LABEL_POSITIONS` names."""
        rows, length = batch["input_ids"].shape
        positions = batch.get(LABEL_POSITIONS)
        without = 0 if positions is None else length - positions.shape[1]
        logits = 6.0 * self.vocab_size * self.n_embd
        return rows * (length * self.flops_per_token(length) - without * logits)

    run_further_block = None  # type: ignore[assignment]  # a token sees those that it would predict
    attends_to_prefixes = False  # type: ignore[assignment]  # they are seen in both directions anyway

    def new_cache(self, batch_size: int, max_length: int) -> None:  # type: ignore[override]  # there is none
        """Returns None: no token's states are known before those after it."""

    @property
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Embeddings with their norm; the head."""
        first = [self.embed_tokens, self.embed_positions, self.embed_token_types, self.embed_norm]
        return first, [self.norm, *([] if self.head is None else [self.head]), self.embed_tokens]


def _like(logits: Tensor, bias: Tensor) -> Any:
    """Returns the bias, sharded over the vocabulary where the logits are."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(logits, DTensor) or isinstance(bias, DTensor):
        return bias
    found = DTensor.from_local(bias, logits.device_mesh, [Replicate()], run_check=False)
    sharded = logits.placements[0].is_shard(logits.ndim - 1)
    return found.redistribute(placements=[Shard(0) if sharded else Replicate()])
