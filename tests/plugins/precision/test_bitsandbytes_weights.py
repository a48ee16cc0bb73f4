"""BitsandbytesWeights against float32 layers with the restored weights: values, gradients, what trains, checkpoints."""

import bitsandbytes as bnb
import pytest
import torch
from torch.nn import functional as F

from conformance.runs import run
from conformance.workshop import text, workshop
from core.errors import ConfigError
from plugins.precision.bitsandbytes_weights import BitsandbytesWeights
from tests.support.tiny_training import fit, module, tiny_gpt, uneven_batches

KINDS = ("nf4", "fp4", "int8")
ERROR = {"nf4": 0.12, "fp4": 0.15, "int8": 0.01}
"""Relative error of a normal distribution's values, from above: QLoRA's nf4 has 0.095."""


def changed(network=None, **options):
    network = network or tiny_gpt()
    BitsandbytesWeights(**options).change_network(network)
    return network


def restored(layer):
    if isinstance(layer, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    scale = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
    return layer.weight.data.float() * scale[:, None] / 127


def frozen_layers(network):
    return {
        n: m for n, m in network.named_modules() if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_computes_with_the_restored_weight(kind, training):
    original = tiny_gpt().layers[0].mlp.up_proj
    weight = original.weight.detach().clone()
    network = changed(kind=kind)
    layer = network.layers[0].mlp.up_proj.train(training)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 5, 16, requires_grad=True)
    found = layer(x)
    expected = F.linear(x, restored(layer), layer.bias)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    torch.testing.assert_close(x.grad, gradient @ restored(layer), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.bias.grad, gradient.sum((0, 1)), rtol=1e-6, atol=1e-6)
    assert layer.weight.dtype == (torch.int8 if kind == "int8" else torch.uint8)
    assert weight.shape == restored(layer).shape


@pytest.mark.parametrize("used", [False, True])
def test_all_that_an_int8_layer_keeps_moves_with_its_network(used):
    """torch sets the data of the parameter, and bitsandbytes' attributes stayed behind: on a GPU nothing could be computed."""
    network = changed(kind="int8").eval()
    layer, x = network.layers[0].mlp.up_proj, torch.randn(2, 16)
    if used:
        layer(x)
    expected = F.linear(x, restored(layer), layer.bias)
    network._apply(lambda tensor: tensor.clone())  # as `to` does from device to device
    holder = layer.state if used else layer.weight
    assert holder.CB.data_ptr() == layer.weight.data_ptr()
    assert holder.SCB.dtype == torch.float32
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("used", [False, True])
def test_a_network_computes_on_a_gpu_what_it_did_on_the_cpu(kind, used):
    network = changed(kind=kind).eval()
    layer, x = network.layers[0].mlp.up_proj, torch.randn(2, 16)
    expected = F.linear(x, restored(layer), layer.bias)
    if used:
        layer(x)
    found = network.cuda().layers[0].mlp.up_proj(x.cuda())
    assert found.is_cuda
    # of int8, a GPU rounds the activations as well, to one in 127 of the largest
    bound = float(expected.abs().max()) * (2 / 127 if kind == "int8" else 1e-5)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_quantising_loses_as_much_as_it_must(kind):
    network = tiny_gpt(n_embd=64)
    weight = network.layers[0].mlp.up_proj.weight.detach().clone()
    layer = changed(network, kind=kind).layers[0].mlp.up_proj
    error = float((restored(layer) - weight).norm() / weight.norm())
    assert ERROR[kind] / 4 < error < ERROR[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_quantised_trains_and_the_rest_does_not(kind, tmp_path, capsys):
    trained = module()
    fit(tmp_path, trained, uneven_batches(1), plugins=[BitsandbytesWeights(kind)], max_epochs=1)
    start = {name: value.clone() for name, value in trained.network.state_dict().items()}
    trained2 = module()
    fit(tmp_path, trained2, uneven_batches(4), plugins=[BitsandbytesWeights(kind)], max_epochs=1)
    moved = {n for n, value in trained2.network.state_dict().items() if not torch.equal(value, start[n])}
    learning = {name for name, p in trained2.network.named_parameters() if p.requires_grad}
    assert moved == learning
    assert {"embed_tokens.weight", "layers.0.mlp_norm.weight", "layers.1.mlp.up_proj.bias"} <= learning
    assert {p.dtype for p in trained2.network.parameters() if p.requires_grad} == {torch.float32}
    assert len(frozen_layers(trained2.network)) == 12
    printed = capsys.readouterr().out
    assert f"12 linear layers are frozen in {kind} (6,144 weights); " in printed
    assert (
        f"{sum(p.numel() for p in trained2.parameters() if p.requires_grad):,} parameters train." in printed
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_is_loaded_into_a_network_of_other_weights(kind):
    batch = {"input_ids": torch.arange(12).view(2, 6)}
    torch.manual_seed(1)
    saved = changed(kind=kind)
    torch.manual_seed(2)
    other = changed(kind=kind)
    with torch.no_grad():
        other(batch)  # a layer that has been used loads like a fresh one
        assert not torch.equal(other(batch), saved(batch))
        other.load_state_dict({name: value.clone() for name, value in saved.state_dict().items()})
        assert torch.equal(other(batch), saved(batch))
    assert other.state_dict().keys() == saved.state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("compute_dtype", "expected"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)]
)
def test_products_are_in_the_compute_dtype(kind, compute_dtype, expected):
    plugin = BitsandbytesWeights(kind, compute_dtype=compute_dtype)
    network = tiny_gpt()
    plugin.change_network(network)
    with plugin.forward_context():
        assert network.layers[0].mlp.up_proj(torch.zeros(1, 16)).dtype == expected


def test_layers_are_chosen_by_pattern():
    assert list(frozen_layers(changed(layers=["*.up_proj"]))) == [
        "layers.0.mlp.up_proj",
        "layers.1.mlp.up_proj",
    ]


def test_a_network_without_values_is_refused_when_it_is_used():
    with torch.device("meta"):
        network = changed(kind="nf4")
    network.to_empty(device="cpu")
    with pytest.raises(ConfigError, match="were on the meta device"):
        network.layers[0].mlp.up_proj(torch.zeros(1, 16))


def test_strategies_that_begin_without_values_are_refused_before_a_process_starts():
    words = [
        "check",
        "--config=quickstart",
        "--config=techniques/bitsandbytes_weights",
        "--trainer.devices=2",
    ]
    done = run([*words, "--trainer.strategy=FSDP"], workshop())
    assert done.code == 2
    assert "BitsandbytesWeights" in done.stderr
    assert "weights are quantised before they are sharded, which needs DDP or one device" in done.stderr


@pytest.mark.ci
def test_text_is_generated_from_quantised_weights(tmp_path):
    """`generate` builds the network as it was trained; the whole way through the command line."""
    words = ["--config=quickstart", "--config=techniques/bitsandbytes_weights", f"--data.source={text()}"]
    words += [f"--data.cache_dir={tmp_path / 'data'}", f"--trainer.default_root_dir={tmp_path / 'run'}"]
    words += ["--trainer.max_steps=3", "--model.lr_scheduler.warmup_steps=1", "--trainer.limit_val_batches=1"]
    done = run(["fit", *words, "--callbacks.-TextSamples", "--model.network.n_embd=32"], tmp_path)
    assert done.code == 0, done.error_text
    assert "28 linear layers are frozen in nf4" in done.stdout
    done = run(["generate", f"--ckpt_path={tmp_path / 'run'}", "--prompt=a", "--max_new_tokens=4"], tmp_path)
    assert done.code == 0, done.error_text
    assert done.stdout.startswith("a")
