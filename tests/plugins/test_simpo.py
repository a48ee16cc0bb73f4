"""SimPO against trl's loss, and the rewards that it logs."""

import pytest
import torch

from core.errors import ConfigError
from plugins.objectives.simpo import SimPO
from tests.support.trl_losses import GAMMA, batch, log_probabilities, ours, stored


def test_value_and_gradient_are_those_of_trl():
    loss, figures, gradient = ours(SimPO(beta=2.0, gamma=GAMMA))
    value, theirs = stored("simpo")
    assert loss.mean.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-14)
    given = batch()
    means = log_probabilities(given["logits"], given["labels"]).sum(1) / (given["labels"] >= 0).sum(1)
    assert figures["reward_chosen"].mean.item() == pytest.approx(2 * means[::2].mean().item(), rel=1e-12)


@pytest.mark.parametrize("arguments", [{"beta": 0.0}, {"gamma": -1.0}, {"chunk_tokens": 0}])
def test_values_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigError, match=f"SimPO takes {next(iter(arguments))}"):
        SimPO(**arguments)
