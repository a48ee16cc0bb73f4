"""Forward without gradients whose work ranks share: each calls it with the same whole rows, and has what one process returns.

Shapes: B rows of T tokens, C features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from core.contracts import IGNORED_LABEL
from plugins.strategies.context_parallel import ContextParallel

Forward = Callable[[Mapping[str, Tensor]], Tensor]

FILLED = {"labels": IGNORED_LABEL, "document_ids": -1}
"""What tokens behind the end of a row have; other tensors have 0."""


def by_rows(forward: Forward, group: dist.ProcessGroup) -> Forward:
    """Returns a forward of which each rank of a group computes some of the rows.

    All of them call its modules as often as the others, as those need that exchange tokens or weights.
    """
    ranks, rank = group.size(), group.rank()

    def shared(batch: Mapping[str, Tensor]) -> Tensor:
        rows = len(batch["input_ids"])
        each = -(-rows // ranks)
        own = torch.arange(rank * each, (rank + 1) * each, device=batch["input_ids"].device)
        own = own.clamp(max=rows - 1)  # the last row fills up
        found = forward({name: value[own] for name, value in batch.items()}).contiguous()
        parts = [torch.empty_like(found) for _ in range(ranks)]
        dist.all_gather(parts, found, group=group)
        return torch.cat(parts)[:rows]

    return shared


def by_tokens(forward: Forward, multiple: int, context: ContextParallel | None) -> Forward:
    """Returns a forward of rows of any length, of which each rank of a context-parallel group computes some tokens.

    Args:
        forward: Of rows of a multiple of tokens.
        multiple: The multiple; rows are filled up behind their end, where a causal network does not look.
        context: The group; None: each rank has all tokens.
    """

    def shared(batch: Mapping[str, Tensor]) -> Tensor:
        shape = batch["input_ids"].shape
        more = -shape[1] % multiple
        whole = {
            name: F.pad(value, (0, more), value=FILLED.get(name, 0)) if value.shape == shape else value
            for name, value in batch.items()
        }
        if context is None:
            return forward(whole)[:, : shape[1]]
        return context.joined(forward(context.shard(whole)))[:, : shape[1]]

    return shared


def without_cache(forward: Forward) -> dict[str, Callable[..., Any]]:
    """Returns methods of a network that has this forward, and keeps no keys of earlier tokens."""
    return {
        "forward": lambda batch, cache=None: forward(batch),
        "new_cache": lambda *arguments: None,
        "new_padded_cache": lambda *arguments: None,
    }


@contextmanager
def with_methods(network: nn.Module, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Context in which a network has other methods."""
    own = {name: value for name, value in vars(network).items() if name in methods}
    vars(network).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(network)[name]
        vars(network).update(own)  # such as the logits of a vocabulary that is split up
