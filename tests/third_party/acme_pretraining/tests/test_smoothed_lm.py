"""What SmoothedLM computes."""

import pytest
import torch
import torch.nn.functional as F
from acme_pretraining.smoothed_lm import SmoothedLM

from core.errors import ConfigError

LABELS = torch.tensor([[1, -100, 2], [-100, 0, 4]])


class Fixed(torch.nn.Module):
    """A network whose logits are given."""

    def __init__(self):
        super().__init__()
        self.values = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))

    def forward(self, batch):
        return self.values

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_is_torchs_label_smoothing(smoothing):
    network = Fixed()
    loss, parts = SmoothedLM(smoothing).loss(network, {"labels": LABELS})
    flat = network.values.flatten(0, 1)
    expected = F.cross_entropy(flat, LABELS.flatten(), label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(loss.total, expected)
    assert loss.tokens == 4
    plain = F.cross_entropy(flat, LABELS.flatten(), reduction="sum")
    torch.testing.assert_close(parts["cross_entropy"].total, plain)


def test_the_parts_add_up_to_the_loss():
    loss, parts = SmoothedLM(0.3).loss(Fixed(), {"labels": LABELS})
    sums = 0.7 * parts["cross_entropy"].total + 0.3 * parts["uniform_cross_entropy"].total
    torch.testing.assert_close(loss.total, sums)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_a_share_out_of_range_is_refused(smoothing):
    with pytest.raises(ConfigError, match="at least 0 and below 1"):
        SmoothedLM(smoothing)
