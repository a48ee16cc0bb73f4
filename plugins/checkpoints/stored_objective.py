"""Rebuilds the objective of a checkpoint, such as a classifier or a reward model, with the network that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.contracts import ChangesNetwork, Network, Objective
from core.errors import ConfigError
from plugins.checkpoints.matching import stored_data
from plugins.checkpoints.stored_network import build, described, network_in, read
from toolkit.class_labels import give_labels

PREFIX = "objective."


@dataclass(frozen=True)
class StoredObjective:
    """A network and an objective as they were trained, in eval mode on the CPU.

    Attributes:
        network: With the checkpoint's weights.
        objective: With the checkpoint's parameters.
        tokenizer_json: The tokenizer, for `tokenizers.Tokenizer.from_str`.
        end_of_text_id: What ends a text; None: nothing does.
        config: The configuration of the run, `model`, `data` and `trainer` among its keys.
        data: What the checkpoint keeps of the data module.
    """

    network: Network
    objective: Objective
    tokenizer_json: str
    end_of_text_id: int | None
    config: Mapping[str, Any]
    data: Mapping[str, Any]


def load_objective(path: Path) -> StoredObjective:
    """Returns network and objective of a checkpoint, a file or a folder.

    Raises:
        ConfigError: If it holds no configuration or no tokenizer, or weights of another objective.
    """
    checkpoint = read(path)
    config, tokenizer, end = described(checkpoint, path)
    network, _, _ = network_in(checkpoint, path)
    objective: Objective = build(Objective, config["model"]["objective"], ("model", "objective"))
    data = stored_data(path)
    if names := data.get("label_names"):
        give_labels(objective, names)
    for part in list(objective.modules()):
        if isinstance(part, ChangesNetwork):
            part.change_network(network)
    weights = {
        name.removeprefix(PREFIX): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith(PREFIX)
    }
    try:
        objective.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: the weights of {type(objective).__name__} are not those that its configuration names, or are damaged."
        ) from error
    network.requires_grad_(False)
    objective.requires_grad_(False)
    return StoredObjective(network, objective.eval(), tokenizer, end, config, data)
