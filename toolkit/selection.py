"""What a run selected, as the checks of techniques see it before anything is built."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from core.errors import deprecated
from core.technique import Declaration

if TYPE_CHECKING:
    from core.contracts import Network

__all__ = ["AdvisesRuns", "Run", "Selected"]

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class Selected:
    """One class that a run uses, with what is known about it.

    Attributes:
        key: Its place in the configuration, for example "trainer.callbacks.2".
        arguments: Its arguments as plain values, defaults included.
        target: The class itself.
    """

    key: str
    name: str
    class_path: str
    kind: str
    package: str
    version: str
    declaration: Declaration
    arguments: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(frozen=True)
class Run:
    """A run that is parsed and not built, as needs and checks see it.

    Attributes:
        selected: The classes that it uses, in the order of the configuration.
        config: The configuration as plain values, defaults included.
        places: Path of keys -> "file:line", or the argument, that wrote a value.
        accelerator: "cpu", "cuda", "mps" or the name of another of Lightning's.
        devices: Processes on each machine.
        world_size: Processes altogether.
        offline: Whether it is checked for machines that are not here, whose devices are not known.
        command: What is done: fit, validate, test or predict.
    """

    selected: Sequence[Selected] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[Keys, str] = field(default_factory=dict)
    accelerator: str = "cpu"
    devices: int = 1
    world_size: int = 1
    offline: bool = False
    command: str = "fit"

    @property
    def elsewhere(self) -> bool:
        """Deprecated: `offline`."""
        deprecated("Run.elsewhere", "Run.offline")
        return self.offline

    def argument(self, path: str) -> Any:
        """Returns the value at a path like "model.network.vocab_size", or None if there is no such value."""
        return self._find(path)[0]

    def place(self, path: str) -> str:
        """Returns where the value at a path, or what holds it, was written; empty if nowhere."""
        keys = self._find(path)[1]
        places = (
            self.places[keys[:count]] for count in range(len(keys), 0, -1) if keys[:count] in self.places
        )
        return next(places, "").removeprefix(f"{os.getcwd()}/")

    def named(self, item: Selected) -> str:
        """Returns a technique's name with its place behind it, for messages."""
        place = self.place(item.key)
        return f"{item.name} ({place})" if place else item.name

    def _find(self, path: str) -> tuple[Any, Keys]:
        value: Any = self.config
        keys: list[str | int] = []
        for part in path.split("."):
            if (
                isinstance(value, Mapping)
                and "class_path" in value
                and part not in ("class_path", "init_args")
            ):
                keys.append("init_args")
                value = value.get("init_args")
            keys.append(int(part) if isinstance(value, list) else part)
            value = dict(enumerate(value)) if isinstance(value, list) else value
            value = value.get(keys[-1]) if isinstance(value, Mapping) else None
        return value, tuple(keys)


@runtime_checkable
class AdvisesRuns(Protocol):
    """A callback that runs may gain from which do not select it, and whose `@technique` offers "advice"."""

    @classmethod
    def advice(cls, run: Run, network: Network) -> str | None:
        """Returns one line for the user with what would be gained and the option that adds it, or None.

        It is shown where the run could be started with the callback added. Only what the configuration says counts, so
        that two runs of it are told the same.
        """
