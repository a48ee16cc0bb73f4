"""What mixers with a recurrent state share: their cache, short convolutions, and the call in attention's place.

Shapes: B sequences, T tokens, C features.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plugins.networks.parts.linear_recurrence import Segments, chunked, recurrent
from toolkit.initial_values import Start, uniform


class StateCache:
    """One layer's state and the last inputs of its convolutions. Its size does not grow with the tokens.

    Attributes:
        length: Tokens so far.
        state: After them, (B, ..., K, V); None before the first.
        tails: Name of a convolution -> its last inputs (B, taps - 1, features), zero where they are of another segment.
        segment: That of the last token of each row, (B,); None: the rows are one segment each.
    """

    def __init__(self, max_length: int):
        self.max_length, self.length = max_length, 0
        self.state: Tensor | None = None
        self.tails: dict[str, Tensor] = {}
        self.segment: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, (b,) indexes; one may come several times."""
        self.state = None if self.state is None else self.state[rows]
        self.tails = {name: tail[rows] for name, tail in self.tails.items()}
        self.segment = None if self.segment is None else self.segment[rows]

    def keep(self, length: int, max_length: int) -> bool:
        """Makes room for `max_length` tokens; returns whether `length` are all: a state cannot go back."""
        self.max_length = max_length
        return length == self.length


class ShortConvolution(nn.Conv1d):
    """A causal convolution of each feature by itself, over the last `taps` tokens, and SiLU; its weight is (features, 1, taps)."""

    def __init__(self, features: int, taps: int, bias: bool = False):
        super().__init__(features, features, taps, groups=features, bias=bias)

    @property
    def start(self) -> Start:
        """How its parameters begin, as torch's convolutions: uniform within taps^-0.5."""
        bound = self.kernel_size[0] ** -0.5
        return uniform(-bound, bound)

    def forward(  # type: ignore[override]  # it also gives what the next tokens need
        self, x: Tensor, segments: Segments | None = None, tail: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Maps x (B, T, features) to the same shape, and returns the tail for the tokens that follow.

        Args:
            x: New tokens.
            segments: No tap reaches over their ends.
            tail: What the call before returned; None: nothing came before.
        """
        taps, length = self.kernel_size[0], x.shape[1]
        if tail is None:
            tail = x.new_zeros(len(x), taps - 1, x.shape[2])
        x = torch.cat((tail.type_as(x), x), dim=1)
        pieces = [x[:, tap : tap + length] for tap in range(taps)]
        following = x[:, length:]
        if segments is not None:
            ids = torch.cat((segments.before[:, None].expand(-1, taps - 1), segments.ids), dim=1)
            own = [ids[:, tap : tap + length] == segments.ids for tap in range(taps)]
            pieces = [piece * same[..., None] for piece, same in zip(pieces, own, strict=True)]
            following = following * (ids[:, length:] == ids[:, -1:])[..., None]
        # faster on a CPU than a grouped convolution, which could not stop at ends of segments
        y = pieces[0] * self.weight[:, 0, 0]
        for tap in range(1, taps):
            y = y + pieces[tap] * self.weight[:, 0, tap]
        return F.silu(y if self.bias is None else y + self.bias), following


class RecurrentMixer(nn.Module):
    """Takes attention's place in a block. Called with segments of documents where attention is given a mask.

    Attributes:
        chunk_size: Tokens that training treats at once.
        state_size: Numbers in the state of all heads.
        score_size: Features of a score and of what it weighs, of all heads: K + V each.
        starts: How its own parameters begin; those of projections, convolutions and norms are the network's.
    """

    chunk_size: int
    state_size: int
    score_size: int
    starts: Mapping[str, Start] = {}

    def forward(self, x: Tensor, rope: None, ids: Tensor | None, cache: StateCache | None) -> Tensor:
        """Maps x (B, T, C) to (B, T, C).

        Args:
            x: The new tokens.
            rope: Not used: order is in the state.
            ids: Segments (B, T), see :func:`segment_ids`; None: a row is one.
            cache: Holds the state before these tokens, and after them that behind them.
        """
        segments = None
        if ids is not None:
            before = None if cache is None else cache.segment
            segments = Segments(ids, ids[:, 0] if before is None else before)
        y = self.mix(x, segments, cache)
        if cache is not None:
            cache.length += x.shape[1]
            cache.segment = None if ids is None else ids[:, -1]
        return y

    @abstractmethod
    def mix(self, x: Tensor, segments: Segments | None, cache: StateCache | None) -> Tensor:
        """Maps x (B, T, C) to (B, T, C); reads and replaces the cache's state and tails."""

    def flops_per_token(self) -> float:
        """Returns operations of forward and backward beyond those of projections: 6 (C (K + V) + 2 K V) a head.

        C here is the chunk size: scores within a chunk and what they weigh, and reading and writing the state.
        """
        return 6.0 * (self.chunk_size * self.score_size + 2 * self.state_size)

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        segments: Segments | None,
        cache: StateCache | None,
        beta: Tensor | None = None,
    ) -> Tensor:
        """Runs the recurrence from the cache's state: by chunks, or, for a single token, by one step."""
        state = None if cache is None else cache.state
        if cache is not None and v.shape[-2] == 1:
            y, state = recurrent(q, k, v, log_decay, state, segments, beta=beta)
        else:
            y, state = chunked(q, k, v, log_decay, state, segments, beta=beta, chunk_size=self.chunk_size)
        if cache is not None:
            cache.state = state
        return y

    def convolve(self, name: str, x: Tensor, segments: Segments | None, cache: StateCache | None) -> Tensor:
        """Runs the convolution of this name behind the cache's tail."""
        convolution: Callable[..., tuple[Tensor, Tensor]] = self.get_submodule(name)
        y, tail = convolution(x, segments, None if cache is None else cache.tails.get(name))
        if cache is not None:
            cache.tails[name] = tail
        return y


def segment_ids(start: int, end: int, document_ids: Tensor | None, visible: Tensor | None) -> Tensor | None:
    """Returns the segments of new tokens, (B, T): documents, or padding in front (0) and text (1); None: one a row.

    Args:
        start: Tokens in the cache.
        end: Tokens in the cache, and new ones.
        document_ids: As in :class:`core.contracts.Batch`.
        visible: Which tokens are no padding, (B, tokens); None: all.
    """
    if document_ids is not None or visible is None:
        return document_ids
    return visible[:, start:end].long()


def decay_rates(a_log: Tensor, generator: torch.Generator) -> None:
    """Fills with logarithms of numbers that are uniform in [1, 16], as Mamba-2."""
    a_log.uniform_(1, 16, generator=generator).log_()


def decay_steps(dt_bias: Tensor, generator: torch.Generator) -> None:
    """Fills so that softplus(dt_bias) is log-uniform in [0.001, 0.1], as Mamba-2."""
    step = dt_bias.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
    step.add_(torch.log(-torch.expm1(-step)))  # the inverse of softplus


def log_decay(a_log: Tensor, dt: Tensor) -> Tensor:
    """Returns -exp(a_log) dt, in float32 or wider."""
    wide = torch.promote_types(a_log.dtype, torch.float32)
    return -a_log.to(wide).exp() * dt
