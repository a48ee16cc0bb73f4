"""What a batch, a network, an objective, a schedule and a data stage must offer.

Strategies, callbacks and commands rely on these and on nothing else: they ask a network for its
blocks, they never look at its class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from core.data.data_contracts import (
    DocumentSource,
    Engine,
    PackedBatches,
    Packing,
    Reader,
    Reject,
    Tokenizer,
    TokenWriter,
    Transform,
    raise_reject,
)
from core.data.prepared import is_remote, stored_vocab_size
from core.errors import ConfigError

if TYPE_CHECKING:
    from core.selection import Run, Selected

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "DocumentSource",
    "Engine",
    "Network",
    "Objective",
    "PackedBatches",
    "Packing",
    "Reader",
    "Reject",
    "Schedule",
    "TokenSum",
    "TokenWriter",
    "Tokenizer",
    "Transform",
    "misfits",
    "raise_reject",
]


IGNORED_LABEL = -100
"""Label of positions that count neither in the loss nor in the number of tokens."""


class Batch(TypedDict, total=False):
    """A mapping of tensors; B sequences of T tokens, all int64.

    `labels` are already shifted: ``labels[b, t]`` is the token that follows ``input_ids[b, t]``, or -100.
    """

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor
    position_ids: Tensor


class TokenSum(NamedTuple):
    """A sum over label tokens and how many there were, both 0-d tensors on the device.

    Sums, not means: only so do accumulation, ranks and uneven lengths weigh every token equally.
    """

    total: Tensor
    tokens: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean per token; 0 where there was no token."""
        return self.total / self.tokens.clamp(min=1)


class Network(nn.Module, ABC):
    """What is trained. Built inside `LanguageModule.configure_model`, possibly on the meta device.

    Attributes:
        vocab_size: Rows of the output weight.
        max_sequence_length: The longest T that `forward` accepts, or None where there is no limit.
    """

    vocab_size: int
    max_sequence_length: int | None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what of the run's data does not fit, as far as arguments of the usual names tell."""
        source = run.argument("data.source")
        tokens = stored_vocab_size(source)
        if not is_remote(source):  # of a remote folder the data module asks first
            tokens = tokens or run.argument("data.tokenizer.vocab_size") or run.argument("data.vocab_size")
        sizes = own.arguments.get("vocab_size"), own.arguments.get("max_sequence_length")
        yield from misfits(*sizes, tokens, run.argument("data.sequence_length"))

    @abstractmethod
    def forward(self, batch: Mapping[str, Tensor], cache: Any = None) -> Tensor:
        """Returns hidden states (B, T, C) after the last norm, or logits (B, T, V).

        `cache` is what :meth:`new_cache` returned: the keys and values of the tokens so far. With
        it, `input_ids` hold only the tokens that are new.
        """

    @abstractmethod
    def init_weights(self) -> None:
        """Initialises every parameter and buffer in place: also after `to_empty` from the meta device."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The repeated blocks, in order: what is sharded, checkpointed and cut into pipeline stages."""

    @property
    @abstractmethod
    def output_weight(self) -> Tensor | None:
        """The (V, C) weight that turns hidden states into logits; None if `forward` returns logits."""

    @abstractmethod
    def flops_per_token(self, sequence_length: int) -> float:
        """Floating-point operations of forward and backward for one token at this length."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Turns what `forward` returned, (..., C), into logits (..., V)."""
        weight = self.output_weight
        return hidden if weight is None else nn.functional.linear(hidden, weight)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Module name -> `torch.distributed.tensor.parallel` style; empty: no tensor parallelism."""
        return {}

    def sequence_parallel_plan(self) -> dict[str, Any]:
        """The tensor-parallel plan under which tokens, too, are split between its regions; a list: styles in order.

        Empty: the network has none. Under it `forward` returns hidden states of all tokens.
        """
        return {}

    @property
    def attention_heads(self) -> tuple[int, int] | None:
        """Query heads and key-value heads, which tensor and Ulysses parallelism deal out; None: not known."""
        return None

    def replace_attention(self, attention: Callable[..., Tensor]) -> bool:
        """Makes every block attend through a function called as `F.scaled_dot_product_attention` is.

        Called with `is_causal`, and without a mask, where the batch has no `document_ids`. False: cannot.
        """
        return False

    @property
    def ends(self) -> tuple[Sequence[nn.Module], Sequence[nn.Module]] | None:
        """The modules before the first block and those behind the last, the head's among them.

        Tied embeddings stand in both. None: the network cannot be cut into stages.
        """
        return None

    def forward_blocks(self, batch: Mapping[str, Tensor], hidden: Tensor | None, blocks: range) -> Tensor:
        """Runs a part of `forward`: needs the modules of these blocks only, and the `ends` that it touches.

        Args:
            batch: As for `forward`.
            hidden: What the block before the first of these returned; None: begin with the embedding.
            blocks: Their indexes; behind the last block of the network follows the last norm.
        """
        raise NotImplementedError

    def new_cache(self, batch_size: int, max_length: int) -> Any:
        """Returns an empty key-value cache for generation, or None where the network has none."""
        return None


def misfits(
    vocab_size: int | None, max_sequence_length: int | None, tokens: int | None, length: int | None
) -> Iterator[str]:
    """Yields what of the data does not fit a network; None stands for what is not known.

    Args:
        vocab_size: The network's.
        max_sequence_length: The network's.
        tokens: Token ids of the data's tokenizer.
        length: Tokens in a row of the data.
    """
    if vocab_size and tokens and tokens > vocab_size:
        yield (
            f"The data's tokenizer has {tokens:,} tokens, the network's vocab_size is {vocab_size:,}.\n"
            f"Set --model.network.vocab_size={math.ceil(tokens / 64) * 64} (or another number of at least the "
            "tokenizer's)."
        )
    if max_sequence_length and length and length > max_sequence_length:
        yield (
            f"The data's sequence_length is {length}, the network's max_sequence_length {max_sequence_length}.\n"
            f"Set --model.network.max_sequence_length={length} or --data.sequence_length={max_sequence_length}."
        )


def check_fit(network: Network, data: Any) -> None:
    """Raises a ConfigError where a network is too small for what is known of a data module's data."""
    tokens = getattr(data, "vocab_size", None) or getattr(
        getattr(data, "tokenizer", None), "vocab_size", None
    )
    sizes = network.vocab_size, network.max_sequence_length
    if faults := list(misfits(*sizes, tokens, getattr(data, "sequence_length", None))):
        raise ConfigError("\n".join(faults))


