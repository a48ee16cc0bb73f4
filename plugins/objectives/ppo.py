"""PPO: advantages from a learned value of each token, and a penalty for leaving the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.contracts import IGNORED_LABEL, Network, TokenSum
from core.errors import ConfigError
from core.technique import Feature, technique
from toolkit.initial_values import start_added
from toolkit.log_probabilities import log_probabilities_at
from toolkit.rollouts import (
    ADVANTAGES,
    CORRECTIONS,
    OLD,
    REFERENCE,
    REWARDS,
    OnPolicyObjective,
    Part,
    Rollout,
    clipped_policy_loss,
    importance_weights,
)

RETURNS, VALUES = "returns", "values"

LARGEST_ERROR, GAIN = 0.2, 0.1
"""Of the controller of the coefficient: Ziegler et al., section 2.2, equation for the proportional controller."""


@technique(
    paper="PPO, arXiv:1707.06347; of language models: Ziegler et al., arXiv:1909.08593, section 2.2; InstructGPT, "
    "arXiv:2203.02155, 3.5; GAE, arXiv:1506.02438, equation 16",
    needs=(Feature("rollouts"),),
    offers=("learns_from_rollouts", "keeps_weights"),
)
class PPO(OnPolicyObjective):
    """Raises the probability of tokens that led to more than a learned value expected; stays near the reference.

    The reward of a token is -c log(policy / reference) with the coefficient c of the KL divergence; the last token of an answer
    also gets the answer's reward. A linear head on the network's hidden states, part of the objective, is trained to give
    the value of each place; advantages are those of GAE, less their mean and over their standard deviation in the rollout.
    The loss of a token is the clipped surrogate plus `value_coefficient` times half the larger squared error of the value and
    of the value clipped to +- `clip_value` of the old one.

    With `kl_target` the coefficient is adaptive: after each rollout it is multiplied by 1 + 0.1 e with e the relative error
    KL / target - 1 within +- 0.2. The reference has the weights that the run began with.

    Logged: `train/policy_loss`, `train/value_loss`, `train/clipped`, the share of tokens whose ratio is clipped, and
    `train/kl_coefficient`.

    Args:
        clip: The ratio of new to old probability counts from 1 - clip to 1 + clip.
        clip_value: How far a value counts from the old one, in rewards; None: any distance.
        value_coefficient: Weight of the value's loss.
        kl: Coefficient of the KL divergence, rewards per nat; with `kl_target` the first one. 0: there is no reference.
        kl_target: KL divergence aimed at, nats per token; None: the coefficient is fixed.
        gamma: Discount of a later token's reward.
        gae_lambda: lambda of GAE: 1 has no bias, 0 the least variance.
        whiten: Whether advantages are normalised over the rollout, of all ranks.
        importance_cap: As for GRPO.

    Raises:
        ConfigError: If a value is out of range, or the network returns logits alone.

    Example:
        model:
          objective:
            class_path: PPO
            init_args: {kl: 0.05, kl_target: 0.1}
    """

    kl_coefficient: Tensor

    def __init__(
        self,
        clip: float = 0.2,
        clip_value: float | None = 0.2,
        value_coefficient: float = 0.1,
        kl: float = 0.05,
        kl_target: float | None = None,
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
        whiten: bool = True,
        importance_cap: float | None = 2.0,
    ) -> None:
        super().__init__(keeps_reference=kl > 0)
        inf = float("inf")
        limits = {
            "clip": (clip, 0 < clip < 1, "above 0 and below 1"),
            "clip_value": (clip_value, clip_value is None or 0 < clip_value < inf, "above 0, or null"),
            "value_coefficient": (value_coefficient, 0 < value_coefficient < inf, "above 0"),
            "kl": (kl, 0 <= kl < inf, "0 or above"),
            "kl_target": (kl_target, kl_target is None or (0 < kl_target < inf and kl > 0), "above 0, with kl above 0"),
            "gamma": (gamma, 0 < gamma <= 1, "above 0 and at most 1"),
            "gae_lambda": (gae_lambda, 0 <= gae_lambda <= 1, "0 to 1"),
            "importance_cap": (importance_cap, importance_cap is None or 0 < importance_cap < inf, "above 0, or null"),
        }  # fmt: skip
        for name, (value, fits, wanted) in limits.items():
            if not fits:
                raise ConfigError(f"PPO: {name}={value} must be {wanted}.")
        self.clip, self.clip_value, self.value_coefficient = clip, clip_value, value_coefficient
        self.kl_target, self.gamma, self.gae_lambda = kl_target, gamma, gae_lambda
        self.whiten, self.importance_cap = whiten, importance_cap
        self.value_head: Any = None
        self.register_buffer("kl_coefficient", torch.tensor(float(kl)))

    def change_network(self, network: Network) -> None:
        """Makes the value head, which gives 0 at first, and the reference."""
        super().change_network(network)
        weight = network.output_weight
        if weight is None:
            raise ConfigError(
                f"PPO: {type(network).__name__} returns logits, and values are learnt from hidden states.\nTake a network such as "
                "GPT or Llama, or --model.objective=GRPO, which has no values."
            )
        self.value_head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        for name, parameter in self.value_head.named_parameters():
            start_added(parameter, 0.0, network, f"PPO.{name}")

    def prepare(self, network: Network, rollout: Rollout) -> None:
        """Adds values, advantages and returns; then adapts the coefficient of the KL divergence."""
        for part in rollout.parts:
            part[CORRECTIONS] = importance_weights(part, self.importance_cap)
            part[VALUES] = self._values(network(part), part["labels"])
            rewards = token_rewards(part, float(self.kl_coefficient))
            part[ADVANTAGES] = advantages(rewards, part[VALUES], part["labels"], self.gamma, self.gae_lambda)
            part[RETURNS] = part[ADVANTAGES] + part[VALUES]
        if self.whiten:
            whiten(rollout)
        if self.kl_target is not None:
            self._adapt(rollout, self.kl_target)

    def _adapt(self, rollout: Rollout, target: float) -> None:
        pairs = [((part[OLD] - part[REFERENCE]).sum(), _labelled(part).sum()) for part in rollout.parts]
        sums = torch.stack([torch.stack((total, tokens.to(total))) for total, tokens in pairs]).sum(0)
        total, tokens = rollout.reduce(sums)
        error = (total / tokens.clamp(min=1) / target - 1).clamp(-LARGEST_ERROR, LARGEST_ERROR)
        self.kl_coefficient.mul_(1 + GAIN * error)

    def _values(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Returns the value of each place with a label, (R, T) float32; 0 elsewhere."""
        values = self.value_head(hidden).squeeze(-1).float()
        return values.where(labels != IGNORED_LABEL, 0.0)

    def policy_loss(
        self, network: Network, batch: Mapping[str, Tensor]
    ) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the sum of the losses of policy and value."""
        hidden = network(batch)
        now = log_probabilities_at(network, hidden, batch["labels"])
        labelled = _labelled(batch)
        tokens = labelled.sum()
        losses, clipped = clipped_policy_loss(now, batch, batch[ADVANTAGES], (self.clip, self.clip))
        policy = (losses * batch[CORRECTIONS]).where(labelled, 0.0).sum()
        value = self._value_loss(self._values(hidden, batch["labels"]), batch).where(labelled, 0.0).sum()
        figures = {
            "policy_loss": TokenSum(policy.detach(), tokens),
            "value_loss": TokenSum(value.detach(), tokens),
            "clipped": TokenSum(clipped.sum(), tokens),
            "kl_coefficient": TokenSum(self.kl_coefficient * tokens, tokens),
        }
        return TokenSum(policy + self.value_coefficient * value, tokens), figures

    def _value_loss(self, values: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        errors = (values - batch[RETURNS]).square()
        if self.clip_value is None:
            return errors / 2
        old = batch[VALUES]
        near = old + (values - old).clamp(-self.clip_value, self.clip_value)
        return torch.maximum(errors, (near - batch[RETURNS]).square()) / 2


def token_rewards(part: Part, kl: float) -> Tensor:
    """Returns the reward of each label, (R, T): a penalty for each token, and the answer's reward at its last one."""
    rewards = torch.zeros_like(part[OLD])
    if REFERENCE in part:
        rewards = -kl * (part[OLD] - part[REFERENCE])
    places = torch.arange(rewards.shape[1], device=rewards.device)
    last = torch.where(_labelled(part), places, -1).amax(1, keepdim=True)
    return rewards + torch.where(places == last, part[REWARDS][:, None], 0.0)


