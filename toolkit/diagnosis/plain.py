"""The parts of a run as its configuration describes them, of leyden's own classes alone: what the run is compared with."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from core import catalog
from core.contracts import ChangesNetwork, Objective, PackedBatches, Schedule
from core.errors import ConfigError
from core.technique import declaration_of
from core.training.parameter_groups import parameter_groups
from toolkit.diagnosis.case import Case
from toolkit.diagnosis.parts import OURS, inner, is_known, known_class, taken_by

KEEPING = ("ConvergenceMonitor", "ExponentialMovingAverage", "OOMGuard", "PeriodicCheckpoint")
"""Callbacks of leyden that act, and change neither batches, network, gradients nor updates."""


ACTING = ("GradientAccumulationScheduler", "StochasticWeightAveraging", "WeightAveraging")
"""Callbacks of Lightning that change them."""


class PlainParts:
    """Builds parts of a run anew.

    Of a part that is not leyden's, in its place: the class that it derives from, or the part that it wraps. What cannot be built
    is None, and is not compared.

    Args:
        case: The run's configuration.
        trainer: Its trainer.
        module: Its LanguageModule.
    """

    def __init__(self, case: Case, trainer: Any, module: Any) -> None:
        self.case, self.trainer, self.module = case, trainer, module
        others = [one for one in trainer.callbacks if type(one).__module__.startswith(OURS)]
        acts = [one for one in others if not _observes(one)]
        changed = isinstance(trainer.precision_plugin, ChangesNetwork)
        self.compares = bool(case.config) and not acts and not changed and _has_foreign(case.config)
        self._rates: list[list[float]] = []
        self._schedule: Any = None

    def network(self) -> Any:
        """Returns a new network, with initial values of its own; the run's random numbers stay as they are."""
        live = self.module.network
        found = self._build(_registered(type(live)), self.case.option("model.network"))
        if found is None:
            return None
        for part in self.module.objective.modules():
            if isinstance(part, ChangesNetwork):
                part.change_network(found)
        own, given = ({name: p.shape for name, p in one.named_parameters()} for one in (found, live))
        heads = [
            {name for name, p in one.named_parameters() if p is one.output_weight} for one in (found, live)
        ]
        if not own.items() <= given.items() or heads[0] != heads[1]:
            return None  # other weights, or a head that is tied in one of them alone
        first = next(live.parameters())
        return found.to(device=first.device, dtype=first.dtype)

    def objective(self) -> tuple[Any, bool]:
        """Returns a new objective, and whether it is only supposed: next-token prediction, where a foreign one has none of leyden's.

        That is the class that it derives from, the configured part that it wraps, or one that it has made itself.
        """
        live, value = self.module.objective, self.case.option("model.objective")
        found = self._build(_registered(type(live)), value)
        if found is None and isinstance(value, Mapping) and (wrapped := inner(value)) is not None:
            found = self._build(None, wrapped)
        if found is None:
            found = next((copy.deepcopy(one) for one in live.children() if _is_objective(one)), None)
        supposed = found is None or any(map(_is_foreign_objective, live.modules()))
        if found is None and self.module.network.output_weight is not None:
            found = self._build(None, "CausalLM")
        return None if found is None else found.to(self.module.device).train(), supposed

    def packing(self) -> Any:
        """Returns a new packing."""
        value, kind = self.case.option("data.packing"), None
        if isinstance(value, Mapping) and not is_known(str(value.get("class_path", ""))):
            kind = _registered(type(self.trainer.datamodule.packing))
            value = value if kind else inner(value)
        return self._build(kind, value) if value is not None else None

    def batches(self, split: str, **order: Any) -> PackedBatches | None:
        """Returns the batches of a split as leyden's own packing makes them."""
        data: Any = copy.copy(self.trainer.datamodule)
        # what is in the method's place, such as LossBreakdown's, asks the packing of the run
        vars(data).pop("packed", None)
        data.__class__ = known_class(type(data))
        if (packing := self.packing()) is None or not hasattr(data, "packing"):
            return None
        data.packing = packing
        found: PackedBatches = data.packed(split, **order)
        return found

    def groups(self) -> list[dict[str, Any]]:
        """Returns the groups of parameters with their settings, as configured."""
        module = self.module
        return parameter_groups(module, module.decay_embeddings, module.parameter_options)

    def optimizer(self, groups: Sequence[Mapping[str, Any]]) -> Any:
        """Returns a new optimizer over some groups."""
        kind = _registered(type(_bare(self.trainer.optimizers[0])))
        return self._build(kind, self.case.option("model.optimizer"), groups)

    def rates(self, step: int, tokens: int) -> list[float] | None:
        """Returns the learning rate of each configured group in a step; None: it is not known.

        Args:
            step: The number of steps before it.
            tokens: Of a step, of all ranks.
        """
        if self._schedule is None and not self._begin_rates():
            return None
        while len(self._rates) <= step:
            if isinstance(self._schedule, Schedule):
                self._schedule.begin_step(tokens)
            self._rates.append([group["lr"] for group in self._schedule.optimizer.param_groups])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # no optimizer steps here
                self._schedule.step()
        return self._rates[step]

    def _begin_rates(self) -> bool:
        rate, live = self.case.number("model.optimizer.lr", 0.0), self.trainer.lr_scheduler_configs
        if rate <= 0 or not live:
            return False
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": g.get("lr", rate)} for g in self.groups()]
        kind = _registered(type(live[0].scheduler))
        given = self.case.option("model.lr_scheduler")
        self._schedule = self._build(kind, given, torch.optim.SGD(groups, lr=rate))
        if isinstance(self._schedule, Schedule):
            self._schedule.bind(int(self.trainer.estimated_stepping_batches))
        return self._schedule is not None

    def _build(self, kind: Any, value: Any, *first: Any) -> Any:
        """Returns an instance of a class, or of the one that is named, with configured arguments; None: it cannot be built."""
        given = dict(value) if isinstance(value, Mapping) else {"class_path": value}
        try:
            kind = kind or catalog.find(str(given["class_path"])).load()
            taken = taken_by(kind, given.get("init_args") or {})
            arguments = {name: _plain(one) for name, one in taken.items()}
            with torch.random.fork_rng():
                return kind(*first, **arguments)
        except (ConfigError, TypeError):  # it takes what leyden's class does not, or is none
            return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping) and "class_path" in value:
        path, arguments = str(value["class_path"]), value.get("init_args") or {}
        if is_known(path):
            kind = catalog.find(path).load()
        else:
            module, _, name = path.rpartition(".")
            given = getattr(sys.modules.get(module), name, object)
            if (kind := _registered(given)) is None and (wrapped := inner(value)) is not None:
                return _plain(wrapped)
            kind = kind or catalog.find("CausalLM" if issubclass(given, Objective) else path).load()
        return kind(**{name: _plain(one) for name, one in taken_by(kind, arguments).items()})
    return value


