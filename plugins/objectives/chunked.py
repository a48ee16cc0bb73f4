"""Sums over positions whose logits are computed for one chunk of positions at a time, where all of them would be large."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from core.contracts import Network
from core.errors import ConfigError
from core.training.shards import full_tensor
from toolkit.aligned_logits import first_columns, is_plain, padded, product_of

Parts = Callable[[Tensor, Tensor], Tensor]
"""(logits (n, V), labels (n,)) -> sums (P,); the first one is differentiated."""

Call = Callable[..., Tensor]
"""Calls a function with arguments."""

ChunkTokens = int | Literal["auto"] | None

LOGITS_BYTES = 2**29
LEAST = 1024
LEAST_CUDA = 4096
"""Positions of a chunk: the gradient of the weight is read and written once for each, which with fewer takes over 10% of
the time of the products on an H100."""


def check_chunk_tokens(owner: str, chunk_tokens: ChunkTokens) -> None:
    """Raises a ConfigError, which names the objective, if the setting is not one."""
    if not (chunk_tokens in (None, "auto") or (isinstance(chunk_tokens, int) and chunk_tokens >= 1)):
        raise ConfigError(f"{owner} takes chunk_tokens auto, from 1 upwards or null, not {chunk_tokens}.")


def sums_over_positions(
    parts: Parts,
    network: Network,
    hidden: Tensor,
    labels: Tensor,
    chunk_tokens: ChunkTokens = "auto",
    call: Call | None = None,
) -> Tensor:
    """Returns `parts` of the logits and labels of all positions, (P,).

    Args:
        parts: Computes sums over positions.
        network: Whose `logits` are used.
        hidden: What the network returned, (B, T, C).
        labels: Or what stands for them, (B, T).
        chunk_tokens: Positions whose logits are computed at a time; None: all. "auto": as many as have logits of 512 MiB in
            float32, and at least 1,024, on CUDA 4,096.
        call: What calls `parts` with whole logits and labels, such as compiled code; None: a plain call.
    """
    sums = partial(_sums, call, parts, network.vocab_size)
    rows, labels = hidden.flatten(0, 1), labels.flatten()
    size = chosen_size(network.vocab_size, rows) if chunk_tokens == "auto" else chunk_tokens
    if size is None or (chunk_tokens == "auto" and len(rows) <= size):
        return sums(product_of(network, rows)(hidden).flatten(0, 1), labels)
    chunks = max(-(-len(rows) // size), 1)
    return in_chunks(sums, network, rows, labels, max(-(-len(rows) // chunks), 1))


def _sums(call: Call | None, parts: Parts, vocab_size: int, product: Tensor, labels: Tensor) -> Tensor:
    """Returns `parts` of logits, behind which there may be further columns."""
    if call is None or hasattr(product, "full_tensor"):  # sharded along the vocabulary, by tensor parallelism
        return of_columns(parts, vocab_size, product, labels)
    return call(of_columns, parts, vocab_size, product, labels)


def of_columns(parts: Parts, columns: int, product: Tensor, labels: Tensor) -> Tensor:
    """Returns `parts` of the first columns of a product."""
    if product.shape[-1] != columns:
        # compiled code fuses the pass over memory that slicing takes with others
        compiling = torch.compiler.is_compiling()
        product = product[:, :columns] if compiling else first_columns(product, columns)
    return parts(product, labels)


def chosen_size(vocab_size: int, rows: Tensor) -> int:
    """Returns how many positions "auto" computes at a time."""
    return max(LOGITS_BYTES // (4 * vocab_size), LEAST_CUDA if rows.is_cuda else LEAST)


def in_chunks(parts: Parts, network: Network, rows: Tensor, labels: Tensor, size: int) -> Tensor:
    """Returns `parts(network.logits(rows), labels)` without holding all logits in memory.

    Args:
        parts: Computes sums over positions, of logits behind which there may be further columns.
        network: Whose `logits` are used.
        rows: What the network returned, (N, C).
        labels: (N,).
        size: Positions per chunk.
    """
    weight = network.output_weight
    plain = weight is not None and is_plain(network, weight)
    if not torch.is_grad_enabled():  # of which the function below knows nothing
        rows, weight = rows.detach(), None if weight is None else weight.detach()
    if plain:
        return _Chunks.apply(parts, None, labels, size, rows, weight)
    return _Chunks.apply(
        parts, network.logits, labels, size, rows, *weights_of(network.logits(rows[:1].detach()))
    )


def weights_of(output: Tensor) -> list[Tensor]:
    """Returns the leaves with gradients that a tensor was computed from, each once."""
    found, open_nodes, seen = [], [output.grad_fn], set()
    while open_nodes:
        node: Any = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        open_nodes += [following for following, _ in node.next_functions]
        if hasattr(node, "variable"):  # of the nodes that accumulate gradients
            found.append(node.variable)
    return found


class _Chunks(torch.autograd.Function):
    """Computes the gradient of each chunk in forward, while its logits exist; backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        parts: Parts,
        logits: Callable[[Tensor], Tensor] | None,
        labels: Tensor,
        size: int,
        rows: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[4:]
        used = list(weights)
        if logits is None:
            used, logits = _kernel(weights[0])
        used = [weight for weight, want in zip(used, wanted[1:], strict=True) if want]
        by_rows = torch.empty_like(rows) if wanted[0] else None
        by_used: list[Tensor] = []
        sums: Tensor | None = None
        for start in range(0, max(len(rows), 1), size):
            chunk = slice(start, start + size)
            with torch.set_grad_enabled(any(wanted)):
                inputs = rows[chunk].detach().requires_grad_(wanted[0])
                found = full_tensor(parts(logits(inputs), labels[chunk]))
                loss = found[0]
            if any(wanted):
                gradients = list(torch.autograd.grad(loss, [*used, *([inputs] if wanted[0] else [])]))
                if by_rows is not None:
                    by_rows[chunk] = gradients.pop()
                _add(by_used, gradients)
            sums = found.detach() if sums is None else sums + found.detach()
        ctx.save_for_backward(by_rows, *by_used)
        ctx.wanted, ctx.weights = wanted, [(weight.dtype, weight.shape) for weight in weights]
        assert sums is not None
        return sums

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        by_rows, *by_used = ctx.saved_tensors
        scale = outputs[0][0]
        scaled = [None if by_rows is None else _times(by_rows, scale)]
        for (dtype, shape), want in zip(ctx.weights, ctx.wanted[1:], strict=True):
            total = by_used.pop(0) if want else None
            if total is not None and total.shape != shape:  # rows were padded
                total = total[: shape[0]]
            scaled.append(None if total is None else (total * scale).to(dtype))
        return None, None, None, None, *scaled


def _add(totals: list[Tensor], gradients: list[Tensor]) -> None:
    """Adds the gradients of a chunk; over many chunks they are summed at least in float32."""
    if not totals:  # copies: gradients may share memory; zeros to begin with would be one more pass over it
        totals += [g.to(torch.promote_types(g.dtype, torch.float32), copy=True) for g in gradients]
        return
    for total, gradient in zip(totals, gradients, strict=True):
        total += gradient


def _times(x: Tensor, scale: Tensor) -> Tensor:
    """Returns x times a float32 number, rounded once: in the data type of x the number would be rounded first, for all alike."""
    return torch.mul(x, scale.reshape(1), out=torch.empty_like(x))


def _kernel(weight: Tensor) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """Returns the weight as kernels like it, as a leaf, and logits (n, V or more) with it; once for all chunks."""
    kernel = padded(weight.detach()).detach().requires_grad_(weight.requires_grad)
    return [kernel], lambda rows: F.linear(rows, kernel)
