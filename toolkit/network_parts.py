"""Which weights of a network belong together: blocks, and kinds of modules, as the network says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from core.contracts import Network
from toolkit.routing import RoutesTokens

__all__ = ["MLP_READERS", "NamesParts", "block_modules", "weight_groups"]

MLP_READERS = "mlp_readers"
"""Key of `NamesParts.parts_by_kind`: modules whose input is the hidden layer of an MLP, its last projection."""

_BLOCK_KINDS = ("router", "norm", "attention", "mlp")
"""Kinds within blocks. A weight that several have is of the first: a router is a part of an MLP."""

_ENDS = ("embedding", "head")


@runtime_checkable
class NamesParts(Protocol):
    """A network that says what its modules are."""

    def parts_by_kind(self) -> Mapping[str, Sequence[nn.Module]]:
        """Returns the modules of each kind, of those that this process has.

        Kinds within the blocks are "attention" (or another mixer of tokens), "mlp" and "norm" (the norms of the residual
        stream), and `MLP_READERS`. Outside of them: "embedding" and "head". Routers are known from
        `toolkit.routing.RoutesTokens`. A kind that the network does not have may be left out.
        """


def _kinds(network: Network) -> dict[str, Sequence[nn.Module]]:
    """Returns the modules of each kind; of a network that does not name its parts, the modules of its ends."""
    if isinstance(network, NamesParts):
        kinds = dict(network.parts_by_kind())
    else:
        first, last = network.ends or ((), ())
        kinds = {"embedding": first, "head": last}
    if isinstance(network, RoutesTokens):
        kinds["router"] = network.routers
    return kinds


def weight_groups(network: Network, detail: bool = False) -> dict[str, dict[str, nn.Parameter]]:
    """Returns name of a group -> name -> parameter, for the weights that are trained and that this process has.

    Groups are `block.<i>`; `attention`, `mlp`, `norm` and `router`, each over all blocks; `embedding` and `head`. Tied
    embeddings are of `embedding` alone. With `detail` also `block.<i>.attention` and so on.
    """
    names = {parameter: name for name, parameter in network.named_parameters() if parameter.requires_grad}
    kinds = _kinds(network)
    kind_of = {
        parameter: kind
        for kind in reversed(_BLOCK_KINDS)
        for module in kinds.get(kind, ())
        for parameter in module.parameters()
    }
    groups: dict[str, dict[str, nn.Parameter]] = {}

    def add(group: str, parameter: nn.Parameter) -> None:
        if parameter in names:
            groups.setdefault(group, {})[names[parameter]] = parameter

    seen = set[nn.Parameter]()
    for index, block in enumerate(network.blocks):
        for parameter in block.parameters():
            seen.add(parameter)
            add(f"block.{index}", parameter)
            if kind := kind_of.get(parameter):
                add(kind, parameter)
                if detail:
                    add(f"block.{index}.{kind}", parameter)
    for kind in _ENDS:
        for parameter in [p for module in kinds.get(kind, ()) for p in module.parameters()]:
            if parameter not in seen:
                seen.add(parameter)
                add(kind, parameter)
    return groups


def block_modules(network: Network, kind: str) -> Iterator[tuple[int, nn.Module]]:
    """Yields the index of a block and each module of a kind in it, in order."""
    found = set(_kinds(network).get(kind, ()))
    for index, block in enumerate(network.blocks):
        yield from ((index, module) for module in block.modules() if module in found)
