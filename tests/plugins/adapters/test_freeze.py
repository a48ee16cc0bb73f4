"""What Freeze trains."""

import pytest
import torch

from core.errors import ConfigError
from plugins.adapters.freeze import Freeze
from plugins.networks.llama import Llama
from plugins.precision.bitsandbytes_weights import BitsandbytesWeights
from tests.support.stored_networks import MLP, lively_network


def trained(network):
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_last_blocks_and_what_matches_are_trained(device):
    with torch.device(device):
        network = Llama(**MLP)
    everything = {name for name, _ in network.named_parameters()}
    Freeze(last_blocks=1, train=["norm.*", "*.attention_norm.weight"]).change_network(network)
    assert trained(network) == {
        name
        for name in everything
        if name.startswith("layers.2.") or name == "norm.weight" or name.endswith(".attention_norm.weight")
    }


@pytest.mark.parametrize(
    ("init_args", "message"),
    [
        ({}, "no trainable parameter"),
        ({"last_blocks": -1}, "no trainable parameter"),
        ({"last_blocks": 4}, "the network has 3 blocks"),
        ({"train": ["nrm.weight"]}, "no parameter of Llama is named 'nrm.weight'"),
    ],
)
def test_mistakes_are_named(init_args, message):
    with pytest.raises(ConfigError, match=message):
        Freeze(**init_args).change_network(lively_network(Llama, MLP))


def test_quantised_weights_are_not_trained():
    network = lively_network(Llama, MLP)
    BitsandbytesWeights("nf4").change_network(network)
    with pytest.raises(ConfigError, match="quantised and cannot be trained"):
        Freeze(train=["*.q_proj.weight"]).change_network(network)
