"""What every technique promises of the optional hooks that it offers: they can be called as core.contracts says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from conformance.case import Case
from conformance.proof import proof, require
from core import contracts
from toolkit.transform_counts import KeepsCounts

OFFERED_BY: dict[str, tuple[type, ...]] = {
    "strategies": (
        contracts.ClipsGradients,
        contracts.HasStepContext,
        contracts.NormsGradients,
        contracts.RunsAsForward,
        contracts.ScalesGradients,
    ),
    "precision": (contracts.ChangesNetwork,),
    "adapters": (contracts.ChangesNetwork,),
    "checkpoints": (
        contracts.ConnectsRanks,
        contracts.SavesParts,
        contracts.ReadsParts,
        contracts.WaitsForDisk,
    ),
    "loggers": (contracts.GoesBack,),
    "callbacks": (contracts.ChangesNetwork, contracts.PausesClock),
    "optimizers": (contracts.AveragesWeights, contracts.BindsToLength),
    "data": (KeepsCounts,),
    "datamodules": (contracts.CountsEpochs, contracts.SkipsBatches),
}
"""Kind -> the Protocols with methods that its techniques may offer."""
BY_ALL = (contracts.ChecksRun,)
"""Those that techniques of every kind may offer."""


@proof(runs=False)
def offers_hooks_as_described(case: Case) -> None:
    """Its optional hooks, such as `change_network(network)`, can be called as their Protocol in core.contracts says."""
    found = list(faults(case.entry.kind, case.target))
    require(not found, "\n".join(found))


def faults(kind: str, target: Any) -> Iterator[str]:
    """Yields what is wrong with the hooks that a class offers, one line each."""
    for protocol in (*BY_ALL, *OFFERED_BY.get(kind, ())):
        methods = {name: member for name, member in vars(protocol).items() if _is_hook(name, member)}
        missing = [name for name in methods if not callable(getattr(target, name, None))]
        if len(missing) == len(methods):
            continue
        if missing:
            yield f"{protocol.__name__} has the methods {', '.join(methods)}; {', '.join(missing)} is missing"
        for name in methods.keys() - set(missing):
            described, own = (inspect.signature(getattr(one, name)) for one in (protocol, target))
            try:
                own.bind(
                    *(None for each in described.parameters.values() if each.kind is not each.VAR_KEYWORD)
                )
            except TypeError as error:
                yield f"{name}{own} cannot be called as {protocol.__name__}.{name}{described}: {error}"


def _is_hook(name: str, member: Any) -> bool:
    return inspect.isroutine(member) and not name.startswith("_")
