"""What a batch, a network, an objective and a schedule must offer. Part of `core.contracts`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from core.contracts.offers import EncodesText, HasRows, HasVocabulary
from core.contracts.packed_batches import PackedBatches
from core.errors import ConfigError

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "Network",
    "Objective",
    "PackedBatches",
    "Schedule",
    "TokenSum",
    "compatibility_errors",
]


IGNORED_LABEL = -100
"""Label of positions that count neither in the loss nor in the number of tokens."""


class Batch(TypedDict, total=False):
    """A mapping of tensors; B sequences of T tokens, all int64.

    `labels` are already shifted: ``labels[b, t]`` is the token that follows ``input_ids[b, t]``, or -100.

    `document_ids` are there where the documents of a row must not see each other: positions with equal ids are one
    document, or a part of one. Ids rise along a row and have no meaning across rows; padding has other ids, or -1.
    Without them a row is one document. `position_ids` begin at 0 with each document; without them, with each row.
    """

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor
    position_ids: Tensor


class _Sum(NamedTuple):
    total: Tensor
    tokens: Tensor


class TokenSum(_Sum):
    """A sum over label tokens and how many there were, 0-d tensors on the device.

    Sums, not means, so that every token has the same weight under accumulation, ranks and uneven lengths. As a tuple
    it is (total, tokens), whatever the weight.

    Args:
        total: The sum; where tokens are weighted, of each one's value times its weight.
        tokens: How many label tokens there were. They are what `train/tokens`, speed and MFU count.
        weight: What the mean divides by, the sum of the weights of the tokens; None: every token weighs 1.

    Example:
        Every document weighs 1, however long it is::

            weights = 1 / length_of_document  # (B, T), 0 where there is no label
            TokenSum((weights * losses).sum(), (labels != IGNORED_LABEL).sum(), weights.sum())
    """

    _weight: Tensor | None = None

    def __new__(cls, total: Tensor, tokens: Tensor, weight: Tensor | None = None) -> TokenSum:
        """Keeps the weight beside the pair."""
        found = super().__new__(cls, total, tokens)
        found._weight = weight
        return found

    @property
    def weight(self) -> Tensor:
        """What the mean divides by."""
        return self.tokens if self._weight is None else self._weight

    @property
    def mean(self) -> Tensor:
        """The weighted mean; 0 where there was no token."""
        return self.total / divisor(self.weight)


def divisor(weight: Tensor) -> Tensor:
    """Returns a sum of weights to divide by: 1 where there was no token."""
    return torch.where(weight > 0, weight, torch.ones_like(weight))


class Network(nn.Module, ABC):
    """What is trained. Built inside `LanguageModule.configure_model`, possibly on the meta device.

    Attributes:
        vocab_size: Rows of the output weight.
        max_sequence_length: The longest T that `forward` accepts, or None where there is no limit.
        deferred_init: Whether the constructor leaves every value to `init_weights`: constructed on the meta device,
            then emptied with `to_empty` and initialised, the network has, bit by bit, the weights of one that is
            constructed on the device from the same seed. The command line then constructs it once a run instead of
            twice. Modules of torch draw random numbers when they are constructed: construct them under
            `torch.device("meta")`. Not inherited.
    """

    vocab_size: int
    max_sequence_length: int | None
    deferred_init: bool = False

    @classmethod
    def preflight(cls, run: Any, own: Any) -> Iterable[str]:
        """Yields what does not fit a run, see `ChecksRun`; that the sizes fit the data is checked without it."""
        return ()

    @abstractmethod
    def forward(self, batch: Mapping[str, Tensor], cache: Any = None) -> Tensor:
        """Returns hidden states (B, T, C) after the last norm, or logits (B, T, V).

        Nothing passes from one of the batch's `document_ids` to another.

        Args:
            batch: See :class:`Batch`.
            cache: What :meth:`new_cache` returned: the keys and values of the tokens so far. With it, `input_ids`
                hold only the tokens that are new, one or several.

        Raises:
            ConfigError: If the network cannot keep documents apart and the batch has `document_ids`.
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
        """Floating-point operations of forward and backward for one token in a row of this many tokens."""

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
        """Query heads and key-value heads, which tensor and Ulysses parallelism split over ranks; None: not known."""
        return None

    def replace_attention(self, attention: Callable[..., Tensor]) -> bool:
        """Makes every block attend through a function called as `F.scaled_dot_product_attention` is.

        Called with `is_causal`, and without a mask, where the batch has no `document_ids`. False: cannot.

        True also means that nothing else mixes positions: context parallelism gives each rank some tokens of a
        sequence and replaces only attention. A network with a convolution, a recurrence,
        linear attention or a shift over positions beside its attention returns False, and so does one that
        counts positions itself instead of using the batch's `position_ids`. This is tested before such a run.
        """
        return False

    def select_rows(self, arguments: tuple[Any, ...], rows: Tensor) -> tuple[Any, ...] | None:
        """Returns what a block is called with for some sequences of the batch, so that it can be run on these alone.

        Args:
            arguments: The arguments of a block after the hidden states (B, ...).
            rows: Indexes (b,) of the sequences, on the device.

        Returns:
            The arguments for these sequences, in the same order; None: a block takes the whole batch.
        """
        return None

    @property
    def ends(self) -> tuple[Sequence[nn.Module], Sequence[nn.Module]] | None:
        """The modules before the first block, and those after the last, the head included.

        Tied embeddings are in both. None: the network cannot be cut into stages.
        """
        return None

    def forward_blocks(self, batch: Mapping[str, Tensor], hidden: Tensor | None, blocks: range) -> Tensor:
        """Runs a part of `forward`: needs the modules of these blocks only, and the `ends` that it touches.

        Args:
            batch: As for `forward`.
            hidden: What the block before the first of these returned; None: begin with the embedding.
            blocks: Their indexes; after the last block of the network comes the last norm.
        """
        raise NotImplementedError

    def new_cache(self, batch_size: int, max_length: int) -> Any:
        """Returns an empty key-value cache for generation, or None where the network has none."""
        return None