class Objective(nn.Module, ABC):
    """What is minimised. A module, so that it may hold parameters of its own."""

    @abstractmethod
    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the loss as a sum with its token count, and further figures to log by name.

        What is returned first is differentiated. Parts of it (a z-loss, say) go into the second
        under their own name; they are logged as token-weighted means.
        """


class Schedule(torch.optim.lr_scheduler.LRScheduler):
    """A learning-rate schedule that needs to know how long the run is, or how many tokens it has seen.

    `LanguageModule` calls :meth:`bind` once with the number of optimizer steps, before the first
    one, and :meth:`begin_step` before each. Schedules of torch, which do not need to know, are used as
    they are.

    Attributes:
        counts_tokens: Whether rates depend on tokens rather than on steps.
        tokens: Positions of the batches of all steps so far, padding included, of all ranks.
        step_tokens: Those of the coming step; while that is not known, those of the one before it.
    """

    counts_tokens = False
    tokens = 0
    step_tokens = 0

    def bind(self, total_steps: int) -> None:
        """Tells the schedule the length of the run and sets the rate of the current step."""
        self.total_steps = total_steps
        self._set_rates()

    def begin_step(self, tokens: int) -> None:
        """Tells the schedule how many tokens the batches of the coming optimizer step hold."""
        self.step_tokens = tokens
        if self.counts_tokens:
            self._set_rates()

    def step(self, epoch: int | None = None) -> None:
        """Goes on to the next optimizer step."""
        self.tokens += self.step_tokens
        super().step(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Saves the position only: rates and lengths are what the user wrote, also when resuming."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, "tokens": self.tokens}

    def _set_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
