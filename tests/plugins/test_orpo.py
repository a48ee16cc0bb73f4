"""ORPO against trl's odds ratio and the paper's formula in float64."""

import pytest
import torch

from core.errors import ConfigError
from plugins.objectives.orpo import ORPO, log_of_rest
from tests.support.trl_losses import WEIGHT, batch, log_probabilities, ours, stored


def test_the_odds_ratio_is_that_of_trl():
    """Which computes it in float32: to 1e-6."""
    _, figures, gradient = ours(ORPO(weight=WEIGHT))
    _, _, without = ours(ORPO(weight=0.0))
    value, theirs = stored("orpo_odds")
    assert WEIGHT * figures["odds_loss"].mean.item() == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(gradient - without, theirs, rtol=1e-6, atol=1e-8)


def test_value_and_gradient_are_those_of_the_paper():
    given = batch()
    leaf = given["logits"].clone().requires_grad_()
    expected = 0.0
    for chosen, rejected in log_probabilities(leaf, given["labels"]).view(4, 2, -1):
        p, q = (each[each != 0].mean().exp() for each in (chosen, rejected))
        ratio = (p / (1 - p)) / (q / (1 - q))
        expected = expected - p.log() - WEIGHT * (ratio / (1 + ratio)).log()
    loss, figures, gradient = ours(ORPO(weight=WEIGHT))
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected / 4, leaf)[0], rtol=1e-9, atol=1e-14)
    total = figures["answer_loss"].total + WEIGHT * figures["odds_loss"].total
    torch.testing.assert_close(total, loss.total, rtol=1e-12, atol=0)


@pytest.mark.parametrize("x", [0.0, -1e-30, -1e-7, -0.5, -1.0, -20.0, -200.0])
def test_the_log_of_the_rest_is_exact_near_0_and_far_below(x):
    import mpmath

    value = torch.tensor(x, requires_grad=True)
    found = log_of_rest(value)
    found.backward()
    assert torch.isfinite(value.grad)
    if x:
        assert found.item() == pytest.approx(
            float(mpmath.log(-mpmath.expm1(mpmath.mpf(value.item())))), rel=1e-6
        )


@pytest.mark.parametrize("arguments", [{"weight": -1.0}, {"weight": float("inf")}, {"chunk_tokens": 0}])
def test_values_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigError, match=f"ORPO takes {next(iter(arguments))}"):
        ORPO(**arguments)
