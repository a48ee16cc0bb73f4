"""KTO: single answers that were found good or bad train the network, without pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from core.contracts import Network, Objective, TokenSum
from core.technique import Feature, technique
from plugins.objectives.answers import (
    SPLITS_PAIRS,
    answers,
    check_above_0,
    check_at_least,
    check_whole,
    faults,
    references,
)
from toolkit.log_probabilities import CHUNK_TOKENS

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="KTO, arXiv:2402.01306, equation 7 and section 4.1",
    needs=(Feature("preference_pairs"),),
    conflicts=SPLITS_PAIRS,
)
class KTO(Objective):
    """Raises the probability of desirable answers and lowers that of others, relative to a reference network.

    The reward of an answer y to x is r = beta (log p(y|x) - log p_ref(y|x)). The loss of a desirable answer is
    desirable_weight (1 - sigmoid(r - beta z)), that of another undesirable_weight (1 - sigmoid(beta z - r)), where z is an
    estimate of the divergence of the network from the reference: the mean of log p(y'|x) - log p_ref(y'|x) over the micro-batch,
    of all ranks, not below 0, and without a gradient; y' is the answer of another record. PreferenceDataModule with
    `paired: false` pairs each prompt with one such answer, the same in all epochs, as trl does.

    Each answer weighs the same. z belongs to a micro-batch, so that `accumulate_grad_batches` changes the loss a little: take
    micro-batches of at least 8 records on all ranks together. The reference is the network that the run starts from:
    `ReferenceLogProbabilities` computes its log-probabilities once. Logged are `reward_desirable`, `reward_undesirable`, means
    over such answers, and `divergence`, z.

    Args:
        beta: How much the network is held to the reference, above 0.
        desirable_weight: Weight of desirable answers, from 0 upwards.
        undesirable_weight: Weight of others. The paper takes desirable_weight times the number of desirable answers from 1 to 4/3
            of undesirable_weight times the number of others.
        chunk_tokens: Positions whose logits are computed at a time.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        model:
          objective:
            class_path: KTO
            init_args: {beta: 0.1}
        data:
          class_path: PreferenceDataModule
          init_args:
            source: answers.jsonl
            paired: false
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
        trainer:
          callbacks+:
            - ReferenceLogProbabilities
    """

    loss_unit = "KTO loss/answer"

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__()
        check_above_0("KTO", beta=beta)
        check_at_least("KTO", 0, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
        check_at_least("KTO", 1, chunk_tokens=chunk_tokens)
        self.beta, self.chunk_tokens = beta, chunk_tokens
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error for data of pairs, without references, and for ranks with parts of an answer."""
        yield from faults(run, own, paired=False, stored=True)

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss with the number of answers as its weight."""
        check_whole(batch)
        reference = references(batch)
        own, others = ({name: value[at::2] for name, value in batch.items()} for at in (0, 1))
        with torch.no_grad():
            other = answers(network, others, self.chunk_tokens)
        divergence, counted = self._divergence(other.sums - reference[1::2], other.counts > 0)
        found = answers(network, own, self.chunk_tokens)
        real, desirable = found.counts > 0, own["desirable"].any(1)
        rewards = self.beta * (found.sums - reference[::2])
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        gain = torch.where(desirable, rewards - self.beta * divergence, self.beta * divergence - rewards)
        losses = (weights * (1 - gain.sigmoid())).where(real, 0.0)
        figures = {"divergence": TokenSum(divergence * counted, counted)}
        for name, which in {"desirable": real & desirable, "undesirable": real & ~desirable}.items():
            figures[f"reward_{name}"] = TokenSum(rewards.detach().where(which, 0.0).sum(), which.sum())
        return TokenSum(losses.sum(), found.tokens, real.sum()), figures

    def _divergence(self, ratios: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Returns z, and the number of answers of this rank behind it."""
        sums = torch.stack((ratios.where(real, 0.0).sum(), real.sum().to(ratios.dtype)))
        counted = sums[1].clone()
        if dist.is_available() and dist.is_initialized():
            # of all ranks: those with the same tokens, as in tensor parallelism, count alike in both sums
            dist.all_reduce(sums)
        return (sums[0] / sums[1].clamp(min=1)).clamp(min=0), counted
