"""What decoders with recurrent or sparse mixers add to :class:`Decoder`: states for caches, masks, FLOPs, plans.

Shapes: B sequences, T tokens, H query heads of D features each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plugins.networks.parts.attention import attention_mask
from plugins.networks.parts.block_sparse import SparsePattern
from plugins.networks.parts.decoder import Decoder
from plugins.networks.parts.kv_cache import KVCache, SlidingKVCache
from plugins.networks.parts.plans import narrowed
from plugins.networks.parts.recurrent_mixer import RecurrentMixer, ShortConvolution, StateCache, segment_ids
from toolkit.initial_values import Start


class HybridDecoder(Decoder):
    """A decoder of which some blocks have a state in place of keys and values, or see some of the tokens.

    Args:
        recurrent: For each block whether its mixer is a :class:`RecurrentMixer`.
        patterns: For each block which tokens its attention sees; None: those that its :class:`Layer` says.
        sizes: Those of :class:`Decoder`.
    """

    @abstractmethod
    def __init__(
        self,
        *,
        recurrent: Sequence[bool],
        patterns: Sequence[SparsePattern | None] | None = None,
        **sizes: Any,
    ):
        super().__init__(**sizes)
        self.recurrent = list(recurrent)
        self.patterns = list(patterns or [None] * self.n_layer)

    def build(
        self,
        new_block: Callable[[int], nn.Module],
        new_norm: Callable[[], nn.Module],
        tie_embeddings: bool,
        dropout: float = 0.0,
    ) -> None:
        """As :meth:`Decoder.build`; counts the operations of recurrences, too."""
        super().build(new_block, new_norm, tie_embeddings, dropout)
        mixers = [
            [one for one in block.modules() if isinstance(one, RecurrentMixer)] for block in self.layers
        ]
        self._mixing_flops = [sum(mixer.flops_per_token() for mixer in some) for some in mixers]

    def initial_value(self, name: str, tensor: Tensor) -> Start | None:
        """As that of :class:`Decoder`; mixers say how their own parameters begin."""
        owner, _, leaf = name.rpartition(".")
        module = self.get_submodule(owner)
        if isinstance(module, RecurrentMixer):
            return module.starts[leaf]
        return module.start if isinstance(module, ShortConvolution) else super().initial_value(name, tensor)

    def _mixers(self) -> list[tuple[str, RecurrentMixer]]:
        return [(name, one) for name, one in self.named_modules() if isinstance(one, RecurrentMixer)]

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
        """Returns segments for recurrent blocks, masks for the others: FlexAttention's where `_fuses` says so."""
        made: dict[Any, Any] = {}
        found = []
        device, fused = positions.device, not cached and self._fuses(positions.device, end)
        for index in range(self.n_layer):
            window, pattern = self.windows[index], self.patterns[index]
            key = "segments" if self.recurrent[index] else (window, pattern)
            if key not in made:
                if self.recurrent[index]:
                    made[key] = segment_ids(start, end, document_ids, visible)
                elif pattern is not None and fused:
                    made[key] = pattern.blocks(positions, document_ids)
                elif pattern is None or window is not None:
                    made[key] = attention_mask(
                        start, end, document_ids, device, window, visible, prefix, fused
                    )
                else:
                    made[key] = _dense(pattern, start, end, document_ids, positions, visible)
            found.append(made[key])
        return found

    def new_cache(self, batch_size: int, max_length: int) -> list[Any]:
        """Returns an empty cache per layer: the state of a recurrent one, else keys and values."""
        length = min(max_length, self.max_sequence_length)
        return [
            StateCache(length)
            if recurrent
            else (KVCache(batch_size, length) if window is None else SlidingKVCache(length, window))
            for recurrent, window in zip(self.recurrent, self.windows, strict=True)
        ]

    def flops_per_token(self, sequence_length: int) -> float:
        """Returns 6 N + 12 H D S for each layer with attention, and of each other the recurrence's, forward and backward.

        N: weights of projections and of the head. S: tokens that the last query sees. A recurrence has
        6 (C (K + V) + 2 K V) a head with chunks of C tokens, keys of K features and values of V; with the delta rule
        6 (C (3 K + 2 V) + 3 K V).
        """
        return super().flops_per_token(sequence_length)

    def _block_flops(self, index: int, sequence_length: int) -> float:
        window, pattern = self.windows[index], self.patterns[index]
        seen = pattern.seen(sequence_length) if pattern else min(sequence_length, window or sequence_length)
        scores = 12.0 * self.n_head * self.head_dim * seen
        return 6.0 * self._matmul_weights[index] + (
            self._mixing_flops[index] if self.recurrent[index] else scores
        )

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Shards heads of attention and MLP width; recurrent mixers are computed in full on each rank."""
        return self._without_mixers(super().tensor_parallel_plan())

    def sequence_parallel_plan(self) -> dict[str, Any]:
        """Shards tokens between embedding and last norm, except in mixers and MLP; as in arXiv:2205.05198."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import PrepareModuleInputOutput

        modules = dict(self.named_modules())  # a block with another mixer has no attention
        found = self._without_mixers(super().sequence_parallel_plan())
        plan = {name: style for name, style in found.items() if name in modules}
        for name, _ in self._mixers():
            rest = (None, None, None)
            whole = PrepareModuleInputOutput(
                input_layouts=(Shard(1), *rest),
                desired_input_layouts=(Replicate(), *rest),
                use_local_input=True,
                output_layouts=Replicate(),
                desired_output_layouts=Shard(1),
            )
            plan[name] = [narrowed(), whole]
        return plan

    def _without_mixers(self, plan: dict[str, Any]) -> dict[str, Any]:
        inside = tuple(f"{name}." for name, _ in self._mixers())
        return {name: style for name, style in plan.items() if not name.startswith(inside)}

    @property
    def attention_heads(self) -> tuple[int, int] | None:
        """H and the number of key-value heads; None where no block has attention."""
        return None if all(self.recurrent) else super().attention_heads

    @property
    def attends_to_prefixes(self) -> bool:
        """Whether every block attends to all tokens; a state goes in one direction."""
        return not any(self.patterns) and super().attends_to_prefixes

    def replace_attention(self, attention: Callable[..., Tensor]) -> bool:
        """Replaces the attention function of every block; False where a block has a state or a pattern."""
        if any(self.recurrent) or any(self.patterns):
            return False
        return super().replace_attention(attention)

    def select_rows(self, arguments: tuple[Any, ...], rows: Tensor) -> tuple[Any, ...] | None:
        """As :meth:`Decoder.select_rows`; segments (B, T) have a batch dimension. None with FlexAttention's masks."""
        rope, mask, cache = arguments
        if mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool):
            return super().select_rows(arguments, rows)
        if cache is not None or not isinstance(mask, Tensor):
            return None
        return rope, mask[rows], cache


def _dense(
    pattern: SparsePattern,
    start: int,
    end: int,
    document_ids: Tensor | None,
    positions: Tensor,
    visible: Tensor | None,
) -> Tensor:
    """Returns the mask of a pattern ([B, 1,] T, end), whose keys are all tokens up to `end`."""
    places = torch.arange(end, device=positions.device)
    if visible is not None:
        places = (places - (~visible).sum(1, keepdim=True)).clamp(min=0)
        itself = (
            torch.ones(end - start, end, dtype=torch.bool, device=positions.device).tril(start).triu(start)
        )
        return pattern.dense(positions, places, visible[:, None, None, :end]) | itself
    if document_ids is None:
        return pattern.dense(positions, places if start else positions)
    return pattern.dense(
        positions, positions, document_ids[:, None, :, None] == document_ids[:, None, None, :]
    )
