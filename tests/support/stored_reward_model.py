"""The checkpoint of a small reward model as a run writes it, without a run."""

from pathlib import Path

import torch
import yaml

from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.networks.gpt import GPT
from plugins.objectives.reward_model import RewardModel
from tests.support.stored_networks import content_of, lively_network

SIZES = {"vocab_size": 320, "max_sequence_length": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}


def store_reward_model(path, data):
    """Writes the checkpoint; returns its path.

    Args:
        path: Where to.
        data: Arguments of its PreferenceDataModule.
    """
    network, objective = lively_network(GPT, SIZES), RewardModel()
    objective.change_network(network)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    content = content_of(network, SIZES, tokenizer=Path(data["tokenizer"]["init_args"]["path"]).read_text())
    content["state_dict"] |= {f"objective.{name}": value for name, value in objective.state_dict().items()}
    config = yaml.safe_load(content["leyden"]["config"])
    config["model"]["objective"] = {"class_path": "plugins.objectives.reward_model.RewardModel"}
    config["data"] = {
        "class_path": "datamodules.preference_datamodule.PreferenceDataModule",
        "init_args": data,
    }
    content["leyden"]["config"] = yaml.safe_dump(config)
    plugin = AtomicCheckpoint()
    plugin.save_checkpoint(content, path)
    plugin.teardown()
    return path
