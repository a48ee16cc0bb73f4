"""A run under examination, and what is found: what every rule reads and returns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from toolkit.diagnosis.history import History, Series

SETTINGS_CHANGED = "doctor/settings_changed"
"""Logged in the first step of a run that was resumed with other `RATE_SETTINGS`."""

RATE_SETTINGS = ("trainer.max_steps", "model.optimizer", "model.lr_scheduler")


@dataclass(frozen=True)
class Finding:
    """A cause that was found.

    Attributes:
        cause: Its name, such as "rate_too_high".
        since: The optimizer step since which the evidence shows it.
        evidence: The figures, in one clause.
        confidence: 0 to 1; findings are listed in falling order.
        advice: What to switch on or to set, in one clause.
        remedy: The same as an overlay for `--config`; empty where there is none.
    """

    cause: str
    since: int
    evidence: str
    confidence: float
    advice: str
    remedy: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Returns the finding as one line of text."""
        name = self.cause.replace("_", " ")
        return f"{name} since step {self.since} ({self.confidence:.0%}): {self.evidence}. {self.advice}."


class Case:
    """A run as rules see it: its figures up to now, and its configuration.

    Args:
        history: Its figures.
        config: Its configuration as plain values, as config.yaml holds it; empty if it is not known.
    """

    def __init__(self, history: History, config: Mapping[str, Any]) -> None:
        self.history, self.config = history, config
        self.step = history.last_step
        self._cache: dict[str, Series] = {}

    def series(self, name: str) -> Series:
        """Returns a figure over steps."""
        if name not in self._cache:
            found = self.history.series(name)
            if name == "train/lr" and len(changed := self.history.series(SETTINGS_CHANGED)):
                found = found.since(changed.steps[-1])  # the configuration says nothing of rates before
            self._cache[name] = found
        return self._cache[name]

    def last(self, name: str) -> float:
        """Returns a figure as it was logged last; NaN if it never was."""
        found = self.series(name)
        return float(found.values[-1]) if len(found) else float("nan")

    def at(self, name: str, step: int, otherwise: float = float("nan")) -> float:
        """Returns a figure as it was logged first from a step on."""
        values = self.series(name).since(step).values
        return float(values[0]) if len(values) else otherwise

    def worst(self, name: str, limit: float, above: bool = True) -> tuple[int, float] | None:
        """Returns since when a figure is beyond a limit, and the one furthest beyond it; None: never."""
        series = self.series(name)
        bad = series.values > limit if above else series.values < limit
        if not bad.any():
            return None
        return series.first_step(bad), float(series.values[bad].max() if above else series.values[bad].min())

    def together(self, *names: str) -> tuple[np.ndarray, ...]:
        """Returns the steps in which all of some figures were logged, (n,), and the values of each there, (n,)."""
        found = [self.series(name) for name in names]
        steps = reduce(np.intersect1d, [each.steps for each in found])
        return (steps, *(each.values[np.isin(each.steps, steps)] for each in found))

    def groups(self, name: str) -> dict[str, Series]:
        """Returns the series of a figure by group, such as "block.0" of "gradient_norm/block.0"."""
        start = f"{name}/"
        return {each.removeprefix(start): self.series(each) for each in self.history.names(start)}

    def blocks(self, start: str, end: str = "") -> list[Series]:
        """Returns the series of "<start>/block.<i><end>", in the order of the blocks."""
        found: list[Series] = []
        while len(series := self.series(f"{start}/block.{len(found)}{end}")):
            found.append(series)
        return found

    def option(self, path: str, default: Any = None) -> Any:
        """Returns a value of the configuration, such as "model.optimizer.lr", past `init_args`."""
        value: Any = self.config
        for key in path.split("."):
            if (
                isinstance(value, Mapping)
                and key not in value
                and isinstance(value.get("init_args"), Mapping)
            ):
                value = value["init_args"]
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return default if value is None else value

    def number(self, path: str, default: float) -> float:
        """Returns a number of the configuration."""
        value = self.option(path)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    def class_path(self, path: str) -> str:
        """Returns the class that the configuration has at a place, as it is written there."""
        value = self.option(path)
        return str((value.get("class_path") if isinstance(value, Mapping) else value) or "")

    def class_of(self, path: str) -> str:
        """Returns the name of the class that the configuration has at a place, without its module."""
        return self.class_path(path).rpartition(".")[2]

    def callbacks(self) -> list[Mapping[str, Any]]:
        """Returns the configured callbacks, each with `class_path` and `init_args`."""
        found = self.option("trainer.callbacks", [])
        items = found if isinstance(found, list) else [found]
        return [item if isinstance(item, Mapping) else {"class_path": item} for item in items]

    @property
    def max_steps(self) -> float:
        """The steps of the run; infinite if they are not known."""
        steps = self.number("trainer.max_steps", -1)
        return steps if steps > 0 else float("inf")

    @property
    def rate_settings(self) -> str:
        """What the learning rate of a step follows from, to be compared."""
        return json.dumps([self.option(path) for path in RATE_SETTINGS], sort_keys=True, default=str)

    @property
    def has_weights(self) -> bool:
        """Whether the run goes on from weights that were trained before."""
        trained = self.option("model.weights") or self.option("ckpt_path")
        return bool(trained) or self.class_of("model.network") == "Pretrained"

    @property
    def is_causal(self) -> bool:
        """Whether the objective predicts the next token, as its class or its gradient says."""
        if self.last("doctor/objective_supposed") > 0 and self.last("doctor/objective_rest") < 0.3:
            return True
        return self.class_of("model.objective") in ("", "CausalLM", "BalancedRouting", "MultiTokenPrediction")


Rule = Callable[[Case], Iterator[Finding]]
"""Yields what it finds. A rule reads figures and configuration, and nothing else."""


def finite(values: np.ndarray) -> np.ndarray:
    """Returns the finite ones of some values."""
    kept: np.ndarray = values[np.isfinite(values)]
    return kept
