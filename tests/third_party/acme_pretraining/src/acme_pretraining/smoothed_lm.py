"""Next-token prediction with smoothed labels."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from core.technique import technique


@technique(paper="Rethinking the Inception Architecture, arXiv:1512.00567, section 7", api=">=1,<2")
class SmoothedLM(Objective):
    """Minimises the cross-entropy against labels that give `smoothing` to all tokens alike.

    Logged beside the loss, in nats per label token and adding up to it in the shares 1 - `smoothing` and
    `smoothing`: `cross_entropy`, against the label, and `uniform_cross_entropy`, against all tokens alike.

    Args:
        smoothing: Share of the uniform distribution, at least 0 and below 1.

    Raises:
        ConfigError: If `smoothing` is out of range.

    Example:
        model:
          objective:
            class_path: SmoothedLM
            init_args: {smoothing: 0.1}
    """

    def __init__(self, smoothing: float = 0.1) -> None:
        super().__init__()
        if not 0 <= smoothing < 1:
            raise ConfigError(f"SmoothedLM takes a smoothing of at least 0 and below 1, not {smoothing}.")
        self.smoothing = smoothing

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the loss in nats, summed over label tokens, and its two parts."""
        labels = batch["labels"].flatten()
        counted = labels != IGNORED_LABEL
        logs = network.logits(network(batch)).flatten(0, 1).float().log_softmax(dim=-1)
        of_label = logs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        entropy, uniform = -(of_label * counted).sum(), -(logs.mean(dim=-1) * counted).sum()
        tokens = counted.sum()
        parts = {
            "cross_entropy": TokenSum(entropy, tokens),
            "uniform_cross_entropy": TokenSum(uniform, tokens),
        }
        return TokenSum((1 - self.smoothing) * entropy + self.smoothing * uniform, tokens), parts