def compatibility_errors(
    vocab_size: int | None, max_sequence_length: int | None, tokens: int | None, length: int | None
) -> Iterator[str]:
    """Yields what in the data does not fit a network; None means not known.

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


def check_fit(network: Network, data: Any) -> bool:
    """Raises a ConfigError if a network is too small for a data module's data, as far as that is known.

    Returns:
        Whether the data's vocabulary is known. A tokenizer's number is what was asked for; before the data are prepared
        it says nothing of what they will have.
    """
    parts = (data, data.tokenizer if isinstance(data, EncodesText) else None)
    tokens = [part.vocab_size for part in parts if isinstance(part, HasVocabulary) and part.vocab_size]
    length = data.sequence_length if isinstance(data, HasRows) else None
    sizes = network.vocab_size, network.max_sequence_length
    if faults := list(compatibility_errors(*sizes, next(iter(tokens), None), length)):
        raise ConfigError("\n".join(faults))
    return isinstance(data, HasVocabulary) and bool(data.vocab_size)


class Objective(nn.Module, ABC):
    """What is minimised. A module, so that it may have parameters.

    Attributes:
        loss_unit: What the loss is a mean of, as in "nats/pair" or "squared error". Of "nats/token" alone the perplexity is
            logged and shown.
    """

    loss_unit = "nats/token"

    @abstractmethod
    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the loss as a sum with its token count, and further figures to log by name.

        The sums are additive over rows and positions, in training as in validation (`self.training`), also of terms
        that exist only in one of them. What is returned first is differentiated. Parts of it (a z-loss, say) go
        into the second under their own name; they are logged as means over their own weights.
        """

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Returns the figures that are logged, given those means over tokens, micro-batches and ranks.

        For figures that are no mean, such as a correlation: their parts are means, and are replaced here. By default those
        of the objectives within this one.
        """
        for part in self.children():
            means = part.summary(means) if isinstance(part, Objective) else means
        return means


class Schedule(torch.optim.lr_scheduler.LRScheduler):
    """A learning-rate schedule that needs to know how long the run is, or how many tokens it has seen.

    `LanguageModule` calls :meth:`bind` once with the number of optimizer steps, before the first
    one, and :meth:`begin_step` before each. Schedules of torch, which do not need to know, are used as
    they are.

    Attributes:
        counts_tokens: Whether rates depend on tokens rather than on steps.
        tokens: Positions of the batches of all steps so far, padding included, of all ranks.
        step_tokens: Those of the next step; while that is not known, those of the step before.
    """

    counts_tokens = False
    tokens = 0
    step_tokens = 0

    def bind(self, total_steps: int) -> None:
        """Sets the length of the run and the learning rate of the current step."""
        self.total_steps = total_steps
        self._set_rates()

    def begin_step(self, tokens: int) -> None:
        """Sets how many tokens the batches of the next optimizer step have."""
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
