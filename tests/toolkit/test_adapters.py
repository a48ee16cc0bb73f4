"""What adapters share: what checkpoints leave out, the record of the base, several adapters at once."""

import pytest
import torch

from core.errors import ConfigError
from plugins.adapters.freeze import Freeze
from plugins.adapters.ia3 import IA3
from plugins.adapters.lora import LoRA
from plugins.networks.llama import Llama
from plugins.precision.bitsandbytes_weights import BitsandbytesWeights
from tests.support.stored_networks import MLP, lively_network
from toolkit.adapters import Adapter


class Nothing(Adapter):
    """Trains nothing."""

    def adapt(self, network):
        """Adds nothing."""


def adapter_beside_its_base(kind=LoRA, **init_args):
    made = kind(**init_args)
    made.base_is_elsewhere = True
    return made


def adapted(made, network=None):
    network = lively_network(Llama, MLP) if network is None else network
    made.change_network(network)
    return network


def saved(network):
    """What a checkpoint holds beside a base, from a module around the network as in a run."""
    return torch.nn.ModuleDict({"network": network}).state_dict()


def test_checkpoints_hold_what_is_trained_and_nothing_else():
    network = adapted(adapter_beside_its_base(rank=2))
    trained = {f"network.{name}" for name, p in network.named_parameters() if p.requires_grad}
    assert saved(network).keys() == trained
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B"}


def test_without_a_base_elsewhere_they_hold_everything():
    network = adapted(LoRA(rank=2))
    assert saved(network).keys() == {f"network.{name}" for name, _ in network.named_parameters()}


@pytest.mark.parametrize("kind", [None, "nf4", "int8"])
def test_they_are_loaded_over_the_base_and_a_missing_weight_is_refused(kind):
    networks = [lively_network(Llama, MLP) for _ in range(2)]
    for network in networks:
        if kind:
            BitsandbytesWeights(kind).change_network(network)
        adapted(adapter_beside_its_base(rank=2), network)
    one, other = networks
    for parameter in one.parameters():
        if parameter.requires_grad:
            parameter.data.uniform_(-1, 1)
    state = saved(one)
    torch.nn.ModuleDict({"network": other}).load_state_dict(state)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    state.pop("network.layers.1.mlp.up_proj.lora_B")
    with pytest.raises(RuntimeError, match=r"Missing key.*layers.1.mlp.up_proj.lora_B"):
        torch.nn.ModuleDict({"network": other}).load_state_dict(state)


def test_several_adapters_train_side_by_side():
    network = adapted(adapter_beside_its_base(LoRA, rank=2, layers=["*.q_proj"]))
    adapted(adapter_beside_its_base(IA3), network)
    adapted(adapter_beside_its_base(Freeze, train=["norm.*"]), network)
    leaves = {name.rpartition(".")[2] for name in saved(network)}
    assert leaves == {"lora_A", "lora_B", "ia3_l", "weight"}
    assert [name for name in saved(network) if name.endswith("weight")] == ["network.norm.weight"]


def checkpoint_of(made):
    return {"callbacks": {made.state_key: made.state_dict()}}


def test_another_base_is_refused_and_the_same_in_two_bytes_is_not():
    made = adapter_beside_its_base(rank=2)
    adapted(made)
    checkpoint = checkpoint_of(made)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        same = LoRA(rank=2)
        adapted(same, lively_network(Llama, MLP).to(dtype))
        same.check_base(checkpoint)
    trained_a_little = lively_network(Llama, MLP)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained_a_little.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)
    other = LoRA(rank=2)
    adapted(other, trained_a_little)
    with pytest.raises(
        ConfigError, match=r"another base: .* values that were compared differ[\s\S]*Set model.weights"
    ):
        other.check_base(checkpoint)
    wider = LoRA(rank=2)
    adapted(wider, lively_network(Llama, MLP | {"intermediate_size": 64}))
    with pytest.raises(ConfigError, match="other names or shapes"):
        wider.check_base(checkpoint)


@pytest.mark.parametrize("damage", [{"samples": None}, {"samples": torch.zeros(3)}, {"names": 1}, "text"])
def test_a_damaged_record_is_refused(damage):
    made = adapter_beside_its_base(rank=2)
    adapted(made)
    checkpoint = checkpoint_of(made)
    base = checkpoint["callbacks"][made.state_key]["base"]
    checkpoint["callbacks"][made.state_key]["base"] = (
        {**base, **damage} if isinstance(damage, dict) else damage
    )
    with pytest.raises(ConfigError, match="another base"):
        made.check_base(checkpoint)


def test_the_record_is_small():
    made = adapter_beside_its_base(rank=2)
    network = adapted(made)
    count = sum(not name.endswith(("lora_A", "lora_B")) for name, _ in network.named_parameters())
    assert made.state_dict()["base"]["samples"].shape == (16 * count,)


def test_a_network_on_the_meta_device_has_no_record():
    with torch.device("meta"):
        network = Llama(**MLP)
    made = adapter_beside_its_base(rank=2)
    adapted(made, network)
    assert made.state_dict() == {}


def test_no_trainable_parameter_is_refused():
    with pytest.raises(ConfigError, match="Nothing leaves no trainable parameter in Llama"):
        adapted(Nothing())
