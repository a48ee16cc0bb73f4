"""Small layers behind attention and MLP: the base at first, then what the formula says."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from core.errors import ConfigError
from plugins.adapters.bottleneck_adapter import Bottleneck, BottleneckAdapter
from plugins.networks.bert import BERT
from plugins.networks.gemma3 import Gemma3
from plugins.networks.llama import Llama
from plugins.networks.mamba2 import Mamba2
from tests.support.reference_models import lively
from tests.support.small_networks import DENSE, packed

ENCODER = {"vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32, "max_sequence_length": 64, "intermediate_size": 48}  # fmt: skip


def with_map(own, part, given, y):
    inner = F.gelu(y @ own.bottleneck_down.T + own.bottleneck_down_bias)
    return y + inner @ own.bottleneck_up.T + own.bottleneck_up_bias


@pytest.mark.parametrize(("network_class", "arguments"), [(Llama, DENSE), (BERT, ENCODER)])
@pytest.mark.parametrize("places", ["both", "mlp"])
def test_outputs_of_the_parts_pass_the_layers(network_class, arguments, places):
    network = lively(network_class(**arguments)).double()
    before = network(packed())
    BottleneckAdapter(6, places).change_network(network)
    network.double()
    assert torch.equal(network(packed()), before)
    changed = [part for part in network.modules() if isinstance(part, Bottleneck)]
    assert len(changed) == (4 if places == "both" else 2)
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == len(changed) * (2 * 6 * 32 + 6 + 32)
    generator = torch.Generator().manual_seed(0)
    for parameter in trained.values():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    found = network(packed())

    plain = lively(network_class(**arguments)).double()
    for block, own in zip(plain.blocks, network.blocks, strict=True):
        for name in ("attention", "mlp") if places == "both" else ("mlp",):
            getattr(block, name).register_forward_hook(partial(with_map, getattr(own, name)))
    assert torch.allclose(found, plain(packed()), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found, before, atol=0.1)
    found.square().sum().backward()
    assert all(p.grad.any() for p in trained.values())


def test_a_cache_changes_nothing():
    network = lively(Llama(**DENSE)).double()
    BottleneckAdapter(6).change_network(network)
    lively(network)
    ids = packed()["input_ids"][:, :20]
    with torch.no_grad():
        cache = network.new_cache(2, 20)
        found = torch.cat([network({"input_ids": part}, cache) for part in ids.split((9, 1, 10), 1)], 1)
        assert torch.allclose(found, network({"input_ids": ids}), rtol=1e-6, atol=1e-6)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="size is 0"):
        BottleneckAdapter(0)
    with pytest.raises(ConfigError, match="places=both or places=mlp"):
        BottleneckAdapter(places="attention")
    mamba = Mamba2(vocab_size=61, n_layer=2, n_embd=32, head_dim=8, state_size=4)
    with pytest.raises(ConfigError, match="has a block without attention"):
        BottleneckAdapter().change_network(mamba)
    capped = Gemma3(**DENSE, head_dim=8, sliding_window=4, global_every=2, final_soft_cap=30.0)
    with pytest.raises(ConfigError, match="or returns logits"):
        BottleneckAdapter().change_network(capped)
