"""A language model without attention: gated recurrences that are linear in their state.

Shapes: B sequences, T tokens, C = `n_embd`, W = `width` channels of the recurrence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError
from core.technique import technique


def scan(keep: Tensor, new: Tensor) -> Tensor:
    """Returns h[t] = keep[t] * h[t - 1] + new[t] with h[-1] = 0, all (B, T, W), in ceil(log2 T) passes.

    Hillis and Steele, Data parallel algorithms (1986): after the pass with distance d, position t holds
    what the 2 d steps up to t make of a state.
    """
    distance = 1
    while distance < new.shape[1]:
        head, tail = slice(None, distance), slice(distance, None)
        before = new[:, :-distance], keep[:, :-distance]
        new = torch.cat((new[:, head], new[:, tail] + keep[:, tail] * before[0]), dim=1)
        keep = torch.cat((keep[:, head], keep[:, tail] * before[1]), dim=1)
        distance *= 2
    return new


class Recurrence(nn.Module):
    """x + out(h * silu(gate)), where h[t] = (1 - z) h[t - 1] + z candidate with z = sigmoid(update)."""

    def __init__(self, n_embd: int, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(n_embd)
        self.update = nn.Linear(n_embd, width)
        self.candidate = nn.Linear(n_embd, width, bias=False)
        self.gate = nn.Linear(n_embd, width, bias=False)
        self.out = nn.Linear(width, n_embd, bias=False)

    def forward(self, x: Tensor, first: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns what x (B, T, C) becomes and the last state (B, W).

        Args:
            x: The residual stream.
            first: Where a document begins, (B, T, 1): there the state before counts for nothing.
            state: The state before the first token, (B, W).
        """
        y = self.norm(x)
        z = self.update(y).float().sigmoid()  # float32: a state may live for hundreds of tokens
        keep, new = 1 - z, z * self.candidate(y).float()
        if first is not None:
            keep = keep.masked_fill(first, 0.0)
        if state is not None:
            new = torch.cat((new[:, :1] + keep[:, :1] * state[:, None], new[:, 1:]), dim=1)
        h = scan(keep, new)
        return x + self.out(h.type_as(y) * F.silu(self.gate(y))), h[:, -1]


@technique(paper="minGRU: Were RNNs All We Needed?, arXiv:2410.01201, section 3.1", api=">=1,<2")
class MinGRU(Network):
    """Blocks of a gated linear recurrence; time and memory grow linearly with T, and T has no limit.

    For generation it keeps one state (B, W) per block, however long the text. The output weight is the
    embedding's.

    Args:
        vocab_size: Rows V of the embedding.
        n_layer: Blocks.
        n_embd: Width C of the residual stream.
        width: Channels W of each recurrence; None: 2 C. Tensor parallelism divides them among the ranks.

    Raises:
        ConfigError: If a size is below 1.

    Example:
        model:
          network:
            class_path: MinGRU
            init_args: {vocab_size: 2048, n_layer: 2, n_embd: 64}
    """

    max_sequence_length = None

    def __init__(
        self, vocab_size: int = 2048, n_layer: int = 2, n_embd: int = 64, width: int | None = None
    ) -> None:
        width = 2 * n_embd if width is None else width
        for name, value in {
            "vocab_size": vocab_size,
            "n_layer": n_layer,
            "n_embd": n_embd,
            "width": width,
        }.items():
            if value < 1:
                raise ConfigError(f"MinGRU: {name}={value} must be at least 1.")
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, n_embd)
        self.layers = nn.ModuleList(Recurrence(n_embd, width) for _ in range(n_layer))
        self.norm = nn.RMSNorm(n_embd)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialises every parameter in place; the recurrences forget within 2 to 400 tokens at first."""
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        for layer in self.layers:
            nn.init.uniform_(layer.update.bias, -6.0, 0.0)  # sigmoid: 1/404 to 1/2

    def forward(self, batch: Mapping[str, Tensor], cache: list[Tensor | None] | None = None) -> Tensor:
        """Returns hidden states (B, T, C) after the last norm; a state does not cross `document_ids`."""
        documents, first = batch.get("document_ids"), None
        if documents is not None:
            if cache is not None:
                raise ConfigError(
                    "MinGRU: document_ids cannot be used with a cache: generate one document a row."
                )
            first = documents.diff(dim=1, prepend=documents[:, :1]).ne(0).unsqueeze(-1)
        x = self.embedding(batch["input_ids"])
        for index, layer in enumerate(self.layers):
            x, state = layer(x, first, cache[index] if cache else None)
            if cache is not None:
                cache[index] = state
        return self.norm(x)

    def new_cache(self, batch_size: int, max_length: int) -> list[Tensor | None]:
        """Returns the states before the first token: None for zeros, whose number of channels a rank knows."""
        return [None] * len(self.layers)

    @property
    def blocks(self) -> nn.ModuleList:
        """The recurrent blocks, in order."""
        return self.layers

    @property
    def output_weight(self) -> Tensor:
        """The (V, C) weight of the embedding."""
        return self.embedding.weight

    def flops_per_token(self, sequence_length: int) -> float:
        """Returns 6 per weight of a matrix product, the head's too: the scans are no matrix products."""
        linears = (module.weight for module in self.modules() if isinstance(module, nn.Linear))
        return 6.0 * (self.embedding.weight.numel() + sum(weight.numel() for weight in linears))

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Gives each rank its share of the channels: a recurrence never mixes two. Ranks must divide W."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        plan: dict[str, Any] = {}
        for index in range(len(self.layers)):
            plan |= {f"layers.{index}.{name}": ColwiseParallel() for name in ("update", "candidate", "gate")}
            plan[f"layers.{index}.out"] = RowwiseParallel()
        return plan
