"""GRPO's loss and advantages are those of the papers and of trl; the reward rises."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from core.contracts import IGNORED_LABEL
from core.errors import ConfigError
from plugins.objectives.grpo import GRPO, group_advantages, k3
from tests.support.rewarded import network, on_policy
from toolkit.log_probabilities import log_probabilities
from toolkit.rollouts import OLD, REFERENCE, REWARDS, ROOM, SAMPLED, Rollout

ROWS, LENGTH, LONGEST = 6, 12, 9

OPTIONS = [
    dict(kl=0.04, weigh="answers"),
    dict(clip_high=0.28, weigh="tokens", importance_cap=None),
    dict(baseline="mean", weigh="room", kl=0.1),
]


def rollout(objective):
    """Returns a network after some steps, and a rollout of the weights before them, which the objective has prepared."""
    generator = torch.Generator().manual_seed(0)

    def noise(values, size):
        return size * torch.randn(values.shape, generator=generator, dtype=torch.float64)

    torch.manual_seed(0)
    now, old = network(n_layer=1).double(), network(n_layer=1).double()
    ids = torch.randint(1, 200, (ROWS, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, :3] = IGNORED_LABEL
    for row in range(ROWS):
        labels[row, LENGTH - row :] = IGNORED_LABEL
    part = {"input_ids": ids[:, :-1], "labels": labels, ROOM: torch.full((ROWS,), LONGEST)}
    part[REWARDS] = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    objective.change_network(old)
    with torch.no_grad():
        objective.begin(old)
        for parameter in old.parameters():
            parameter.add_(noise(parameter, 0.03))
        objective.add_log_probabilities(old, part)
        part[SAMPLED] = part[OLD] + noise(part[OLD], 0.2)
        for parameter, start in zip(now.parameters(), old.parameters(), strict=True):
            parameter.copy_(start + noise(start, 0.03))  # so that some ratios are clipped
        objective.prepare(old, Rollout([part], 3, lambda sums: sums))
    return now, part


def by_hand(net, part, options):
    """Returns the loss by the papers' formulas, token by token."""
    now, kl = log_probabilities(net, part).detach(), options.get("kl", 0.0)
    answers = []
    for row in range(ROWS):
        group = part[REWARDS][row // 3 * 3 : row // 3 * 3 + 3]
        advantage = part[REWARDS][row] - group.mean()
        if options.get("baseline", "group") == "group":
            advantage = advantage / (group.var(correction=1).sqrt() + 1e-4)
        losses = []
        for place in (part["labels"][row] >= 0).nonzero()[:, 0].tolist():
            ratio = (now[row, place] - part[OLD][row, place]).exp()
            bounded = ratio.clamp(0.8, 1 + options.get("clip_high", 0.2))
            loss = -min(ratio * advantage, bounded * advantage)
            if options.get("importance_cap", 2.0):
                loss = loss * min((part[OLD][row, place] - part[SAMPLED][row, place]).exp(), 2.0)
            if kl:
                difference = part[REFERENCE][row, place] - now[row, place]
                loss = loss + kl * (difference.exp() - difference - 1)
            losses.append(float(loss))
        answers.append(losses)
    if options["weigh"] == "answers":
        return sum(sum(one) / len(one) for one in answers) / ROWS
    return sum(map(sum, answers)) / (
        sum(map(len, answers)) if options["weigh"] == "tokens" else ROWS * LONGEST
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_loss_is_that_of_the_papers(options):
    objective = GRPO(**options)
    net, part = rollout(objective)
    loss, figures = objective.loss(net, part)
    assert float(loss.mean.detach()) == pytest.approx(by_hand(net, part, options), rel=1e-6)
    assert 0 < float(figures["clipped"].mean) < 1
    assert int(loss.tokens) == (part["labels"] >= 0).sum()


LOSSES = {"answers": "grpo", "tokens": "dapo", "room": "dr_grpo"}


@pytest.mark.ci  # importing trl takes seconds
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradients_are_those_of_trl(options):
    trl = pytest.importorskip("trl.trainer.grpo_trainer")
    objective = GRPO(**options)
    net, part = rollout(objective)
    loss, _ = objective.loss(net, part)
    loss.mean.backward()
    expected = {name: weight.grad.clone() for name, weight in net.named_parameters()}
    net.zero_grad()
    now, mask = log_probabilities(net, part), (part["labels"] >= 0).double()
    cap = objective.importance_cap
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda values: values, reduce=lambda values, **_: values),
        model=SimpleNamespace(training=True), loss_type=LOSSES[options["weigh"]], beta=objective.kl,
        epsilon_low=0.2, epsilon_high=objective.clip[1], importance_sampling_level="token",
        use_vllm=cap is not None, vllm_importance_sampling_correction=True, off_policy_mask_threshold=None,
        top_entropy_quantile=1.0, aux_loss_enabled=False, max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    empty = torch.zeros(ROWS, 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": empty, "prompt_mask": empty, "completion_ids": part["labels"], "completion_mask": mask,
        "advantages": group_advantages(part[REWARDS], 3, objective.baseline), "old_per_token_logps": part[OLD],
        "ref_per_token_logps": part.get(REFERENCE), "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": (part[OLD] - part[SAMPLED]).exp().clamp(max=cap or 1.0),
    }  # fmt: skip
    theirs = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    assert float(loss.mean.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    theirs.backward()
    for name, weight in net.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-6, atol=1e-9)


def test_advantages():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 3.0, 3.0, 3.0], dtype=torch.float64)
    found = {name: group_advantages(rewards, 4, name) for name in ("group", "mean", "leave_one_out")}
    assert found["mean"].tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]
    deviation = (1 / 3) ** 0.5
    assert found["group"].tolist() == pytest.approx(
        [x / (deviation + 1e-4) for x in (0.5, -0.5, -0.5, 0.5)] + [0] * 4
    )
    others = [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3, 0, 0, 0, 0]  # less the mean of the other three
    assert found["leave_one_out"].tolist() == pytest.approx(others)


def test_the_estimate_of_the_divergence_is_unbiased():
    random = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy, reference = random.softmax(1)
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * k3(policy.log(), reference.log())).sum(), exact)


WRONG = [dict(clip=0), dict(clip=1.0), dict(clip_high=-1), dict(kl=-1), dict(baseline="mena"), dict(weigh="token"), dict(importance_cap=0)]  # fmt: skip


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_values_out_of_range(options):
    with pytest.raises(ConfigError, match=f"GRPO: {next(iter(options))}"):
        GRPO(**options)


def test_one_answer_has_nothing_to_be_compared_with(tmp_path):
    with pytest.raises(ConfigError, match="samples 1 of each"):
        on_policy(tmp_path, GRPO(), 1, rollouts={"samples": 1})


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(3))
def test_the_reward_rises(seed, tmp_path):
    options = dict(rollouts={"samples": 8}, seed=seed, limit_val_batches=0)
    _, _, figures = on_policy(tmp_path, GRPO(kl=0.1), 40, **options)
    assert figures[0]["rollout/reward"] < 0.6
    assert sum(one["rollout/reward"] for one in figures[-4:]) / 4 > 0.8
    assert figures[-1]["rollout/kl"] < 1.0
