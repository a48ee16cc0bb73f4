"""IA3: beside peft, merged, in files of peft."""

import pytest
import torch

from core.errors import ConfigError
from plugins.adapters.ia3 import IA3
from plugins.adapters.lora import LoRA
from plugins.commands.export import export
from plugins.networks.llama import Llama
from tests.support.adapted_checkpoints import adapted, logits, store_adapted, store_base
from tests.support.reference_models import both, tokens
from tests.support.stored_networks import MLP, lively_network


def test_peft_reads_what_export_writes_and_computes_the_same(tmp_path):
    from peft import PeftModel

    path, _ = store_adapted(tmp_path, IA3, store_base(tmp_path))
    out = tmp_path / "peft"
    assert export(["--ckpt_path", str(path), "--format", "peft", "--output", str(out)]) == 0
    network, reference = both(Llama, MLP)
    ids = tokens()
    before = logits(network, ids)
    IA3(weights=str(out)).change_network(network)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(reference, out).eval()(ids).logits
    torch.testing.assert_close(logits(network, ids), expected, rtol=2e-5, atol=2e-5)
    assert (before - expected).abs().max() > 0.1


def test_what_peft_wrote_is_read(tmp_path):
    from peft import IA3Config, get_peft_model

    network, reference = both(Llama, MLP)
    config = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    theirs = get_peft_model(reference, config)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data.uniform_(0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    IA3(weights=str(tmp_path)).change_network(network)
    ids = tokens()
    with torch.no_grad():
        expected = theirs.eval()(ids).logits
    torch.testing.assert_close(logits(network, ids), expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(ConfigError, match="here LORA is read"):
        LoRA(weights=str(tmp_path)).change_network(both(Llama, MLP)[0])


def test_merged_weights_and_biases_compute_the_same():
    network, adapter, ids = lively_network(Llama, MLP | {"bias": True}).double(), IA3(), tokens()
    expected = logits(adapted(network, adapter), ids)
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) == MLP["n_layer"] * (16 + 16 + 96)
    assert adapter.merge(network)
    torch.testing.assert_close(logits(network, ids), expected, rtol=1e-10, atol=1e-10)


def test_training_starts_from_the_base_bitwise():
    network, ids = lively_network(Llama, MLP), tokens()
    before = logits(network, ids)
    IA3().change_network(network)
    assert torch.equal(logits(network, ids), before)


@pytest.mark.parametrize(
    ("init_args", "message"),
    [
        ({"layers": ["*.key"]}, "no linear layer of Llama is named"),
        ({"input_layers": ["*.k_proj"]}, "is in layers and in input_layers"),
    ],
)
def test_mistakes_are_named(init_args, message):
    with pytest.raises(ConfigError, match=message):
        IA3(**init_args).change_network(lively_network(Llama, MLP))
