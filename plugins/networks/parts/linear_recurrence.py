"""Linear recurrences with decay: chunk by chunk for training, token by token for generation.

The state S (K, V) of a head follows S_t = a_t S_{t-1} + k_t u_t^T, and the output is o_t = S_t^T q_t. With u_t = v_t it is
that of gated linear attention (arXiv:2312.06635) and of Mamba-2 (arXiv:2405.21060); with the delta rule,
u_t = beta_t (v_t - (a_t S_{t-1})^T k_t), that of gated DeltaNet (arXiv:2412.06464).

Shapes: * is any leading dimensions, of which B is the first, and which broadcast; T tokens, N chunks of C tokens, K key
features, V value features. The decay a_t = exp(log_decay_t) is one number a head, (*, T, 1), or one a key feature,
(*, T, K); log_decay <= 0. All is computed in float32 or wider, whatever autocast says; outputs have the values' data type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Segments(NamedTuple):
    """Which tokens of a row belong together: nothing passes from one segment to another.

    Attributes:
        ids: (B, T), int64; equal ids that follow each other are one segment.
        before: That of the state and of the tokens before these, (B,).
    """

    ids: Tensor
    before: Tensor


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    segments: Segments | None = None,
    *,
    beta: Tensor | None = None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Returns outputs (*, T, V) and the last state (*, K, V), by matrix products within chunks and a loop over chunks.

    All decays are exponentials of sums of `log_decay` between two tokens, at most 1: nothing overflows, however long
    the sequence or strong the decay. With a decay for each key feature the scores of a chunk take C * C * K numbers:
    choose a small C.

    Args:
        q: Queries (*, T, K).
        k: Keys (*, T, K).
        v: Values (*, T, V).
        log_decay: (*, T, 1) or (*, T, K).
        state: The state before the first token, (*, K, V); None: zero.
        segments: None: all tokens belong together, with the state.
        beta: Strength of the delta rule, (*, T); None: no delta rule.
        chunk_size: C; T need not be a multiple.
    """
    length, kind = v.shape[-2], v.dtype
    with torch.autocast(v.device.type, enabled=False):
        q, k, v, log_decay = (_in_chunks(x, chunk_size) for x in _wide(q, k, v, log_decay))
        state = _state(k, v, state)
        if segments is not None:
            segments = _spread(segments, chunk_size, v.ndim - 4)
        decays = _decays(log_decay, segments)
        u, read = v, None
        if beta is not None:
            strength = _in_chunks(_wide(beta)[0][..., None], chunk_size)
            system = _scores(k * strength, k, decays.within)
            both = torch.cat((v * strength, (k * strength * decays.enter).expand(*v.shape[:-1], -1)), dim=-1)
            both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
            u, read = both.split((v.shape[-1], k.shape[-1]), dim=-1)
        starts, writes, state = _scan((k * decays.leave).mT, u, read, decays.through[..., None], state)
        y = _scores(q, k, decays.within) @ writes + (q * decays.enter) @ starts
        return y.flatten(-3, -2)[..., :length, :].to(kind), state


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    segments: Segments | None = None,
    *,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns what :func:`chunked` returns, one token after another, as the definition says."""
    kind = v.dtype
    with torch.autocast(v.device.type, enabled=False):
        q, k, v, log_decay = _wide(q, k, v, log_decay)
        state = _state(k[..., None, :, :], v[..., None, :, :], state)
        found = []
        for t in range(v.shape[-2]):
            decay = log_decay[..., t, :].exp()
            if segments is not None:
                last = segments.before if t == 0 else segments.ids[:, t - 1]
                same = (segments.ids[:, t] == last).view(-1, *[1] * (decay.ndim - 1))
                decay = torch.where(same, decay, 0.0)
            state, u = state * decay[..., None], v[..., t, :]
            if beta is not None:
                u = (u - (state * k[..., t, :, None]).sum(-2)) * beta[..., t, None].type_as(u)
            state = state + k[..., t, :, None] * u[..., None, :]
            found.append((state * q[..., t, :, None]).sum(-2))
        return torch.stack(found, dim=-2).to(kind), state


class _Decays(NamedTuple):
    within: Tensor  # (*, N, C, C, 1 or K): from each token of a chunk to each later one, 0 between segments
    enter: Tensor  # (*, N, C, 1 or K): from before the chunk to each of its tokens
    leave: Tensor  # (*, N, C, 1 or K): from each token to the end of the chunk
    through: Tensor  # (*, N, 1 or K): from before the chunk to its end


def _decays(log_decay: Tensor, segments: Segments | None) -> _Decays:
    # In float64: behind a strong decay a small one would be lost in float32's rounding of the sum. MPS has none.
    kind = log_decay.dtype
    total = log_decay.to(kind if log_decay.device.type == "mps" else torch.float64).cumsum(-2)
    size = total.shape[-2]
    visible = torch.ones(size, size, dtype=torch.bool, device=total.device).tril()
    if segments is None:
        enter, leave = total, total[..., -1:, :] - total
        through = total[..., -1, :]
    else:
        ids, before = segments
        visible = visible & (ids[..., :, None] == ids[..., None, :])
        before = torch.cat((before[..., None], ids[..., :-1, -1]), dim=-1)
        inside, outside = ids == before[..., None], ids == ids[..., -1:]
        enter = total.masked_fill(~inside[..., None], -torch.inf)
        leave = (total[..., -1:, :] - total).masked_fill(~outside[..., None], -torch.inf)
        through = total[..., -1, :].masked_fill(~inside[..., -1, None], -torch.inf)
    within = total[..., :, None, :] - total[..., None, :, :]  # above the diagonal positive: masked before exp
    within = within.to(kind).masked_fill(~visible[..., None], -torch.inf)
    return _Decays(*(x.to(kind).exp() for x in (within, enter, leave, through)))


def _scores(q: Tensor, k: Tensor, within: Tensor) -> Tensor:
    """Returns products of queries and keys with the decay between them, (*, N, C, C)."""
    if within.shape[-1] == 1:
        return (q @ k.mT) * within.squeeze(-1)
    return (q[..., :, None, :] * within * k[..., None, :, :]).sum(-1)


def _scan(
    keys: Tensor, u: Tensor, read: Tensor | None, through: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the states at the starts of chunks, what is written in them, and the last state."""
    added = None if read is not None else (keys @ u).unbind(-3)
    known, pieces, passed = keys.unbind(-3), u.unbind(-3), through.unbind(-3)
    reads = [None] * len(pieces) if read is None else read.unbind(-3)
    starts, writes = [], []
    for n, (piece, old) in enumerate(zip(pieces, reads, strict=True)):
        starts.append(state)
        if old is not None:
            piece = piece - old @ state
            writes.append(piece)
        state = passed[n] * state + (known[n] @ piece if added is None else added[n])
    return torch.stack(starts, dim=-3), torch.stack(writes, dim=-3) if writes else u, state


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """Returns (*, T, D) as (*, N, C, D); the zeros behind the last token neither decay nor write."""
    # Contiguous first: where nothing is missing, `pad` keeps the strides, which a compiled graph does not expect.
    return F.pad(x.contiguous(), (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))


def _state(k: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    if state is not None:
        return state
    leading = torch.broadcast_shapes(k.shape[:-3], v.shape[:-3])
    return v.new_zeros(*leading, k.shape[-1], v.shape[-1])


def _spread(segments: Segments, size: int, dims: int) -> Segments:
    """Returns ids (B, 1, ..., N, C) and `before` (B, 1, ...), with `dims` dimensions of 1."""
    ids, before = segments
    ids = torch.cat((ids, ids[:, -1:].expand(-1, -ids.shape[1] % size)), dim=1)
    ones = [1] * dims
    return Segments(ids.view(len(ids), *ones, -1, size), before.view(-1, *ones))