def _is_foreign_objective(part: Any) -> bool:
    """Returns whether a part is an objective that has none of leyden's to be compared with, in it or above it."""
    foreign = isinstance(part, Objective) and not _is_objective(part)
    return foreign and not any(map(_is_objective, part.children()))


def _is_objective(part: Any) -> bool:
    """Returns whether a part is an objective of leyden's, or derives from one."""
    return isinstance(part, Objective) and bool(_registered(type(part)))


def _registered(kind: type) -> Any:
    """Returns the nearest class of leyden or torch that a class is or derives from; None: there is none."""
    for one in kind.__mro__:
        path = f"{one.__module__}.{one.__qualname__}"
        base = one.__name__ in ("Optimizer", "LRScheduler")
        if catalog.by_class_path(path) or (path.startswith("torch.optim.") and not base):
            return one
    return None


def _bare(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _observes(callback: Any) -> bool:
    declared = declaration_of(type(callback))  # none: it is no technique, such as what the command line adds
    name = type(callback).__name__
    return (
        (declared is None and name not in ACTING) or bool(declared and declared.observer) or name in KEEPING
    )


def _has_foreign(value: Any) -> bool:
    """Returns whether a configuration names a class that is not leyden's, Lightning's or torch's."""
    if isinstance(value, Mapping):
        path = value.get("class_path")
        return (isinstance(path, str) and not is_known(path)) or any(map(_has_foreign, value.values()))
    return isinstance(value, list) and any(map(_has_foreign, value))
