"""Names of classes: what a data module finds in its records, and an objective over classes needs.

Ids of classes are places in the list of their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from core.contracts import Network

__all__ = ["Predicts", "TakesLabels", "give_labels"]


@runtime_checkable
class TakesLabels(Protocol):
    """An objective over classes, whose names the data know."""

    def take_labels(self, names: Sequence[str]) -> None:
        """Takes the names of the classes, in the order of their ids; before the network is built.

        Raises:
            ConfigError: If it has others.
        """


@runtime_checkable
class Predicts(Protocol):
    """An objective that says what it finds in a text, at the positions of its labels."""

    def predict(self, network: Network, batch: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Returns what is found at each position whose label is not -100, row by row, as plain values.

        Args:
            network: In eval mode, as the objective.
            batch: As in training; the values of labels do not matter.
        """


def give_labels(module: nn.Module | None, names: Sequence[str]) -> None:
    """Gives the names of the classes to what takes them in a module, such as that of the run."""
    for part in module.modules() if module is not None else ():
        if isinstance(part, TakesLabels):
            part.take_labels(names)
