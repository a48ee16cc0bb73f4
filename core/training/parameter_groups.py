"""Which settings of the optimizer hold for which parameters."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from core.errors import ConfigError, nearest


def parameter_groups(
    module: nn.Module, decay_embeddings: bool, options: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the trainable parameters in groups of equal settings; a shared one is listed once.

    First the decayed and the undecayed, then groups that `options` makes. The 2-dimensional weights of the
    network's blocks are marked with an attribute `hidden_matrix`, for optimizers such as Muon.

    Args:
        module: Has the parameters, and where it has one, the `network` with its blocks.
        decay_embeddings: Whether embedding weights (tied output weights too) are decayed.
        options: Pattern of parameter names (`*` matches anything) -> settings; later patterns win.

    Raises:
        ConfigError: If a pattern matches no parameter.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    _check(options, list(named))
    _mark(module)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in named.items():
        kept = parameter.ndim < 2 or (id(parameter) in embeddings and not decay_embeddings)
        settings = {"weight_decay": 0.0} if kept else {}
        for pattern, own in options.items():
            settings |= own if fnmatchcase(name, pattern) else {}
        group = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == settings), None)
        if group is None:
            groups.append(group := {"params": [], **settings})
        group["params"].append(parameter)
    return [group for group in groups if group["params"]]


def _mark(module: nn.Module) -> None:
    network = getattr(module, "network", None)
    for block in getattr(network, "blocks", ()):
        for parameter in block.parameters():
            if parameter.ndim == 2:
                parameter.hidden_matrix = True  # type: ignore[attr-defined]


def _check(options: Mapping[str, Mapping[str, Any]], names: list[str]) -> None:
    for pattern in options:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"model.parameter_options: no parameter is named {pattern!r}.{nearest(pattern, names)}\n"
                f"Names are {names[0]}, {names[-1]} and the like; * matches anything."
            )
