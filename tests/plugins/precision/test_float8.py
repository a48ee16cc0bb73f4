"""Float8 against a plain rounding to fp8: which layers, which recipe, the same parameters and names."""

import pytest
import torch
from torch.nn import functional as F
from torchao.float8.float8_linear import Float8Linear

from callbacks.compile import Compile, found_breaks
from core.errors import ConfigError
from plugins.precision.float8 import Float8
from tests.support.tiny_training import fit, module, tiny_gpt, uneven_batches

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
E4M3_MAX = 448.0


def changed(network=None, **options):
    network = network or tiny_gpt()
    Float8(**options).change_network(network)
    return network


def fp8_layers(network):
    return {name for name, layer in network.named_modules() if isinstance(layer, Float8Linear)}


def test_layers_of_the_blocks_are_changed_and_the_head_is_not():
    network = changed(tiny_gpt(tie_embeddings=False))
    names = (
        "attention.q_proj",
        "attention.k_proj",
        "attention.v_proj",
        "attention.o_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    assert fp8_layers(network) == {f"layers.{i}.{name}" for i in range(2) for name in names}


@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_compile_to_one_graph(recipe):
    from torch._dynamo import graph_break_reasons

    torch.compiler.reset()
    network, compiler, before = changed(recipe=recipe), Compile(backend="eager"), len(graph_break_reasons)
    compiler.change_network(network)
    with torch.autocast("cpu", torch.bfloat16):
        network({"input_ids": torch.arange(12).view(2, 6)}).sum().backward()
    assert (len(compiler._graphs), list(found_breaks(before))) == (1, [])


def test_layers_are_chosen_by_pattern():
    network = changed(tiny_gpt(tie_embeddings=False), layers=["layers.1.mlp.*", "lm_head"])
    assert fp8_layers(network) == {"layers.1.mlp.up_proj", "layers.1.mlp.down_proj", "lm_head"}


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"no linear layer of GPT is named 'layers.0.mlp.up'. Did you mean layers.0.mlp.up_proj",
    ):
        changed(layers=["layers.0.mlp.up"])


def test_parameters_keep_their_names_and_are_the_same_objects():
    network = tiny_gpt()
    before = dict(network.named_parameters())
    changed(network)
    after = dict(network.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert list(tiny_gpt().state_dict()) == list(network.state_dict())


def rounded(x, scales):
    """x in e4m3, scaled so that the largest of each scale's values is the largest of fp8."""
    return (x * scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() / scales


def power_of_two_scale(x, dim):
    return torch.exp2(torch.floor(torch.log2(E4M3_MAX / x.abs().amax(dim, keepdim=True))))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_product_is_that_of_the_rounded_factors(recipe, inference):
    """To what bfloat16 rounds in the result: 2^-8 of the largest."""
    layer = changed(recipe=recipe).layers[0].mlp.up_proj
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    weight, bias = layer.weight.detach(), layer.bias.detach()
    if recipe == "tensorwise":
        factors = rounded(x, E4M3_MAX / x.abs().max()), rounded(weight, E4M3_MAX / weight.abs().max())
    else:
        factors = rounded(x, power_of_two_scale(x, 1)), rounded(weight, power_of_two_scale(weight, 1))
    expected = F.linear(*factors, bias)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(inference):
        found = layer(x).detach().float()
    torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-8 * float(expected.abs().max()))
    assert (found - F.linear(x, weight, bias)).abs().max() > 2.0**-7 * expected.abs().max()  # it does round


@pytest.mark.parametrize("inference", [False, True])
def test_outside_of_autocast_it_is_a_linear_layer(inference):
    layer, x = changed().layers[0].mlp.up_proj, torch.randn(3, 16)
    with torch.inference_mode(inference):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_computes_in_bf16_outside_and_keeps_float32_weights(recipe, tmp_path):
    trained = module()
    runner = fit(tmp_path, trained, uneven_batches(3), plugins=[Float8(recipe=recipe)], max_epochs=1)
    layer = trained.network.layers[0].mlp.up_proj
    assert isinstance(layer, Float8Linear)
    assert layer.config.emulate
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    assert runner.precision == "bf16-mixed"
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.zeros(2, 16)).dtype == torch.bfloat16


def test_sizes_that_the_hardware_cannot_multiply_are_named():
    with pytest.raises(
        ConfigError, match=r"layers.0.attention.q_proj is 24 x 24, and fp8 products need multiples of 16"
    ):
        changed(tiny_gpt(n_embd=24), emulate=False)
