"""Direct preference optimization: pairs of answers train the network itself, without a reward model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from core.contracts import Network, Objective, TokenSum
from core.errors import ConfigError, nearest
from core.technique import Feature, technique
from plugins.objectives.answers import (
    SPLITS_PAIRS,
    Answers,
    check_above_0,
    check_at_least,
    faults,
    pair_figures,
    pairs_of,
    references,
)
from toolkit.log_probabilities import CHUNK_TOKENS

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

KINDS = ("sigmoid", "ipo", "hinge", "robust")


@technique(
    paper="DPO, arXiv:2305.18290, equation 7; IPO, arXiv:2310.12036, equation 17; hinge: SLiC, arXiv:2305.10425; robust: "
    "arXiv:2403.00409, equation 12",
    needs=(Feature("preference_pairs"),),
    conflicts=SPLITS_PAIRS,
)
class DPO(Objective):
    """Raises the probability of chosen answers over that of rejected ones, relative to a reference network.

    The reward of an answer y to x is beta (log p(y|x) - log p_ref(y|x)), m is the margin between the two rewards of a pair, and
    the loss of a pair, in nats, is

    - `sigmoid`: -log sigmoid(m), with smoothing s (conservative DPO) -(1 - s) log sigmoid(m) - s log sigmoid(-m);
    - `robust`: ((s - 1) log sigmoid(m) + s log sigmoid(-m)) / (1 - 2 s), unbiased if a share s of the pairs is swapped;
    - `hinge`: max(0, 1 - m);
    - `ipo`: (d - 1 / (2 beta))^2, where d is the difference of the two log-ratios, each over the tokens of its answer, as
      trl has it.

    Each pair weighs the same, however long its answers are. The reference is the network that the run starts from:
    `ReferenceLogProbabilities` computes its log-probabilities once. Logged are, as means over pairs, `reward_chosen`,
    `reward_rejected`, `reward_margin` and `reward_accuracy`, the share of pairs with m > 0.

    Args:
        kind: sigmoid, ipo, hinge or robust.
        beta: How much the network is held to the reference, above 0.
        label_smoothing: Share s of pairs that may be swapped, from 0 to below 0.5; for sigmoid and robust.
        chunk_tokens: Positions whose logits are computed at a time.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        model:
          objective:
            class_path: DPO
            init_args: {beta: 0.1}
        data:
          class_path: PreferenceDataModule
          init_args:
            source: pairs.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
        trainer:
          callbacks+:
            - ReferenceLogProbabilities
    """

    def __init__(
        self,
        kind: str = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ConfigError(
                f"DPO: kind is {kind!r}; it is one of {', '.join(KINDS)}.{nearest(kind, KINDS)}"
            )
        check_above_0("DPO", beta=beta)
        check_at_least("DPO", 1, chunk_tokens=chunk_tokens)
        most = 0.5 if kind in ("sigmoid", "robust") else 0.0
        if not (0 <= label_smoothing < most or label_smoothing == 0):
            allowed = "from 0 to below 0.5" if most else f"0 with kind={kind}"
            raise ConfigError(f"DPO: label_smoothing is {label_smoothing}; it is {allowed}.")
        self.loss_unit = "nats/pair" if kind in ("sigmoid", "robust") else f"{kind} loss/pair"
        self.kind, self.beta, self.label_smoothing = kind, beta, label_smoothing
        self.chunk_tokens = chunk_tokens

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error for data without pairs, without references, and for ranks with parts of a pair."""
        yield from faults(run, own, paired=True, stored=True)

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss with the number of pairs as its weight."""
        reference = references(batch)
        found, pairs = pairs_of(network, batch, self.chunk_tokens)
        ratios = found.sums - reference
        losses = self.losses(Answers(ratios, found.counts)).where(pairs, 0.0)
        chosen, rejected = (self.beta * ratios).view(-1, 2).unbind(1)
        return (
            TokenSum(losses.sum(), found.tokens, pairs.sum()),
            pair_figures(chosen, rejected, pairs),
        )

    def losses(self, ratios: Answers) -> Tensor:
        """Returns the loss of each pair, (B,).

        Args:
            ratios: With `sums` the differences between an answer's log-probability and its reference, (2 B,).
        """
        chosen, rejected = (ratios.means if self.kind == "ipo" else ratios.sums).view(-1, 2).unbind(1)
        margins, s = self.beta * (chosen - rejected), self.label_smoothing
        if self.kind == "ipo":
            return (chosen - rejected - 1 / (2 * self.beta)).square()
        if self.kind == "hinge":
            return torch.relu(1 - margins)
        if self.kind == "robust":
            return (s * logsigmoid(-margins) - (1 - s) * logsigmoid(margins)) / (1 - 2 * s)
        return -(1 - s) * logsigmoid(margins) - s * logsigmoid(-margins)
