"""Rejection sampling trains on the best answers, by their cross-entropy."""

import pytest
import torch

from core.contracts import IGNORED_LABEL
from core.errors import ConfigError
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.rejection_sampling import RejectionSampling
from tests.support.rewarded import network, on_policy
from toolkit.rollouts import REWARDS, ROOM, SAMPLED, Rollout


def prepared(objective, samples=3):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = network(n_layer=1)
    ids = torch.randint(1, 200, (6, 11), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, :4] = IGNORED_LABEL
    part = {"input_ids": ids[:, :-1], "labels": labels, ROOM: torch.full((6,), 6)}
    part[REWARDS] = torch.tensor([0.5, 1.0, 1.0, 0.1, 0.0, 0.3])
    objective.change_network(net)
    with torch.no_grad():
        objective.add_log_probabilities(net, part)
        part[SAMPLED] = torch.zeros(6, 10)
        whole = dict(part)
        objective.prepare(net, Rollout([part], samples, lambda sums: sums))
    return net, whole, part


def test_the_best_answers_are_trained_on():
    objective = RejectionSampling()
    net, whole, part = prepared(objective)
    assert part[REWARDS].tolist() == [1.0, pytest.approx(0.3)]
    assert torch.equal(part["input_ids"], whole["input_ids"][[1, 5]])  # of equal ones the first
    best = {name: whole[name][[1, 5]] for name in ("input_ids", "labels")}
    loss, expected = objective.loss(net, part)[0], CausalLM().loss(net, best)[0]
    torch.testing.assert_close(loss.total, expected.total)
    assert loss.tokens == expected.tokens


def test_answers_below_a_limit_are_not():
    _, whole, part = prepared(RejectionSampling(at_least=0.4))
    assert torch.equal(part["labels"][0], whole["labels"][1])
    assert (part["labels"][1] == IGNORED_LABEL).all()


def test_there_must_be_something_to_choose_from(tmp_path):
    with pytest.raises(ConfigError, match="best of several"):
        on_policy(tmp_path, RejectionSampling(), 1, rollouts={"samples": 1})


@pytest.mark.ci
def test_the_reward_rises(tmp_path):
    options = dict(rollouts={"samples": 8}, limit_val_batches=0)
    _, _, figures = on_policy(tmp_path, RejectionSampling(keep_reference=True), 40, **options)
    assert sum(one["rollout/reward"] for one in figures[-4:]) / 4 > 0.75
    assert 0 < figures[-1]["rollout/kl"] < 2.0
