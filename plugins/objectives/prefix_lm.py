"""Prefix language modelling: the beginning of each document is read in both directions, the rest is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from core.technique import technique
from toolkit.prefixes import PREFIX, AttendsToPrefixes

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

BITS = 24


@technique(paper="T5, arXiv:1910.10683, section 3.2.1; UL2, arXiv:2205.05131, section 3.1.2 (S-denoiser)")
class PrefixLM(Objective):
    """Attends in both directions within the first part of each document, and predicts the tokens after it.

    The length of a document's prefix is uniform between two shares of the document's tokens in the row. It is a hash of `seed`
    and these tokens, and nothing is drawn: ranks, micro-batches and a resume change nothing, and the same row has the same
    prefix in training and validation. Tokens of the prefix have no label. Documents are those of `document_ids`; without
    them a row is one.

    Args:
        objective: The objective of the remaining labels.
        min_fraction: Least share of a document that is its prefix.
        max_fraction: Largest share; at least one token remains.
        seed: Seed of the hash that gives the length of a prefix.

    Raises:
        ConfigError: If the shares are not in order within [0, 1], or the network only attends to tokens before.

    Example:
        model:
          objective:
            class_path: PrefixLM
            init_args:
              objective: {class_path: CausalLM}
              min_fraction: 0.1
              max_fraction: 0.9
    """

    def __init__(
        self, objective: Objective, min_fraction: float = 0.0, max_fraction: float = 1.0, seed: int = 0
    ) -> None:
        super().__init__()
        if not 0 <= min_fraction <= max_fraction <= 1:
            raise ConfigError(
                f"PrefixLM takes 0 <= min_fraction <= max_fraction <= 1, not {min_fraction} and {max_fraction}."
            )
        self.objective, self.min_fraction, self.max_fraction = objective, min_fraction, max_fraction
        self.seed = seed

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error where a strategy takes rows apart before the objective sees them."""
        for name in ("pipeline", "context"):
            if any((item.arguments.get(name) or 1) > 1 for item in run.selected):
                yield f"PrefixLM has to see whole rows before the network does: set {name} to 1"

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the objective's sums over the tokens after the prefixes."""
        if not (isinstance(network, AttendsToPrefixes) and network.attends_to_prefixes):
            raise ConfigError(
                f"PrefixLM: {type(network).__name__} cannot attend in both directions in prefixes alone, with these arguments.\n"
                "Take a decoder whose blocks all have attention without a window, such as Llama."
            )
        place, lengths = prefixes(batch, self.min_fraction, self.max_fraction, self.seed)
        labels = batch["labels"].masked_fill(place + 1 < lengths, IGNORED_LABEL)
        return self.objective.loss(network, {**batch, "labels": labels, PREFIX: place < lengths})


def prefixes(
    batch: Mapping[str, Tensor], min_fraction: float, max_fraction: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Returns for each token its place in its document and the length of that document's prefix, both (B, T)."""
    ids, documents = batch["input_ids"], batch.get("document_ids")
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begins = torch.zeros_like(ids, dtype=torch.bool)
    if documents is not None:
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    document = begins.cumsum(1)
    place = places - places.masked_fill(~begins, 0).cummax(1).values
    token = _mixed(ids + _mixed(place + _mixed(torch.full_like(place, seed))))
    sums, sizes = (torch.zeros_like(ids).scatter_add(1, document, x) for x in (token, torch.ones_like(ids)))
    share = (_mixed(sums) >> (63 - BITS)) & (2**BITS - 1)  # uniform
    most = (max_fraction * sizes).long().minimum(sizes - 1)
    least = (min_fraction * sizes).long().minimum(most)
    lengths = least + ((share * (most - least + 1)) >> BITS)
    return place, lengths.gather(1, document)


def _mixed(x: Tensor) -> Tensor:
    """Mixes the bits of int64 values, which wrap around; splitmix64's finaliser with arithmetic shifts."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
