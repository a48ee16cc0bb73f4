"""KTO against trl's trainer; its divergence, over ranks too."""

import pytest
import torch

from core.errors import ConfigError
from plugins.objectives.kto import KTO
from tests.support.trl_losses import BETA, batch, log_probabilities, ours, stored


def test_value_and_gradient_are_those_of_trl():
    loss, figures, gradient = ours(KTO(BETA, undesirable_weight=1.5))
    value, theirs = stored("kto")
    assert loss.mean.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-14)
    given = batch()
    ratios = log_probabilities(given["logits"], given["labels"]).sum(1) - given["reference"][:, 0]
    assert figures["divergence"].mean.item() == pytest.approx(ratios[1::2].mean().item(), rel=1e-12)
    assert figures["divergence"].mean > 0
    good = torch.tensor([True, False, True, True])
    for name, which in {"reward_desirable": good, "reward_undesirable": ~good}.items():
        assert figures[name].weight == which.sum()
        assert figures[name].mean.item() == pytest.approx(BETA * ratios[::2][which].mean().item(), rel=1e-12)
    assert loss.weight == 4
    assert loss.tokens == (given["labels"][::2] >= 0).sum()  # not those of the mismatched answers


def test_the_divergence_is_not_below_0():
    given = batch()
    reference = given["reference"] + 50
    loss, figures, _ = ours(KTO(BETA), reference=reference)
    assert figures["divergence"].mean == 0
    rewards = BETA * (log_probabilities(given["logits"], given["labels"]).sum(1) - reference[:, 0])[::2]
    expected = torch.where(
        torch.tensor([True, False, True, True]), 1 - rewards.sigmoid(), 1 - (-rewards).sigmoid()
    )
    torch.testing.assert_close(loss.total, expected.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "arguments",
    [{"beta": 0.0}, {"desirable_weight": -1.0}, {"undesirable_weight": -1.0}, {"chunk_tokens": 0}],
)
def test_values_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigError, match=f"KTO takes {next(iter(arguments))}"):
        KTO(**arguments)
