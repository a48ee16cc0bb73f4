"""Attention to some of the tokens before: windows, first tokens, blocks. With FlexAttention on CUDA, else with a mask.

Shapes: B sequences, T queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SparsePattern:
    """Which tokens of its document, at or before its own position, a query sees: those for which one of these holds.

    Args:
        window: It is one of the last so many, the query's own included (arXiv:2004.05150).
        sinks: It is one of the first so many (arXiv:2309.17453).
        block_size: Tokens of a block, counted from the start of the document.
        block_stride: It is in the last block of each so many: the "fixed" pattern of arXiv:1904.10509. None: no block.
    """

    window: int
    sinks: int = 0
    block_size: int = 64
    block_stride: int | None = None

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns whether queries see keys, given positions in the document, which broadcast."""
        found = (query - key < self.window) | (key < self.sinks)
        if self.block_stride is not None:
            found = found | (key // self.block_size % self.block_stride == self.block_stride - 1)
        return found & (key <= query)

    def seen(self, length: int) -> float:
        """Returns how many tokens a query sees at most in a sequence of so many; those seen twice count once."""
        position = torch.arange(length, device="cpu")
        return float(self.visible(torch.tensor(length - 1), position).sum())

    def dense(self, query: Tensor, key: Tensor, same: Tensor | None = None) -> Tensor:
        """Returns the mask of positions ([B,] T) and ([B,] S), ([B, 1,] T, S).

        Args:
            query: Positions of the queries in their documents.
            key: Positions of the keys.
            same: Which queries and keys are of one document, (B, 1, T, S); None: all.
        """
        found = self.visible(query[..., :, None], key[..., None, :])
        found = found if found.ndim == 2 else found[:, None]
        return found if same is None else found & same

    def blocks(self, positions: Tensor, document_ids: Tensor | None) -> Any:
        """Returns the same mask as FlexAttention's, for keys that are the queries; positions are ([B,] T)."""
        from torch.nn.attention.flex_attention import create_block_mask

        length = positions.shape[-1]
        rows = positions.expand(len(positions), length) if positions.ndim == 2 else positions[None]
        ids = torch.zeros_like(rows) if document_ids is None else document_ids

        def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = row if len(rows) > 1 else 0
            same = ids[row if len(ids) > 1 else 0, query] == ids[row if len(ids) > 1 else 0, key]
            return self.visible(rows[place, query], rows[place, key]) & same

        several = max(len(rows), len(ids))
        return create_block_mask(
            visible, several if several > 1 else None, None, length, length, device=str(positions.device)
        )