def advantages(rewards: Tensor, values: Tensor, labels: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Returns the generalised advantage estimate of each label, (R, T); 0 where there is none.

    A place behind the answer has the value 0. Labels of a row are successive.

    Args:
        rewards: (R, T).
        values: (R, T), 0 without a label.
        labels: (R, T).
        gamma: Discount.
        gae_lambda: Weight of longer sums.
    """
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    errors = (rewards + gamma * following - values).where(labels != IGNORED_LABEL, 0.0)
    found = torch.zeros_like(errors)
    behind = torch.zeros_like(errors[:, 0])
    for place in range(errors.shape[1] - 1, -1, -1):
        behind = errors[:, place] + gamma * gae_lambda * behind
        found[:, place] = behind
    return found.where(labels != IGNORED_LABEL, 0.0)


def whiten(rollout: Rollout) -> None:
    """Gives the advantages of a rollout, of all ranks, mean 0 and standard deviation 1 over its tokens."""
    pairs = [(part, _labelled(part)) for part in rollout.parts]
    totals = [torch.stack((part[ADVANTAGES].sum(), labelled.sum().float())) for part, labelled in pairs]
    total, count = rollout.reduce(torch.stack(totals).sum(0))
    mean = total / count.clamp(min=1)
    squares = [(part[ADVANTAGES] - mean).where(labelled, 0.0).square().sum() for part, labelled in pairs]
    variance = rollout.reduce(torch.stack(squares).sum()) / count.clamp(min=1)
    for part, labelled in pairs:
        part[ADVANTAGES] = ((part[ADVANTAGES] - mean) * (variance + 1e-8).rsqrt()).where(labelled, 0.0)


def _labelled(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["labels"] != IGNORED_LABEL
