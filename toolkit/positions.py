"""Whether a network mixes positions only in its attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from core.contracts import Network
from core.errors import deprecated

LENGTH = 16
"""Tokens that a network is tried with, at most."""


@torch.no_grad()
def explain_position_mixing(network: Network) -> str | None:
    """Returns why a network with replaced attention gives other results when its tokens are sharded over ranks, or None.

    Its tokens are given in another order, with their positions, and attention restores the order, as it does where
    the tokens of a sequence are on several ranks. Every hidden state must stay the same. With a convolution, a
    recurrence or a shift by one token it would not, nor if the network counts positions itself. Weights that are zero
    get random values for the test, so that a branch that starts at zero counts too.

    Args:
        network: With its weights; its attention is torch's own afterwards.
    """
    length = min(LENGTH, network.max_sequence_length or LENGTH)
    device = next(network.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(network.vocab_size, (1, length), generator=generator).to(device)
    order = torch.randperm(length, generator=generator).to(device)
    back, calls = order.argsort(), 0

    def attend(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        q, k, v = (x[..., back, :] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, *arguments, **options)[..., order, :]

    def hidden(places: Tensor) -> Tensor:
        found: Tensor = network({"input_ids": tokens[:, places], "position_ids": places[None]})
        return found.float()

    with _evaluated(network):
        if not network.replace_attention(scaled_dot_product_attention):
            return "its attention cannot be replaced"
        expected = hidden(torch.arange(length, device=device))[:, order]
        try:
            network.replace_attention(attend)
            found = hidden(order)
        finally:
            network.replace_attention(scaled_dot_product_attention)
    if not calls:
        return "it does not call the attention that it is given"
    apart = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    rounding = max(torch.finfo(p.dtype).eps for p in network.parameters() if p.is_floating_point())
    if apart <= 1000 * min(rounding, 1e-4):
        return None
    return (
        f"hidden states are {apart:.1e} off (relative) once tokens are sharded: it mixes positions outside of its "
        "attention (a convolution, a recurrence), or does not take position_ids from the batch"
    )


@contextmanager
def _evaluated(network: nn.Module) -> Iterator[None]:
    """Switches training mode off, and fills what is zero; puts both back."""
    modes = [(module, module.training) for module in network.modules()]
    empty = [p for p in network.parameters() if p.is_floating_point() and not p.any()]
    generator = torch.Generator().manual_seed(1)
    for parameter in empty:
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.copy_(noise)
    network.eval()
    try:
        yield
    finally:
        for parameter in empty:
            parameter.zero_()
        for module, training in modes:
            module.training = training


def __getattr__(name: str) -> Any:
    if name == "mixes_elsewhere":
        deprecated("toolkit.positions.mixes_elsewhere", "explain_position_mixing")
        return explain_position_mixing
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
