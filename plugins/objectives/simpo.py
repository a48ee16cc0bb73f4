"""SimPO: preferences by the mean log-probability of an answer's tokens, without a reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import logsigmoid

from core.contracts import Network, Objective, TokenSum
from core.technique import Feature, technique
from plugins.objectives.answers import (
    SPLITS_PAIRS,
    check_above_0,
    check_at_least,
    faults,
    pair_figures,
    pairs_of,
)
from toolkit.log_probabilities import CHUNK_TOKENS

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="SimPO, arXiv:2405.14734, equation 6",
    needs=(Feature("preference_pairs"),),
    conflicts=SPLITS_PAIRS,
)
class SimPO(Objective):
    """Raises the mean log-probability of chosen answers over that of rejected ones by a margin.

    The reward of an answer is beta times the mean log-probability of its tokens; the loss of a pair is
    -log sigmoid(reward of the chosen answer - reward of the rejected one - gamma), in nats. Each pair weighs the same. There is no
    reference: nothing but the learning rate holds the network to where it began. Logged are, as means over pairs,
    `reward_chosen`, `reward_rejected`, `reward_margin` and `reward_accuracy`.

    Args:
        beta: What mean log-probabilities are multiplied by, above 0; 2.0 to 10.0 in the paper.
        gamma: Margin that rewards should have, from 0 upwards; 0.3 to 0.5 times beta in most of the paper's runs.
        chunk_tokens: Positions whose logits are computed at a time.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        model:
          objective:
            class_path: SimPO
            init_args: {beta: 2.0, gamma: 1.0}
        data:
          class_path: PreferenceDataModule
          init_args:
            source: pairs.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
    """

    loss_unit = "nats/pair"

    def __init__(self, beta: float = 2.0, gamma: float = 1.0, chunk_tokens: int = CHUNK_TOKENS) -> None:
        super().__init__()
        check_above_0("SimPO", beta=beta)
        check_at_least("SimPO", 0, gamma=gamma)
        check_at_least("SimPO", 1, chunk_tokens=chunk_tokens)
        self.beta, self.gamma, self.chunk_tokens = beta, gamma, chunk_tokens

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error for data without pairs, and for ranks with parts of a pair."""
        yield from faults(run, own, paired=True)

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss with the number of pairs as its weight."""
        found, pairs = pairs_of(network, batch, self.chunk_tokens)
        chosen, rejected = (self.beta * found.means).view(-1, 2).unbind(1)
        losses = -logsigmoid(chosen - rejected - self.gamma).where(pairs, 0.0)
        return TokenSum(losses.sum(), found.tokens, pairs.sum()), pair_figures(chosen, rejected, pairs)
