"""Rejection sampling: the best of several answers are trained on as if somebody had written them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, TokenSum
from core.errors import ConfigError
from core.technique import Feature, technique
from toolkit.log_probabilities import log_probabilities
from toolkit.rollouts import REWARDS, OnPolicyObjective, Rollout

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

ALONE = (
    "RejectionSampling takes the best of several answers, and Rollouts samples 1 to each prompt: set `samples` of Rollouts to 2 "
    "or more, or `at_least` of RejectionSampling"
)


@technique(
    paper="RAFT, arXiv:2304.06767, algorithm 1; Llama 2, arXiv:2307.09288, section 3.2.2; expert iteration: ReST-EM, "
    "arXiv:2312.06585",
    needs=(Feature("rollouts"),),
    offers=("learns_from_rollouts", "keeps_weights"),
)
class RejectionSampling(OnPolicyObjective):
    """Trains on the best of the answers to each prompt by cross-entropy: best-of-n put into the weights.

    Of equal answers the first counts. With `Rollouts` at `epochs` and `mini_batches` of 1 each step samples anew; more of
    them is expert iteration, in which a rollout is trained on for longer.

    Args:
        at_least: The least reward of an answer that is trained on, such as 1.0 for correct ones; None: any.
        keep_reference: Whether the weights of the start are kept, so that `rollout/kl` is logged.

    Raises:
        ConfigError: If Rollouts samples one answer to each prompt, and `at_least` is not set.

    Example:
        model:
          objective:
            class_path: RejectionSampling
            init_args: {at_least: 1.0}
    """

    def __init__(self, at_least: float | None = None, keep_reference: bool = False) -> None:
        super().__init__(keeps_reference=keep_reference)
        self.at_least = at_least

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error if each prompt has one answer, and any is good enough."""
        yield from super().preflight(run, own)
        alone = any(
            "rollouts" in one.declaration.offers and one.arguments.get("samples") == 1 for one in run.selected
        )
        if alone and own.arguments.get("at_least") is None:
            yield ALONE

    def prepare(self, network: Network, rollout: Rollout) -> None:
        """Leaves the best answer to each prompt in the parts."""
        if rollout.samples < 2 and self.at_least is None:
            raise ConfigError(f"{ALONE}.")
        for part in rollout.parts:
            groups = part[REWARDS].view(-1, rollout.samples)
            first = torch.arange(len(groups), device=groups.device) * rollout.samples
            best = first + groups.argmax(1)
            part |= {name: values[best] for name, values in part.items()}
            if self.at_least is not None:
                bad = part[REWARDS] < self.at_least
                part["labels"] = part["labels"].masked_fill(bad[:, None], IGNORED_LABEL)

    def policy_loss(
        self, network: Network, batch: Mapping[str, Tensor]
    ) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the cross-entropy of the answers."""
        tokens = (batch["labels"] != IGNORED_LABEL).sum()
        return TokenSum(-log_probabilities(network, batch).sum(), tokens), {}
