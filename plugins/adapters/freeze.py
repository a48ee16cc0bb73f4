"""Trains a part of a network and leaves the rest as it is."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from core.contracts import Network
from core.errors import ConfigError, nearest
from core.technique import technique
from toolkit.adapters import Adapter

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="training the last layers: ULMFiT, arXiv:1801.06146, section 3.3; biases: BitFit, arXiv:2106.10199",
    offers=("keeps_weights",),
)
class Freeze(Adapter):
    """Trains the last blocks, or the parameters whose names match, and freezes all others.

    Beside another adapter it chooses what is trained in addition, such as norms or the output head. Checkpoints hold
    what is trained; the rest is read from `model.weights` again.

    Args:
        last_blocks: Number of blocks at the end of the network that are trained.
        train: Patterns for names of parameters that are trained, with `*` and `?`: "*.bias", "lm_head.*".

    Raises:
        ConfigError: If nothing is trained, the network has fewer blocks, or a pattern matches no parameter.

    Example:
        trainer:
          callbacks+:
            - class_path: Freeze
              init_args: {last_blocks: 1, train: ["norm.*"]}
    """

    def __init__(self, last_blocks: int = 0, train: list[str] | None = None) -> None:
        if last_blocks < 0 or not (last_blocks or train):
            raise ConfigError(
                "Freeze leaves no trainable parameter: set last_blocks to 1 or more, or name parameters in train."
            )
        self.last_blocks, self.train = last_blocks, train or []

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields why a pipeline's first stages would have nothing to train."""
        alone = sum(item.kind == "adapters" for item in run.selected) == 1
        sizes = [item.arguments.get("pipeline", 1) for item in run.selected if item.kind == "strategies"]
        if alone and any(size > 1 for size in sizes) and not own.arguments.get("train"):
            yield (
                "pipeline is above 1, and each of its stages has to train some of its blocks, which last_blocks alone "
                "does not let it: set pipeline to 1, or name parameters of all blocks in train"
            )

    def adapt(self, network: Network) -> None:
        """Chooses what is trained."""
        if self.last_blocks > len(network.blocks):
            raise ConfigError(
                f"Freeze: last_blocks is {self.last_blocks}, the network has {len(network.blocks)} blocks. "
                "Set it to at most that."
            )
        for block in list(network.blocks)[len(network.blocks) - self.last_blocks :]:
            block.requires_grad_(True)
        named = dict(network.named_parameters())
        for pattern in self.train:
            chosen = [name for name in named if fnmatchcase(name, pattern)]
            if not chosen:
                raise ConfigError(
                    f"Freeze: no parameter of {type(network).__name__} is named {pattern!r}.{nearest(pattern, set(named))} "
                    f"It has, for example, {', '.join([*named][-3:])}."
                )
            for name in chosen:
                if not named[name].is_floating_point():
                    raise ConfigError(
                        f"Freeze: {name} is quantised and cannot be trained. Leave {pattern!r} out."
                    )
                named[name].requires_grad_(True)

    def merge(self, network: Network) -> bool:
        """Does nothing: what was trained are weights of the network."""
        return True
