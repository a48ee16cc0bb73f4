"""PPO's advantages, loss and coefficient are those of the papers in float64; the reward rises."""

import pytest
import torch

from core.contracts import IGNORED_LABEL
from core.errors import ConfigError
from plugins.adapters.lora import LoRA
from plugins.cli.selection import describe
from plugins.objectives.ppo import PPO, RETURNS, VALUES, advantages, token_rewards, whiten
from plugins.precision.bitsandbytes_weights import BitsandbytesWeights
from tests.support.rewarded import network, on_policy
from toolkit.log_probabilities import log_probabilities
from toolkit.rollouts import ADVANTAGES, OLD, REFERENCE, REWARDS, ROOM, SAMPLED, Rollout
from toolkit.selection import Run

ROWS, LENGTH = 4, 12


def labels(generator):
    """Returns labels of answers of 9, 7, 5 and 3 tokens."""
    found = torch.randint(1, 200, (ROWS, LENGTH), generator=generator)
    found[:, :3] = IGNORED_LABEL
    for row in range(ROWS):
        found[row, LENGTH - 2 * row :] = IGNORED_LABEL
    return found


def test_advantages_are_the_weighted_sums_of_later_errors():
    generator = torch.Generator().manual_seed(0)
    wanted, (gamma, gae_lambda) = labels(generator), (0.9, 0.8)
    inside = wanted >= 0
    rewards, values = (
        torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64) * inside for _ in range(2)
    )
    found = advantages(rewards, values, wanted, gamma, gae_lambda)
    for row in range(ROWS):
        places = inside[row].nonzero()[:, 0].tolist()
        value = [*values[row, places].tolist(), 0.0]
        errors = [
            float(rewards[row, place]) + gamma * value[n + 1] - value[n] for n, place in enumerate(places)
        ]
        for n, place in enumerate(places):
            expected = sum(
                (gamma * gae_lambda) ** (later - n) * errors[later] for later in range(n, len(places))
            )
            assert float(found[row, place]) == pytest.approx(expected, rel=1e-12)
    assert not found[~inside].any()
    # lambda 1: returns do not depend on values
    returns = advantages(rewards, values, wanted, 1.0, 1.0) + values
    torch.testing.assert_close(returns.sum(1)[3], (rewards[3].flip(0).cumsum(0).flip(0) * inside[3]).sum())


