"""Checkpoints of adapted networks as a run writes them, beside their base, without a run."""

import torch
import yaml

from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.networks.llama import Llama
from tests.support.stored_networks import MLP, content_of, lively_network, store


def adapted(network, adapter, seed=1, std=0.2):
    """Changes a network, and moves what is trained away from where it begins; returns it in eval mode."""
    adapter.change_network(network)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=std)
    return network.eval()


def store_base(folder, network_class=Llama, arguments=MLP):
    return store(lively_network(network_class, arguments), arguments, folder / "base.ckpt")


def store_adapted(
    folder,
    adapter,
    base,
    name="adapted.ckpt",
    plugins=(),
    network_class=Llama,
    arguments=MLP,
    seed=1,
    std=0.2,
    **init_args,
):
    """Writes what a run with an adapter writes; returns its path and the network with the adapter in it.

    Args:
        folder: Where.
        adapter: Its class.
        base: The checkpoint that the run started from.
        plugins: Precisions that change the network before, and their configuration.
        std: How far what is trained is from where it begins, as a standard deviation.
        init_args: Arguments of the adapter.
    """
    network, made = lively_network(network_class, arguments), adapter(**init_args)
    made.base_is_elsewhere = True
    for plugin, _ in plugins:
        plugin.change_network(network)
    adapted(network, made, seed, std)
    content = content_of(network, arguments)
    config = yaml.safe_load(content["leyden"]["config"])
    class_path = f"{adapter.__module__}.{adapter.__name__}"
    config["trainer"] = {
        "callbacks": [{"class_path": class_path, "init_args": init_args}],
        "plugins": [config for _, config in plugins],
    }
    config["model"]["weights"] = str(base)
    config["model"]["network"]["class_path"] = f"{network_class.__module__}.{network_class.__name__}"
    content["leyden"]["config"] = yaml.safe_dump(config)
    content["callbacks"] = {made.state_key: made.state_dict()}
    AtomicCheckpoint().save_checkpoint(content, folder / name)
    return folder / name, network


def logits(network, ids):
    with torch.no_grad():
        return network.logits(network({"input_ids": ids}))
