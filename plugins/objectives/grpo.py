"""GRPO and its relatives: advantages are rewards compared with those of other answers to the same prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, TokenSum
from core.errors import ConfigError, nearest
from core.technique import Feature, technique
from toolkit.log_probabilities import log_probabilities
from toolkit.rollouts import (
    ADVANTAGES,
    CORRECTIONS,
    REFERENCE,
    REWARDS,
    OnPolicyObjective,
    Rollout,
    clipped_policy_loss,
    importance_weights,
    token_weights,
)

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

BASELINES = ("group", "mean", "leave_one_out")
WEIGHTS = ("tokens", "answers", "room")

ALONE = "GRPO compares the answers to a prompt, and Rollouts samples 1 of each: set `samples` of Rollouts to 2 or more; 8 is usual"


@technique(
    paper="GRPO: DeepSeekMath, arXiv:2402.03300, equations 3 and 4; RLOO: arXiv:2402.14740, 3.2; DAPO: arXiv:2503.14476, 3.1 and "
    "3.3; Dr. GRPO: arXiv:2503.20783, 3.2; k3: Schulman 2020, 'Approximating KL divergence'",
    needs=(Feature("rollouts"),),
    offers=("learns_from_rollouts", "keeps_weights"),
)
class GRPO(OnPolicyObjective):
    """Raises the probability of answers whose reward is above that of other answers to the prompt; needs no value network.

    The loss of a token is PPO's clipped surrogate with the advantage of its answer, plus `kl` times an estimate of the KL
    divergence from the reference, exp(d) - d - 1 with d = log(reference / policy). With r the rewards of a prompt's answers,
    advantages are, by `baseline`,

    - `group`: (r - mean) / (standard deviation + 1e-4), as in GRPO;
    - `mean`: r - mean, as in Dr. GRPO, so that prompts of equal difficulty count alike;
    - `leave_one_out`: r - mean of the others, as in RLOO, which is `mean` times G / (G - 1).

    Dr. GRPO is `{baseline: mean, weigh: room}`, DAPO `{clip_high: 0.28, weigh: tokens}`, the first GRPO
    `{weigh: answers, kl: 0.04}`.

    Logged: `train/clipped`, the share of tokens whose ratio is clipped, and `train/kl`, the estimate above.

    Args:
        clip: The ratio of new to old probability counts from 1 - clip upwards.
        clip_high: The ratio counts up to 1 + clip_high; None: as `clip`.
        baseline: What a reward is compared with.
        weigh: What weighs the same: `tokens`; `answers`, however long; or tokens over the `room` that an answer has.
        kl: Coefficient of the KL divergence. 0: there is no reference, which takes the memory of the network.
        importance_cap: Tokens weigh the probability that the trainer gives them over that of the sampler, at most this.
            None: 1. The sampler's arithmetic differs: key-value caches, other kernels.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        model:
          objective:
            class_path: GRPO
            init_args: {clip: 0.2, kl: 0.04}
    """

    def __init__(
        self,
        clip: float = 0.2,
        clip_high: float | None = None,
        baseline: str = "group",
        weigh: str = "tokens",
        kl: float = 0.0,
        importance_cap: float | None = 2.0,
    ) -> None:
        super().__init__(keeps_reference=kl > 0)
        self.clip = clip, clip if clip_high is None else clip_high
        for name, value in {"clip": clip, "clip_high": self.clip[1]}.items():
            if not 0 < value < (1 if name == "clip" else float("inf")):
                raise ConfigError(
                    f"GRPO: {name}={value} must be above 0" + " and below 1." * (name == "clip")
                )
        for name, word, known in (("baseline", baseline, BASELINES), ("weigh", weigh, WEIGHTS)):
            if word not in known:
                raise ConfigError(
                    f"GRPO: {name}={word!r} is one of {', '.join(known)}.{nearest(word, known)}"
                )
        if not 0 <= kl < float("inf"):
            raise ConfigError(f"GRPO: kl={kl} must be 0 or above.")
        if importance_cap is not None and not 0 < importance_cap < float("inf"):
            raise ConfigError(f"GRPO: importance_cap={importance_cap} must be above 0, or null.")
        self.baseline, self.weigh, self.kl, self.importance_cap = baseline, weigh, kl, importance_cap

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error if each prompt has one answer."""
        yield from super().preflight(run, own)
        if any(
            "rollouts" in one.declaration.offers and one.arguments.get("samples") == 1 for one in run.selected
        ):
            yield ALONE

    def prepare(self, network: Network, rollout: Rollout) -> None:
        """Adds advantages."""
        if rollout.samples < 2:
            raise ConfigError(f"{ALONE}.")
        for part in rollout.parts:
            part[CORRECTIONS] = importance_weights(part, self.importance_cap)
            part[ADVANTAGES] = group_advantages(part[REWARDS], rollout.samples, self.baseline)

    def policy_loss(
        self, network: Network, batch: Mapping[str, Tensor]
    ) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the weighted sum of the losses of tokens."""
        now = log_probabilities(network, batch)
        losses, clipped = clipped_policy_loss(now, batch, batch[ADVANTAGES][:, None], self.clip)
        losses = losses * batch[CORRECTIONS]
        weights, divisor = token_weights(batch, self.weigh)
        labelled = batch["labels"] != IGNORED_LABEL
        tokens = labelled.sum()
        figures = {"clipped": TokenSum(clipped.sum(), tokens)}
        if self.kl:
            distances = k3(now, batch[REFERENCE])
            losses = losses + self.kl * distances
            figures["kl"] = TokenSum(distances.detach().where(labelled, 0.0).sum(), tokens)
        return TokenSum((weights * losses).sum(), tokens, divisor), figures


def group_advantages(rewards: Tensor, samples: int, baseline: str) -> Tensor:
    """Returns the advantages (R,) of rewards (R,), each `samples` of which are of one prompt; see :class:`GRPO`."""
    groups = rewards.view(-1, samples)
    centred = groups - groups.mean(1, keepdim=True)
    if baseline == "leave_one_out":
        centred = centred * (samples / (samples - 1))
    elif baseline == "group":
        centred = centred / (groups.std(1, keepdim=True) + 1e-4)
    return centred.flatten()


def k3(log_probabilities: Tensor, reference: Tensor) -> Tensor:
    """Returns an unbiased estimate of the KL divergence from the reference that is never negative, of each position."""
    difference = reference - log_probabilities
    return torch.expm1(difference) - difference
