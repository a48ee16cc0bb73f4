"""Training on answers of the network itself: what the callback `Rollouts`, its data and its objectives agree on.

Shapes: R rows, each an answer behind its prompt; T positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from core.training.shards import full_tensor
from toolkit.generation.rows import evaluating
from toolkit.initial_values import copied
from toolkit.log_probabilities import log_probabilities
from toolkit.shards import copy_to_shard

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "OLD",
    "RECORDS",
    "REFERENCE",
    "REWARDS",
    "ROOM",
    "SAMPLED",
    "TURNS",
    "GivesPrompts",
    "OnPolicyObjective",
    "Part",
    "Prompted",
    "Rollout",
    "clipped_policy_loss",
    "importance_weights",
    "token_weights",
]

RECORDS, TURNS = "records", "turns"
"""Keys of a batch of prompts: the numbers of their records, -1 in padding, and how often it was dealt out before; (B,)."""

REWARDS = "rewards"
"""Key of a part: the reward of each row, (R,) float32."""

ROOM = "room"
"""Key of a part: the most tokens that an answer could have, (R,) int64."""

SAMPLED = "sampled_log_probabilities"
"""Key of a part: log-probabilities of the labels when they were sampled, as the decoder computed them; (R, T) float32."""

OLD = "old_log_probabilities"
"""Key of a part: those of the same weights, as the forward of training computes them; (R, T) float32."""

REFERENCE = "reference_log_probabilities"
"""Key of a part: those of the reference, (R, T) float32."""

ADVANTAGES, CORRECTIONS = "advantages", "importance_weights"
"""Keys that objectives use: the advantage of each row or label, and what a label's loss is multiplied by."""

Part = dict[str, Tensor]
"""The rows of one micro-batch: `input_ids` and `labels` (R, T), `REWARDS`, `ROOM`, `SAMPLED`, `OLD`, and what an objective adds.

All tensors have R rows. Labels are the answer's tokens, with the one that ended it; answers of one prompt are successive rows.
"""


class Prompted(NamedTuple):
    """A prompt.

    Attributes:
        text: As the record has it; of a chat the last message of the user.
        record: All fields of its record.
    """

    text: str
    record: Mapping[str, Any]


@runtime_checkable
class GivesPrompts(Protocol):
    """A data module of prompts; its batches have `RECORDS` and `TURNS`.

    Attributes:
        stop_ids: Ids of the tokens that end an answer, after `setup`.
        tokenizer_json: The tokenizer, after `setup`.
        sequence_length: Tokens of the longest prompt.
    """

    stop_ids: list[int]
    tokenizer_json: str
    sequence_length: int

    def repeat_batches(self, turns: int) -> None:
        """Deals out each training batch so many times in succession; called before training."""

    def prompted(self, split: str, record: int) -> Prompted:
        """Returns a prompt by its split, train or validation or test, and the number of its record."""


class Rollout(NamedTuple):
    """Answers of this rank to a batch of prompts, before they are trained on.

    Attributes:
        parts: The micro-batches that will be trained on; objectives add tensors to them, or change them.
        samples: Answers of each prompt.
        reduce: Sums a tensor over the ranks that have different prompts, in place; called on every rank.
    """

    parts: list[Part]
    samples: int
    reduce: Callable[[Tensor], Tensor]


QUANTISED = "keeps no reference of quantised weights: set kl to 0 (or keep_reference to false), or leave BitsandbytesWeights out"