def test_a_token_pays_for_its_distance_and_the_last_gets_the_reward():
    wanted = labels(torch.Generator().manual_seed(0))
    old, reference = torch.full((ROWS, LENGTH), -1.0), torch.full((ROWS, LENGTH), -1.5)
    part = {"labels": wanted, OLD: old, REFERENCE: reference, REWARDS: torch.tensor([1.0, 2.0, 3.0, 4.0])}
    found = token_rewards(part, 0.1)
    assert found[1].tolist() == pytest.approx([-0.05] * 9 + [-0.05 + 2.0] + [-0.05] * 2)
    del part[REFERENCE]
    assert token_rewards(part, 0.1).sum(1).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_advantages_are_normalised_over_parts_and_ranks():
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(2):
        wanted = labels(generator)
        values = torch.randn(ROWS, LENGTH, generator=generator) * (wanted >= 0)
        parts.append({"labels": wanted, ADVANTAGES: values})
    every = torch.cat([part[ADVANTAGES][part["labels"] >= 0] for part in parts]).double()
    whiten(Rollout(parts, 1, lambda sums: sums.mul_(2)))  # two ranks with the same
    found = torch.cat([part[ADVANTAGES][part["labels"] >= 0] for part in parts])
    expected = (every - every.mean()) / every.std(correction=0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def prepared(objective, size=0.03):
    """Returns a network after some steps, and a rollout of the weights before them."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = network(n_layer=1).double()
    objective.change_network(net)
    objective.double()
    ids = torch.randint(1, 200, (ROWS, LENGTH), generator=generator)
    part = {"input_ids": ids, "labels": labels(generator), ROOM: torch.full((ROWS,), 9)}
    part[REWARDS] = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        objective.begin(net)
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        objective.value_head.weight.normal_(generator=generator)
        objective.add_log_probabilities(net, part)
        part[SAMPLED] = part[OLD].clone()
        objective.prepare(net, Rollout([part], 1, lambda sums: sums))
        for parameter in (*net.parameters(), *objective.value_head.parameters()):
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return net, part


@pytest.mark.parametrize("clip_value", [0.1, None])
def test_the_loss_is_that_of_the_papers(clip_value):
    objective = PPO(clip_value=clip_value, value_coefficient=0.3, kl=0.1)
    net, part = prepared(objective)
    loss, figures = objective.loss(net, part)
    with torch.no_grad():
        now = log_probabilities(net, part)
        values = objective.value_head(net(part))[..., 0]
    policy = value = count = 0.0
    for row, place in (part["labels"] >= 0).nonzero().tolist():
        ratio, advantage = (now - part[OLD])[row, place].exp(), part[ADVANTAGES][row, place]
        policy += float(max(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage))
        new, old, target = (float(x[row, place]) for x in (values, part[VALUES], part[RETURNS]))
        near = new if clip_value is None else min(max(new, old - clip_value), old + clip_value)
        value += max((new - target) ** 2, (near - target) ** 2) / 2
        count += 1
    # values are float32, as they are under autocast
    assert float(loss.mean.detach()) == pytest.approx((policy + 0.3 * value) / count, rel=1e-6)
    assert float(figures["policy_loss"].mean) == pytest.approx(policy / count, rel=1e-6)
    assert float(figures["value_loss"].mean) == pytest.approx(value / count, rel=1e-6)
    assert 0 < float(figures["clipped"].mean) < 1


def test_the_coefficient_follows_the_divergence():
    objective = PPO(kl=0.1, kl_target=0.02)
    _, part = prepared(objective)
    kl = float((part[OLD] - part[REFERENCE]).sum() / (part["labels"] >= 0).sum())
    error = min(max(kl / 0.02 - 1, -0.2), 0.2)
    assert float(objective.kl_coefficient) == pytest.approx(0.1 * (1 + 0.1 * error), rel=1e-6)
    far = PPO(kl=0.1, kl_target=1e6)
    prepared(far)
    assert float(far.kl_coefficient) == pytest.approx(0.1 * 0.98, rel=1e-6)


WRONG = [dict(clip=1.0), dict(clip_value=0), dict(value_coefficient=0), dict(kl=-1), dict(kl_target=0.1, kl=0), dict(gamma=0), dict(gae_lambda=1.1), dict(importance_cap=0)]  # fmt: skip


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_values_out_of_range(options):
    with pytest.raises(ConfigError, match=f"PPO: {next(iter(options))}"):
        PPO(**options)


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(3))
def test_the_reward_rises(seed, tmp_path):
    options = dict(rollouts={"samples": 8}, seed=seed, limit_val_batches=0)
    _, _, figures = on_policy(tmp_path, PPO(kl=0.02), 40, **options)
    assert figures[0]["rollout/reward"] < 0.6
    assert sum(one["rollout/reward"] for one in figures[-4:]) / 4 > 0.8
    assert figures[-1]["rollout/kl"] < 1.0


def test_a_reference_of_quantised_weights_is_refused_before_the_run_and_in_it(tmp_path):
    own = describe("model.objective", PPO, "plugins.objectives.ppo.PPO", {"kl": 0.05})
    other = describe("trainer.plugins.0", BitsandbytesWeights, "plugins.precision.bitsandbytes_weights.BitsandbytesWeights", {})  # fmt: skip
    [said] = PPO.preflight(Run((own, other)), own)
    assert said.startswith("PPO keeps no reference of quantised weights: set kl to 0")
    assert not list(PPO.preflight(Run((own,)), own))
    with pytest.raises(ConfigError, match="PPO keeps no reference of quantised weights"):
        on_policy(tmp_path, PPO(), 1, callbacks=[LoRA(rank=2)], plugins=[BitsandbytesWeights()])
