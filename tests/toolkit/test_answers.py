"""Answers become rows with labels on them alone; losses of tokens are weighed as they say."""

import math

import pytest
import torch

from core.contracts import IGNORED_LABEL
from tests.support.rewarded import network
from toolkit.answers import Answer, as_part, sample_answers
from toolkit.generation.rows import evaluating
from toolkit.log_probabilities import log_probabilities
from toolkit.rollouts import (
    OLD,
    ROOM,
    SAMPLED,
    clipped_policy_loss,
    importance_weights,
    token_weights,
)


def test_rows_of_answers():
    answers = [Answer([7, 8, 0], [-1.0, -2.0, -3.0], True), Answer([9], [-4.0], False)]
    part = as_part([[1, 2, 3], [4]], answers, 8, 5, torch.device("cpu"))
    assert part["input_ids"].tolist() == [[1, 2, 3, 7, 8, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0]]
    assert part["labels"].tolist() == [[-100, -100, 7, 8, 0, -100, -100, -100], [9, *[-100] * 7]]
    assert part[SAMPLED].tolist() == [[0, 0, -1, -2, -3, 0, 0, 0], [-4, *[0] * 7]]
    assert part[ROOM].tolist() == [5, 5]
    assert answers[0].content == [7, 8]
    assert answers[1].content == [9]


def test_answers_are_drawn_from_the_network_itself():
    torch.manual_seed(0)
    net = network()
    with torch.no_grad():
        net.output_weight[5] = 3 * net.output_weight[5] + 0.1  # an ending that is likely enough
    prompts, seeds = [[1, 2, 3], [4], [5, 6]], list(range(12))
    answers = sample_answers(net, prompts, max_new_tokens=9, seeds=seeds, stop_ids=[5, 7, 8])
    assert {answer.ended for answer in answers} == {True, False}
    assert all(answer.ended == (answer.ids[-1] in (5, 7, 8)) for answer in answers)
    assert all(answer.ended or len(answer.ids) == 9 for answer in answers)
    assert not any(id in (5, 7, 8) for answer in answers for id in answer.content)
    before = [ids for ids in prompts for _ in range(4)]
    part = as_part(before, answers, 16, 9, torch.device("cpu"))
    with torch.no_grad(), evaluating(net):
        trained = log_probabilities(net, part)
    # the decoder computes one token at a time, with a cache
    torch.testing.assert_close(trained, part[SAMPLED], rtol=0, atol=1e-5)
    alone = sample_answers(net, prompts[1:2], max_new_tokens=9, seeds=seeds[4:8], stop_ids=[5, 7, 8])
    assert [one.ids for one in alone] == [one.ids for one in answers[4:8]]
    assert sample_answers(net, [], max_new_tokens=9, seeds=[], stop_ids=[]) == []


def batch():
    labels = torch.full((3, 5), IGNORED_LABEL)
    labels[0, 1:4], labels[1, 2] = 1, 1
    return {"labels": labels, ROOM: torch.tensor([6, 6, 6])}


@pytest.mark.parametrize(
    ("over", "weights", "divisor"), [("tokens", [1.0, 1.0], 4), ("answers", [1 / 3, 1.0], 2), ("room", [1.0, 1.0], 12)]
)  # fmt: skip
def test_weights_of_tokens(over, weights, divisor):
    found, total = token_weights(batch(), over)
    assert float(total) == divisor
    assert found[0].tolist() == pytest.approx([0, *[weights[0]] * 3, 0])
    assert found[1].tolist() == [0, 0, weights[1], 0, 0]
    assert not found[2].any()


def test_the_clipped_loss_is_that_of_the_paper():
    old = torch.zeros(3, 5)
    ratios = torch.tensor([[9.0, 0.5, 1.0, 1.5, 1.0], [1.0, 1.0, 1.25, 1.0, 1.0], [1.0] * 5])
    advantages = torch.tensor([[2.0], [-1.0], [0.0]])
    losses, clipped = clipped_policy_loss(ratios.log(), {**batch(), OLD: old}, advantages, (0.2, 0.3))
    torch.testing.assert_close(losses[0], -torch.tensor([2.6, 1.0, 2.0, 2.6, 2.0]))
    torch.testing.assert_close(losses[1, 2], torch.tensor(1.25))  # the worse of both, as it is not clipped
    assert clipped.nonzero().tolist() == [[0, 3]]  # of labels


def test_importance_weights_are_truncated():
    part = {OLD: torch.tensor([[-1.0, -1.0, -1.0]]), SAMPLED: torch.tensor([[-1.0, -3.0, -0.5]])}
    assert importance_weights(part, 2.0)[0].tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])
    assert importance_weights(part, None).tolist() == [[1.0, 1.0, 1.0]]
