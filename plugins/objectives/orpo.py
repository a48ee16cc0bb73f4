"""ORPO: supervised fine-tuning on chosen answers, with a penalty on the odds of rejected ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from core.contracts import Network, Objective, TokenSum
from core.technique import Feature, technique
from plugins.objectives.answers import SPLITS_PAIRS, check_at_least, faults, pair_figures, pairs_of
from toolkit.log_probabilities import CHUNK_TOKENS

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="ORPO, arXiv:2403.07691, equations 6 and 7",
    needs=(Feature("preference_pairs"),),
    conflicts=SPLITS_PAIRS,
)
class ORPO(Objective):
    """Fine-tunes on chosen answers and lowers the odds of rejected ones, in one stage and without a reference.

    With P the exponential of the mean log-probability of an answer's tokens and odds = P / (1 - P), the loss of a pair is
    -log P(chosen) - weight log sigmoid(log odds(chosen) - log odds(rejected)), in nats. Each pair weighs the same, as in the
    paper; trl averages the first term over the tokens of a batch. Logged are, as means over pairs, `answer_loss`, the first
    term, `odds_loss`, the second without its weight, and with mean log-probabilities as rewards `reward_chosen`,
    `reward_rejected`, `reward_margin` and `reward_accuracy`.

    Args:
        weight: Of the odds ratio, lambda in the paper, from 0 upwards; 0.1 to 1.0 there.
        chunk_tokens: Positions whose logits are computed at a time.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        model:
          objective:
            class_path: ORPO
            init_args: {weight: 0.1}
        data:
          class_path: PreferenceDataModule
          init_args:
            source: pairs.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
    """

    loss_unit = "nats/pair"

    def __init__(self, weight: float = 0.1, chunk_tokens: int = CHUNK_TOKENS) -> None:
        super().__init__()
        check_at_least("ORPO", 0, weight=weight)
        check_at_least("ORPO", 1, chunk_tokens=chunk_tokens)
        self.weight, self.chunk_tokens = weight, chunk_tokens

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error for data without pairs, and for ranks with parts of a pair."""
        yield from faults(run, own, paired=True)

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss with the number of pairs as its weight."""
        found, pairs = pairs_of(network, batch, self.chunk_tokens)
        # rows that only fill the batch have probability 1, and no odds
        means = found.means.where(pairs.repeat_interleave(2), -1.0)
        odds = (means - log_of_rest(means)).view(-1, 2)
        chosen, rejected = means.view(-1, 2).unbind(1)
        odds_loss = -logsigmoid(odds[:, 0] - odds[:, 1]).where(pairs, 0.0).sum()
        answer_loss = -chosen.where(pairs, 0.0).sum()
        figures = {
            name: TokenSum(total.detach(), found.tokens, pairs.sum())
            for name, total in {"answer_loss": answer_loss, "odds_loss": odds_loss}.items()
        }
        total = TokenSum(answer_loss + self.weight * odds_loss, found.tokens, pairs.sum())
        return total, figures | pair_figures(chosen, rejected, pairs)


def log_of_rest(x: Tensor) -> Tensor:
    """Returns log(1 - exp(x)) for x < 0, without cancellation near 0 and far below; M. Maechler, 2012, equation 7."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -math.log(2)
    return torch.where(
        near,
        torch.log(-torch.expm1(x.where(near, -1.0))),
        torch.log1p(-torch.exp(x.where(~near, -1.0))),
    )
