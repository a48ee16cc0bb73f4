"""Checkpoints of adapters are put together with their base by every command that reads one."""

import json

import pytest
import torch

from core.errors import ConfigError
from plugins.adapters.freeze import Freeze
from plugins.adapters.ia3 import IA3
from plugins.adapters.lora import LoRA
from plugins.checkpoints.initial_weights import InitialWeights
from plugins.checkpoints.stored_network import load_network, merged_network
from plugins.commands.export import export
from plugins.commands.generate import generate
from plugins.networks.llama import Llama
from plugins.precision.bitsandbytes_weights import BitsandbytesWeights
from tests.support.adapted_checkpoints import logits, store_adapted, store_base
from tests.support.reference_models import tokens
from tests.support.stored_networks import MLP, lively_network

MERGED = {"rtol": 2e-5, "atol": 2e-5}
"""Of logits around 1 to 10 in float32: a product of sums in the place of a sum of products."""
NF4 = {
    "class_path": "plugins.precision.bitsandbytes_weights.BitsandbytesWeights",
    "init_args": {"compute_dtype": "float32"},
}
KINDS = {
    "LoRA": (LoRA, {"rank": 4}),
    "DoRA": (LoRA, {"rank": 4, "use_dora": True}),
    "IA3": (IA3, {}),
    "Freeze": (Freeze, {"last_blocks": 1}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("adapted")
    store_base(made)
    return made


@pytest.fixture(scope="module", params=KINDS)
def stored(request, folder):
    kind, init_args = KINDS[request.param]
    # no larger: the attention of a network this lively would enlarge the rounding of what is merged
    return store_adapted(folder, kind, folder / "base.ckpt", f"{request.param}.ckpt", std=0.1, **init_args)


def test_it_is_loaded_merged_and_computes_the_same(stored):
    path, network = stored
    expected = logits(network, tokens())
    loaded, _, _ = load_network(path)
    assert loaded.state_dict().keys() == lively_network(Llama, MLP).state_dict().keys()
    torch.testing.assert_close(logits(loaded, tokens()), expected, **MERGED)


def test_a_base_that_has_moved_is_explained(folder, tmp_path, capsys):
    moved = tmp_path / "moved.ckpt"
    moved.write_bytes((folder / "base.ckpt").read_bytes())
    path, _ = store_adapted(folder, LoRA, moved, "beside_moved.ckpt", rank=2)
    moved.rename(tmp_path / "new.ckpt")
    with pytest.raises(
        ConfigError, match=rf"is not in {moved}\.\n.*ln -s NEW_PLACE {moved}\n.*--model.weights=NEW_PLACE"
    ):
        export(["--ckpt_path", str(path), "--output", str(tmp_path / "hf")])
    assert not (tmp_path / "hf").exists()
    moved.symlink_to(tmp_path / "new.ckpt")
    assert export(["--ckpt_path", str(path), "--output", str(tmp_path / "hf")]) == 0


def test_a_run_starts_from_the_merged_weights(stored):
    path, network = stored
    started = lively_network(Llama, MLP)
    InitialWeights(str(path)).change_network(started)
    torch.testing.assert_close(logits(started, tokens()), logits(network, tokens()), **MERGED)


def test_export_writes_the_merged_weights_that_transformers_reads(stored, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    path, network = stored
    assert export(["--ckpt_path", str(path), "--output", str(tmp_path / "hf"), "--check"]) == 0
    assert "The logits are those of transformers" in capsys.readouterr().out
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(tokens()).logits
    torch.testing.assert_close(theirs, logits(network, tokens()), **MERGED)


def test_quantised_base_is_dequantised_for_export_and_kept_for_generation(folder):
    plugins = [(BitsandbytesWeights(compute_dtype="float32"), NF4)]
    path, network = store_adapted(folder, LoRA, folder / "base.ckpt", "qlora.ckpt", plugins, rank=4)
    expected = logits(network, tokens())
    loaded, _, _ = load_network(path)
    assert loaded.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert torch.equal(logits(loaded, tokens()), expected)
    torch.testing.assert_close(logits(merged_network(path), tokens()), expected, rtol=1e-3, atol=1e-3)


def lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_generate_chooses_among_adapters_of_one_base(folder, tmp_path, capsys):
    paths = {
        name: store_adapted(
            folder, *KINDS[name][:1], folder / "base.ckpt", f"{name}-{seed}.ckpt", seed=seed, **KINDS[name][1]
        )[0]
        for name, seed in (("LoRA", 2), ("IA3", 3), ("Freeze", 4))
    }
    greedy = ["--temperature", "0", "--max_new_tokens", "8"]
    alone = {}
    for name, path in {None: folder / "base.ckpt", **paths}.items():
        assert generate(["--ckpt_path", str(path), "--prompt", "the", "--json", *greedy]) == 0
        alone[name] = lines(capsys.readouterr().out)[0]["ids"]
    assert len(set(map(tuple, alone.values()))) == 4  # they differ, or the test shows nothing
    adapters = [word for name, path in paths.items() for word in ("--adapter", f"{name}={path}")]
    base = ["--ckpt_path", str(folder / "base.ckpt"), *adapters, *greedy]
    assert generate([*base, "--prompt", "the"]) == 0
    assert {line["adapter"]: line["ids"] for line in lines(capsys.readouterr().out)} == {
        name: ids for name, ids in alone.items() if name
    }
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the", "adapter": "IA3"}\n{"prompt": "the", "adapter": "LoRA"}\n')
    assert generate([*base, "--prompts", str(prompts)]) == 0
    found = [(line["adapter"], line["ids"]) for line in lines(capsys.readouterr().out)]
    assert found == [("IA3", alone["IA3"]), ("LoRA", alone["LoRA"])]
    # an adapter's checkpoint stands for its base
    assert generate(["--ckpt_path", str(paths["IA3"]), *adapters[:2], *greedy, "--prompt", "the"]) == 0
    assert [line["ids"] for line in lines(capsys.readouterr().out)] == [alone["LoRA"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adapter", "chat"], "write NAME=PATH"),
        (["--adapter", "a=base.ckpt"], "holds a whole network"),
        (["--adapter", "a=LoRA.ckpt", "--quantize", "int8"], "--adapter and --quantize"),
    ],
)
def test_mistakes_with_adapters_are_named(words, message, folder, stored, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        generate(["--ckpt_path", "base.ckpt", "--prompt", "the", *words])


def test_an_unknown_adapter_of_a_line_is_named(folder, stored, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the", "adapter": "caht"}\n')
    words = [
        "--ckpt_path",
        str(folder / "base.ckpt"),
        "--adapter",
        f"chat={stored[0]}",
        "--prompts",
        str(prompts),
    ]
    with pytest.raises(ConfigError, match=r"there is no adapter 'caht'[\s\S]*chat"):
        generate(words)


def test_another_base_is_refused_by_every_command(folder, tmp_path):
    other = store_base(tmp_path)
    torch_file = torch.load(other, weights_only=True)
    torch_file["state_dict"]["network.norm.weight"].add_(0.5)
    torch.save(torch_file, other)
    path, _ = store_adapted(folder, LoRA, folder / "base.ckpt", "lora-of-another.ckpt", rank=2)
    moved = torch.load(path, weights_only=True)
    moved["leyden"]["config"] = moved["leyden"]["config"].replace(str(folder / "base.ckpt"), str(other))
    torch.save(moved, tmp_path / "moved.ckpt")
    for command in (generate, export):
        words = ["--prompt", "the"] if command is generate else ["--output", str(tmp_path / "out")]
        with pytest.raises(ConfigError, match="trained on another base"):
            command(["--ckpt_path", str(tmp_path / "moved.ckpt"), *words])
    with pytest.raises(ConfigError, match="trained on another base"):
        generate(["--ckpt_path", str(other), "--adapter", f"a={path}", "--prompt", "the"])


def test_a_whole_network_has_no_form_for_peft(folder, tmp_path):
    with pytest.raises(ConfigError, match="holds no adapter"):
        export(
            ["--ckpt_path", str(folder / "base.ckpt"), "--format", "peft", "--output", str(tmp_path / "p")]
        )
    path, _ = store_adapted(folder, Freeze, folder / "base.ckpt", "frozen.ckpt", last_blocks=1)
    with pytest.raises(ConfigError, match="no place for what Freeze trained"):
        export(["--ckpt_path", str(path), "--format", "peft", "--output", str(tmp_path / "p")])