class OnPolicyObjective(Objective):
    """An objective on answers that `Rollouts` samples from the network.

    In validation the loss is the negative mean reward: the lowest is the best.

    Args:
        keeps_reference: Whether a frozen copy of the network is kept, with the weights that the run began with. It is part
            of the checkpoint, so that a resumed run has the same.
    """

    loss_unit = "negative reward"

    def __init__(self, keeps_reference: bool = False) -> None:
        super().__init__()
        self.keeps_reference = keeps_reference
        self.reference: Network | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error for a reference beside quantised weights."""
        kept = own.arguments.get("kl") or own.arguments.get("keep_reference")
        if kept and any(item.name == "BitsandbytesWeights" for item in run.selected):
            yield f"{own.name} {QUANTISED}"

    def change_network(self, network: Network) -> None:
        """Makes the reference, of the size of a network that was just built; the network stays as it is."""
        if self.keeps_reference:
            self.reference = copied(network).requires_grad_(False)

    def begin(self, network: Network, resumed: bool = False) -> None:
        """Gives the reference the weights of the network, unless they are in the checkpoint of a resumed run.

        Weights that are frozen, because an adapter is trained, are shared: the reference is the network without the adapter,
        and takes no memory.
        """
        if self.reference is None:
            return
        now = dict(network.named_parameters())
        for name, parameter in self.reference.named_parameters():
            value = now[name].detach()
            if value.is_floating_point() != parameter.is_floating_point():
                raise ConfigError(f"{type(self).__name__} {QUANTISED}.")
            if not now[name].requires_grad and not hasattr(value, "to_local"):
                parameter.data = value
            elif not resumed:
                copy_to_shard(parameter, full_tensor(value))
        if not resumed:
            buffers = dict(network.named_buffers())
            for name, buffer in self.reference.named_buffers():
                buffer.copy_(buffers[name])

    @abstractmethod
    def prepare(self, network: Network, rollout: Rollout) -> None:
        """Adds to the parts of a rollout what the loss needs, such as advantages; they have `OLD` and `REFERENCE`.

        Called once for a rollout, with the weights that sampled it, in eval mode and without gradients. What the network
        computes of a part has the bits that it has in training.
        """

    @abstractmethod
    def policy_loss(
        self, network: Network, batch: Mapping[str, Tensor]
    ) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the loss of a part, as :meth:`core.contracts.Objective.loss`."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the loss of a part; in validation the negative rewards."""
        if REWARDS not in batch:
            raise ConfigError(
                f"{type(self).__name__} is trained on answers with rewards, and the batch has none.\n"
                "Add the callback Rollouts to trainer.callbacks, and take --data=PromptDataModule."
            )
        if self.training:
            return self.policy_loss(network, batch)
        counted = (batch["labels"] != IGNORED_LABEL).any(1)
        rewards = batch[REWARDS].where(counted, 0.0).sum()
        tokens = (batch["labels"] != IGNORED_LABEL).sum()
        return TokenSum(-rewards, tokens, counted.sum()), {"reward": TokenSum(rewards, counted.sum())}

    def add_log_probabilities(self, network: Network, part: Part) -> None:
        """Adds `OLD`, and `REFERENCE` where there is one, to a part."""
        part[OLD] = log_probabilities(network, part)
        if self.reference is not None:
            with evaluating(self.reference):
                part[REFERENCE] = log_probabilities(self.reference, part)


def clipped_policy_loss(
    log_probabilities: Tensor, batch: Mapping[str, Tensor], advantages: Tensor, clip: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Returns the clipped surrogate loss of each position, (R, T), and where the ratio was clipped, (R, T) bool.

    PPO, arXiv:1707.06347, equation 7.

    Args:
        log_probabilities: Those of the labels now, (R, T).
        batch: With `OLD`, (R, T).
        advantages: Of each label, (R, T) or (R, 1).
        clip: The ratio is clipped to 1 - clip[0] and 1 + clip[1].
    """
    ratio = (log_probabilities - batch[OLD]).exp()
    bounded = ratio.clamp(1 - clip[0], 1 + clip[1])
    plain, held = ratio * advantages, bounded * advantages
    return -torch.minimum(plain, held), (held < plain) & (batch["labels"] != IGNORED_LABEL)


def importance_weights(part: Part, cap: float | None) -> Tensor:
    """Returns the weights (R, T) that correct for labels drawn by others than the weights of `OLD`; 1 without a cap.

    Truncated importance sampling: the ratio of the trainer's to the sampler's probability, at most `cap`; IMPALA,
    arXiv:1802.01561, section 4.1 (truncated weights), and LlamaRL, arXiv:2505.24034, of language models.
    """
    if cap is None:
        return torch.ones_like(part[OLD])
    return (part[OLD] - part[SAMPLED]).exp().clamp(max=cap)


def token_weights(batch: Mapping[str, Tensor], over: str) -> tuple[Tensor, Tensor]:
    """Returns the weight of each position's loss, (R, T) float32, 0 without a label; and what the sum is divided by.

    Args:
        batch: With `labels` and `ROOM`.
        over: `tokens`: all tokens weigh the same (DAPO, arXiv:2503.14476, equation 8); `answers`: all answers (GRPO,
            arXiv:2402.03300, equation 3); `room`: tokens weigh one over the most that an answer could have (Dr. GRPO,
            arXiv:2503.20783, section 3.2).
    """
    labelled = (batch["labels"] != IGNORED_LABEL).float()
    if over == "tokens":
        return labelled, labelled.sum()
    lengths = labelled.sum(1, keepdim=True)
    counted = (lengths > 0).float()
    if over == "answers":
        return labelled / lengths.clamp(min=1), counted.sum()
    return labelled, (counted[:, 0] * batch[ROOM]).sum()
