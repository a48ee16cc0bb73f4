"""A small head on the hidden states of a network, in the place of its output weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError
from plugins.objectives.chunked import weights_of
from toolkit.initial_values import normal, start_added

STD = 0.02
"""Standard deviation of new weights; transformers' `initializer_range`."""


class Head(nn.Module):
    """A linear map of hidden states (..., C) to K outputs, with BERT's pooler before it where it is asked for; not initialised.

    Args:
        width: C.
        outputs: K.
        dropout: Before the linear map.
        pooler: Whether there are a map of C to C features and a tanh before that.
        bias: Whether the outputs have biases.
        options: Device and data type.
    """

    def __init__(
        self, width: int, outputs: int, dropout: float, pooler: bool, bias: bool, **options: Any
    ) -> None:
        super().__init__()
        self.pooler = nn.Linear(width, width, device="meta") if pooler else None
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, outputs, bias, device="meta")
        self.to(options["dtype"]).to_empty(device=options["device"])

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns (..., K), float32 or wider."""
        if self.pooler is not None:
            hidden = self.pooler(hidden).tanh()
        found = self.output(self.dropout(hidden))
        return found.to(torch.promote_types(found.dtype, torch.float32))


def new_head(
    network: Network,
    owner: str,
    outputs: int,
    *,
    dropout: float = 0.0,
    pooler: bool = False,
    bias: bool = True,
) -> Head:
    """Returns a head for the hidden states of a network that was just built.

    What the network's logits alone use is frozen: nothing is computed with it, and DDP waits for each gradient.

    Args:
        network: May be on the meta device.
        owner: The objective, for messages.
        outputs: K.
        dropout: As in :class:`Head`.
        pooler: As in :class:`Head`.
        bias: As in :class:`Head`.

    Raises:
        ConfigError: If the network returns logits.
    """
    weight = network.output_weight
    if weight is None:
        raise ConfigError(
            f"{owner}: {type(network).__name__} returns logits, and a head needs the hidden states.\nTake a network that returns "
            "them, such as Llama or BERT; published weights become one of them with `python -m core import`."
        )
    for parameter in _of_logits_alone(network, weight):
        parameter.requires_grad_(False)
    head = Head(weight.shape[1], outputs, dropout, pooler, bias, device=weight.device, dtype=weight.dtype)
    for name, parameter in head.named_parameters():
        start_added(parameter, 0.0 if name.endswith("bias") else normal(STD), network, f"{owner}.{name}")
    return head


def _of_logits_alone(network: Network, weight: Tensor) -> list[Tensor]:
    """Returns the parameters that turn hidden states into logits, without those of embeddings, which are used before."""
    embedded = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
    with torch.enable_grad():
        logits = network.logits(weight.new_zeros(1, 1, weight.shape[1]))
    return [weight for weight in weights_of(logits) if id(weight) not in embedded]
