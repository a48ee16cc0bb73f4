"""LoRA, rsLoRA, DoRA and QLoRA: beside peft, merged, in 4 bits, in files of peft."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from core.errors import ConfigError
from plugins.adapters.lora import LoRA
from plugins.commands.export import export
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.precision.bitsandbytes_weights import BitsandbytesWeights
from tests.support.adapted_checkpoints import adapted, logits, store_adapted, store_base
from tests.support.reference_models import both, tokens
from tests.support.stored_networks import FAMILIES, MLP, PLAIN, lively_network, store

KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "some-layers": {"layers": ["*.q_proj", "*.down_proj"]},
}
ROUNDING = {"rtol": 2e-5, "atol": 2e-5}
"""Of logits around 1 to 10 in float32, behind some hundred terms in another order (6e-8 each)."""


def peft_model(reference, folder):
    from peft import PeftModel

    return PeftModel.from_pretrained(reference, folder).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_what_export_writes_and_computes_the_same(kind, tmp_path):
    network, reference = both(Llama, MLP)
    base = tmp_path / "base.ckpt"
    store(network, MLP, base)
    path, _ = store_adapted(tmp_path, LoRA, base, rank=4, alpha=8.0, **KINDS[kind])
    # the base of `store_adapted` has other weights: the adapter is read beside those of the reference
    out = tmp_path / "peft"
    assert export(["--ckpt_path", str(path), "--format", "peft", "--output", str(out)]) == 0
    ours = both(Llama, MLP)[0]
    LoRA(weights=str(out)).change_network(ours)
    ids = tokens()
    theirs = peft_model(reference, out)
    with torch.no_grad():
        expected = theirs(ids).logits
    torch.testing.assert_close(logits(ours.eval(), ids), expected, **ROUNDING)
    assert (logits(network, ids) - expected).abs().max() > 0.1  # the adapter does something


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_gradients_are_those_of_peft_and_its_files_are_read(kind, tmp_path):
    from peft import LoraConfig, get_peft_model

    network, reference = both(Llama, MLP)
    names = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, **KINDS[kind])
    theirs = get_peft_model(reference, config)
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    theirs.save_pretrained(tmp_path)
    LoRA(weights=str(tmp_path)).change_network(network)
    ids = tokens()
    theirs(ids).logits.float().logsumexp(-1).sum().backward()
    network.logits(network({"input_ids": ids})).float().logsumexp(-1).sum().backward()
    expected = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    _, keys = LoRA(weights=str(tmp_path)).peft_form(network)
    found = {key: network.get_parameter(name).grad for key, name in keys.items()}
    assert len(found) == len(expected) == (3 if kind == "dora" else 2) * 4 * MLP["n_layer"]
    for key, gradient in expected.items():
        there = found[key.removesuffix(".weight") if "magnitude" in key else key]
        torch.testing.assert_close(there, gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))
    assert not [
        n
        for n, p in network.named_parameters()
        if p.grad is not None and not n.endswith(tuple("AB")) and "magnitude" not in n
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_compute_what_the_adapter_does(kind):
    network, adapter = lively_network(Llama, MLP | {"bias": True}).double(), LoRA(rank=3, **KINDS[kind])
    names = list(network.state_dict())
    ids = tokens()
    before = logits(network, ids)
    expected = logits(adapted(network, adapter), ids)
    assert adapter.merge(network)
    assert list(network.state_dict()) == names
    torch.testing.assert_close(logits(network, ids), expected, rtol=1e-10, atol=1e-10)
    assert (before - expected).abs().max() > 0.1


def test_training_starts_from_the_base_bitwise():
    network, ids = lively_network(Llama, MLP), tokens()
    before = logits(network, ids)
    LoRA(rank=2).change_network(network)
    assert torch.equal(logits(network, ids), before)


@pytest.mark.parametrize(("use_rslora", "scaling"), [(False, 8 / 4), (True, 8 / math.sqrt(4))])
def test_the_update_is_s_b_a_x(use_rslora, scaling):
    network = lively_network(Llama, MLP)
    adapted(network, LoRA(rank=4, alpha=8.0, use_rslora=use_rslora))
    layer = network.layers[0].mlp.up_proj
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    expected = x @ layer.weight.T + scaling * x @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_dropout_falls_on_the_inputs_of_the_update_in_training_alone():
    network, ids = lively_network(Llama, MLP), tokens()
    adapted(network, LoRA(rank=4, dropout=0.5))
    assert torch.equal(logits(network, ids), logits(network, ids))
    network.train()
    assert not torch.equal(logits(network, ids), logits(network, ids))
    layer = network.layers[0].mlp.up_proj
    layer.lora_B.data.zero_()
    x = torch.randn(5, 32)
    assert torch.equal(layer(x), x @ layer.weight.T)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_qlora_trains_the_adapter_alone_over_quantised_weights(kind, use_dora):
    network, ids = lively_network(Llama, MLP), tokens()
    precision = BitsandbytesWeights(kind, compute_dtype="float32")
    precision.change_network(network)
    adapter = LoRA(rank=4, use_dora=use_dora)
    adapted(network, adapter)
    optimizer = torch.optim.AdamW(p for p in network.parameters() if p.requires_grad)
    first = None
    for _ in range(3):
        loss = network.logits(network({"input_ids": ids})).logsumexp(-1).sum()
        first = first or float(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < first
    trained = {name for name, p in network.named_parameters() if p.grad is not None}
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B"} | (
        {"lora_magnitude_vector"} if use_dora else set()
    )
    assert len(optimizer.state) == len(trained)
    # dequantised and merged: the same up to float32's rounding, and that of int8's products
    expected = logits(network, ids)
    adapter.merge(network)
    assert type(network.layers[0].mlp.up_proj) is torch.nn.Linear
    torch.testing.assert_close(logits(network, ids), expected, rtol=1e-3, atol=1e-3)


def test_blocks_compile_to_one_graph():
    network = lively_network(Llama, MLP)
    adapted(network, LoRA(rank=2, use_dora=True))
    x = torch.randn(2, 5, 32)
    layer = network.layers[0].mlp
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_other_folders_are_refused(tmp_path):
    base = store_base(tmp_path)
    path, _ = store_adapted(tmp_path, LoRA, base, rank=4)
    out = tmp_path / "peft"
    export(["--ckpt_path", str(path), "--format", "peft", "--output", str(out)])
    assert {
        value.shape[0]
        for name, value in load_file(out / "adapter_model.safetensors").items()
        if "lora_A" in name
    } == {4}
    wider = lively_network(Llama, MLP | {"n_embd": 64})
    with pytest.raises(ConfigError, match="trained on another base"):
        LoRA(weights=str(out)).change_network(wider)
    with pytest.raises(ConfigError, match="has no place"):
        LoRA(weights=str(out)).change_network(lively_network(Llama, MLP | {"n_layer": 2}))
    config = json.loads((out / "adapter_config.json").read_text())
    for change, message in {
        "peft_type": "here LORA is read",
        "bias": "only none can be read",
        "r": "both are above 0",
    }.items():
        (out / "adapter_config.json").write_text(json.dumps(config | {change: "all"}))
        with pytest.raises(ConfigError, match=message):
            LoRA(weights=str(out)).change_network(lively_network(Llama, MLP))


@pytest.mark.parametrize(
    ("init_args", "message"),
    [
        ({"rank": 0}, "rank is 0; it must be at least 1"),
        ({"alpha": 0.0}, "alpha is 0.0; it must be above 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"layers": ["*.q_prj"]}, "no linear layer of Llama is named .* It has, for example"),
        ({"weights": "/nowhere"}, "adapter_config.json cannot be read"),
        ({"weights": "hf://org/adapter"}, "weights is hf://org/adapter: adapters are read from folders"),
    ],
)
def test_mistakes_are_named(init_args, message):
    with pytest.raises(ConfigError, match=message):
        LoRA(**init_args).change_network(lively_network(Llama, MLP))


def test_a_network_with_several_forms_is_written_as_the_one_that_it_has(tmp_path):
    arguments = FAMILIES["GPT-as-Llama"][1]
    base = store_base(tmp_path, GPT, arguments)
    path, _ = store_adapted(tmp_path, LoRA, base, network_class=GPT, arguments=arguments)
    export(["--ckpt_path", str(path), "--format", "peft", "--output", str(tmp_path / "peft")])
    names = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names


def test_layers_that_transformers_has_in_one_are_merged_but_not_written_for_peft(tmp_path):
    base = store_base(tmp_path, GPT, PLAIN)
    path, _ = store_adapted(tmp_path, LoRA, base, network_class=GPT, arguments=PLAIN)
    with pytest.raises(ConfigError, match="--format hf merges"):
        export(["--ckpt_path", str(path), "--format", "peft", "--output", str(tmp_path / "peft")])
    assert export(["--ckpt_path", str(path), "--format", "hf", "--output", str(tmp_path / "hf")]) == 0
