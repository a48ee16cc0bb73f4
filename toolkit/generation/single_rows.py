"""How weights lie in memory, and who multiplies them, where one row at a time is decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from core.contracts import Network

__all__ = ["store_for_single_rows"]


def store_for_single_rows(network: Network) -> None:
    """Prepares a network on the CPU for decoding one text at a time.

    float32: matrices with more rows than columns are stored column by column; MKL then multiplies one row with them in a
    third less time. bfloat16: one row is multiplied by torch's own kernel, in a third less time than by oneDNN's, which
    multiplies all others. oneDNN is switched for the whole process, so that only one thread may compute meanwhile.
    Values, names and shapes stay, and the results of several rows.

    Args:
        network: Changed in place. Other data types, devices and quantised weights stay as they are.
    """
    weights = [module.weight for module in network.modules() if type(module) is nn.Linear]
    if network.output_weight is not None:
        weights.append(network.output_weight)
    plain = [one for one in weights if type(one) is nn.Parameter and one.device.type == "cpu"]
    for weight in plain:
        if weight.dtype == torch.float32 and weight.shape[0] > weight.shape[1]:
            weight.data = weight.data.t().contiguous().t()
    if any(weight.dtype == torch.bfloat16 for weight in plain):
        forward, logits = network.forward, network.logits
        network.forward = _own_kernel(forward, lambda batch: batch["input_ids"].numel() == 1)  # type: ignore[method-assign]
        network.logits = _own_kernel(logits, lambda hidden: hidden.shape[:-1].numel() == 1)  # type: ignore[method-assign]


def _own_kernel(call: Callable[..., Tensor], is_row: Callable[[Any], bool]) -> Callable[..., Tensor]:
    """Returns a function that calls another, without oneDNN if its first argument is of one row."""

    def run(first: Any, *others: Any, **options: Any) -> Tensor:
        if not is_row(first):
            return call(first, *others, **options)
        before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # `flags` sets, and warns of, others too
        try:
            return call(first, *others, **options)
        finally:
            torch.backends.mkldnn.enabled = before

    return run
