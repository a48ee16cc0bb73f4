"""`export` and `import`: the same logits in transformers, the same bits back, and nothing half-written."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import filesystem
from transformers import AutoModelForCausalLM, AutoTokenizer

from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.checkpoints.matching import open_own
from plugins.checkpoints.stored_network import load_network
from plugins.commands import drift
from plugins.networks.dots1 import Dots1
from plugins.networks.gemma3 import Gemma3
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.mixtral import Mixtral
from tests.conftest import HOUSE
from tests.support.cli_runs import core  # noqa: F401
from tests.support.full_disk import file_size_limit
from tests.support.reference_models import tokens
from tests.support.stored_networks import (
    FAMILIES,
    MLP,
    PLAIN,
    SMALL,
    edit_json,
    lively_network,
    store,
    tokenizer_json,
)
from toolkit.safetensors_files import LazyTensor

BITWISE = (
    "Llama",
    "Llama-scaled",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "OLMo2",
    "Gemma3",
    "Gemma3-capped",
    "Mixtral",
)


EXPERTS = {**MLP, "n_experts": 4, "experts_per_token": 2}
CASES = FAMILIES | {
    "Mixtral": (Mixtral, EXPERTS),
    "Dots1": (Dots1, {**EXPERTS, "expert_size": 24, "dense_layers": 1}),
}


def apart(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same_and_the_weights_come_back(name, core, tmp_path):  # noqa: F811
    network_class, arguments = CASES[name]
    network = lively_network(network_class, arguments)
    store(network, arguments, tmp_path / "a.ckpt")
    done = core("export", "--ckpt_path=a.ckpt", "--output=hf", "--shard_gb=0.00003")
    assert done.code == 0, done.err
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()

    model, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(notes.values()), notes
    ids = tokens(vocab_size=55)
    with torch.no_grad():
        ours, theirs = network.logits(network({"input_ids": ids})), model(ids).logits
    assert apart(ours, theirs) <= (0.0 if name in BITWISE else 1e-5)

    done = core("import", "hf", "--output=b.ckpt")
    assert done.code == 0, done.err
    found = {key: value.read() for key, value in open_own(tmp_path / "b.ckpt").items()}
    own = network.state_dict()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[key], own[key]) for key in own)
    again, text, end = load_network(tmp_path / "b.ckpt")
    assert end == 0
    assert json.loads(text)["model"] == json.loads(tokenizer_json())["model"]
    with torch.no_grad():
        assert apart(again.logits(again({"input_ids": ids})), ours) <= (0.0 if name in BITWISE else 1e-6)

    assert core("export", "--ckpt_path=b.ckpt", "--output=hf2", "--shard_gb=0.00003").code == 0
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert sorted(path.name for path in (tmp_path / "hf2").iterdir()) == files
    for file in files:
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "hf2" / file).read_bytes(), file


@pytest.fixture
def llama(tmp_path, core):  # noqa: F811
    """A checkpoint of a Llama, a.ckpt, exported to the folder hf."""
    network = lively_network(Llama, MLP)
    store(network, MLP, tmp_path / "a.ckpt")
    assert core("export", "--ckpt_path=a.ckpt", "--output=hf").code == 0
    return network


def test_the_exported_tokenizer_gives_the_same_ids_and_generation_ends(llama, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    from tokenizers import Tokenizer

    text = "Some words and  More"
    assert tokenizer(text)["input_ids"] == Tokenizer.from_str(tokenizer_json()).encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "<|end|>"
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (0, None, None)


def test_a_sharded_checkpoint_is_exported_as_the_file_is(llama, core, tmp_path):  # noqa: F811
    store(llama, MLP, tmp_path / "sharded.ckpt", sharded=True)
    assert core("export", "--ckpt_path=sharded.ckpt", "--output=hf2").code == 0
    for path in (tmp_path / "hf").iterdir():
        assert path.read_bytes() == (tmp_path / "hf2" / path.name).read_bytes()


def test_for_torch(llama, core, tmp_path):  # noqa: F811
    assert core("export", "--ckpt_path=a.ckpt", "--format=torch", "--output=out").code == 0
    found = torch.load(tmp_path / "out" / "weights.pt", weights_only=True)
    own = llama.state_dict()
    assert list(found) == list(own)
    assert all(torch.equal(found[name], own[name]) for name in own)
    described = yaml.safe_load((tmp_path / "out" / "network.yaml").read_text())
    assert described["init_args"] == MLP
    assert (tmp_path / "out" / "tokenizer.json").read_text() == tokenizer_json()


def test_other_types_stay_and_what_came_with_the_weights_comes_back(llama, core, tmp_path):  # noqa: F811
    weights = tmp_path / "hf" / "model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(weights).items()}, weights, {"format": "pt"})
    edit_json(tmp_path / "hf" / "generation_config.json", bos_token_id=5, temperature=0.5)
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    assert core("import", "hf", "--output=b.ckpt").code == 0
    assert core("export", "--ckpt_path=b.ckpt", "--output=hf2").code == 0
    assert (tmp_path / "hf2" / "model.safetensors").stat().st_size == weights.stat().st_size
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf2")
    assert model.dtype == torch.bfloat16
    assert model.config.bos_token_id == 5
    for name in ("chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "hf2" / name).read_bytes()


def test_transformers_own_files_are_read(core, tmp_path):  # noqa: F811
    """As `save_pretrained` writes them; of GPT-2 also the model without its head, whose names have no prefix."""
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "whole")
    model.transformer.save_pretrained(tmp_path / "base")
    edit_json(tmp_path / "base" / "config.json", architectures=["GPT2LMHeadModel"])
    ids = tokens(vocab_size=55)
    for folder in ("whole", "base"):
        done = core("import", folder, f"--output={folder}.ckpt")
        assert done.code == 0, done.err
        assert "holds no tokenizer" in done.out
        network = GPT(**yaml.safe_load(read_checkpoint(tmp_path / f"{folder}.ckpt")["leyden"]["config"])["model"]["network"]["init_args"]).eval()  # fmt: skip
        own = {name: value.read() for name, value in open_own(tmp_path / f"{folder}.ckpt").items()}
        network.load_state_dict(own)
        with torch.no_grad():
            assert apart(network.logits(network({"input_ids": ids})), model(ids).logits) < 1e-5


@pytest.mark.parametrize(
    ("network_class", "arguments", "words"),
    [
        (GPT, {**PLAIN, "position": "sinusoidal"}, ["position='sinusoidal'"]),
        (GPT, {**PLAIN, "norm_position": "post"}, ["norm_position='post'"]),
        (GPT, {**SMALL}, ["n_kv_head=2", "position='learned'"]),
        (Gemma3, {**MLP, "attention_soft_cap": 5.0}, ["attention_soft_cap"]),
    ],
    ids=["sinusoidal", "post", "grouped", "cap"],
)
def test_what_has_no_form_is_refused_with_its_option(network_class, arguments, words, core, tmp_path):  # noqa: F811
    store(lively_network(network_class, arguments), arguments, tmp_path / "a.ckpt")
    done = core("export", "--ckpt_path=a.ckpt", "--output=hf")
    assert done.code == 2
    assert all(word in done.err for word in words), done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "tiny.yaml"]


def test_check_compares_and_names_the_first_block_that_drifts(llama, core, tmp_path):  # noqa: F811
    done = core("import", "hf", "--output=b.ckpt", "--check")
    assert "The logits are those of transformers: bitwise." in done.out
    done = core("export", "--ckpt_path=b.ckpt", "--output=hf2", "--check")
    assert "bitwise" in done.out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3] *= 1.1
    with pytest.raises(drift.ConfigError, match="block 1 is the first to differ"):
        drift.compare(llama, model)


# -- bad input ---------------------------------------------------------------------------------------------------


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def huge_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def integers(folder):
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(32, dtype=torch.int64)}, path)


def without(name):
    def change(folder):
        path = folder / "model.safetensors"
        save_file({key: value for key, value in load_file(path).items() if key != name}, path)

    return change


def added(folder):
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.mlp.extra.weight": torch.ones(3)}, path)


def index(**places):
    def change(folder):
        names = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        text = json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors") | places})
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def linked(folder):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


BAD = {
    "cut": (cut, "damaged or no safetensors file"),
    "huge header": (huge_header, "damaged or no safetensors file"),
    "integers": (integers, "is of type I64"),
    "missing tensor": (without("model.layers.1.mlp.up_proj.weight"), "has no model.layers.1.mlp.up_proj.weight"),
    "left over": (added, "model.layers.0.mlp.extra.weight, for which the network has no place"),
    "missing shard": (index(**{"model.norm.weight": "b.safetensors"}), "b.safetensors cannot be read"),
    "not in its shard": (index(**{"model.other": "a.safetensors"}), "has no model.other"),
    "out of the folder": (index(**{"model.norm.weight": "../x.safetensors"}), "no path inside the folder"),
    "absolute": (index(**{"model.norm.weight": "/etc/passwd"}), "no path inside the folder"),
    "no table": (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": [1]}'), "no table"),
    "link": (linked, "symbolic link leads out"),
    "pickles": (pickled, "may run code"),
    "unknown": (config(architectures=["LlamaForCausalLN"]), "Did you mean LlamaForCausalLM?"),
    "no architecture": (config(architectures=None), "no network for None"),
    "no sizes": (config(hidden_size=None), "has no hidden_size"),
    "odd size": (config(hidden_size="many"), "no size or of a wrong type"),
    "many layers": (config(architectures=["Qwen3ForCausalLM"], num_hidden_layers=10**9), "is 1,000,000,000, for"),
    "many experts": (config(architectures=["MixtralForCausalLM"], num_local_experts=10**9), "is 1,000,000,000, for"),
    "many positions": (config(max_position_embeddings=10**13), "for 10,000,000,000,000 positions"),
    "generation config": (lambda f: (f / "generation_config.json").write_text("[]"), "it is no JSON object"),
    "another size": (config(hidden_size=64), "config.json makes it"),
    "activation": (config(hidden_act="relu"), "hidden_act is 'relu'"),
    "no JSON": (lambda f: (f / "config.json").write_bytes(b"\xff{"), "cannot be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot be read as a tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_folders_are_refused_in_a_line_or_two(what, llama, core, tmp_path):  # noqa: F811
    change, words = BAD[what]
    change(tmp_path / "hf")
    before = sorted(tmp_path.rglob("*"))
    done = core("import", "hf", "--output=b.ckpt")
    assert done.code == 2, done.out
    assert words in done.err
    assert len(done.err.splitlines()) <= 3
    assert sorted(tmp_path.rglob("*")) == before


WRITES = {
    "import": ["import", "hf", "--output=new/b.ckpt"],
    "hf": ["export", "--ckpt_path=a.ckpt", "--output=new/hf2"],
    "torch": ["export", "--ckpt_path=a.ckpt", "--output=new/pt", "--format=torch"],
    "gguf": ["export", "--ckpt_path=a.ckpt", "--output=new/a.gguf", "--format=gguf"],
}


@pytest.mark.parametrize("words", WRITES.values(), ids=WRITES)
def test_a_full_disk_leaves_nothing(words, llama, core, tmp_path):  # noqa: F811
    before = sorted(tmp_path.rglob("*"))
    with file_size_limit(20_000):
        done = core(*words)
    assert done.code == 2
    name = words[-1 if words[-1].startswith("--output") else -2].removeprefix("--output=")
    assert re.search(rf"^{name} cannot be written: (File too large|no space|No space)", done.err)
    assert len(done.err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


INTERRUPTIONS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "error": 1, "out of memory": 1}


@pytest.mark.parametrize("how", INTERRUPTIONS)
@pytest.mark.parametrize("words", WRITES.values(), ids=WRITES)
def test_what_is_interrupted_leaves_nothing(words, how, llama, core, tmp_path, monkeypatch):  # noqa: F811
    before, handlers, initialise = sorted(tmp_path.rglob("*")), signals(), LazyTensor.__init__
    counted, seen = iter(range(100)), []

    def interrupted(read):
        if next(counted) == 9:
            seen.extend(path for path in tmp_path.rglob("*") if path not in before)
            if how.startswith("SIG"):
                os.kill(os.getpid(), signal.Signals[how])
            else:
                raise MemoryError() if how == "out of memory" else ValueError("a tensor")
        return read()

    def initialised(self, shape, dtype, read, *more):
        initialise(self, shape, dtype, lambda: interrupted(read), *more)

    monkeypatch.setattr(LazyTensor, "__init__", initialised)
    done = core(*words)
    assert done.code == INTERRUPTIONS[how], done.err
    assert len(seen) > 1  # something was written
    assert sorted(tmp_path.rglob("*")) == before
    assert signals() == handlers


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)], ids=["SIGINT", "SIGTERM"])
def test_a_signal_is_no_fault_of_the_checkpoint_that_is_read(error, llama, core, monkeypatch):  # noqa: F811
    assert core("import", "hf", "--output=b.ckpt").code == 0

    def interrupted(self, *args):
        raise error

    monkeypatch.setattr(filesystem.FileSystemReader, "read_data", interrupted)
    done = core("export", "--ckpt_path=b.ckpt", "--output=hf2")
    assert done.code == (143 if isinstance(error, SystemExit) else 130)
    assert "cannot be read" not in done.err


def signals():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("words", WRITES.values(), ids=WRITES)
def test_whether_it_can_be_written_is_known_before_anything_is_read(words, core, tmp_path):  # noqa: F811
    (tmp_path / "new").touch()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    done = core(*words)
    assert done.code == 2
    assert "cannot be written: Not a directory" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--type=bf16"], "--type is of GGUF files"),
        (["--type=q4_k", "--format=torch"], "--type is of GGUF files"),
        (["--shard_gb=1", "--format=torch"], "--shard_gb is of safetensors files"),
        (["--shard_gb=nan"], "--shard_gb is nan; it must be a number above 0"),
        (["--shard_gb=inf"], "--shard_gb is inf; it must be a number above 0"),
        (["--template=a.jinja", "--format=torch"], "--template is written to a Hugging Face folder"),
        (["--check", "--format=torch"], "--check compares with transformers"),
        (["--format=gguf"], "a name that ends in .gguf and --format gguf belong together"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(words, said, core, tmp_path):  # noqa: F811
    done = core("export", "--ckpt_path=nowhere.ckpt", "--output=out", *words)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1


def test_what_is_there_is_not_replaced(llama, core, tmp_path):  # noqa: F811
    for words in (["import", "hf", "--output=a.ckpt"], ["export", "--ckpt_path=a.ckpt", "--output=hf"]):
        done = core(*words)
        assert done.code == 2
        assert "exists already" in done.err


def test_an_import_is_the_same_on_a_machine_with_a_gpu(llama, core, tmp_path, monkeypatch):  # noqa: F811
    """torch's writer copies tensors to the CPU ahead of writing there; here the CPU stands in for the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_get_available_device_type", lambda: "cpu")
    monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda stream: None, raising=False)
    done = core("import", "hf", "--output=b.ckpt")
    assert done.code == 0, done.err
    before, back = (open_own(tmp_path / name) for name in ("a.ckpt", "b.ckpt"))
    for name, tensor in before.items():
        assert torch.equal(tensor.read(), back[name].read()), name


# -- memory ------------------------------------------------------------------------------------------------------

MEASURE = """
import json, re, sys, threading
from core.__main__ import main
import plugins.checkpoints.finding, plugins.checkpoints.hf_folder, plugins.networks.llama, safetensors, lightning
import torch, torch.distributed.checkpoint, torch._subclasses.fake_tensor, plugins.checkpoints.shard_writing, gguf
held = lambda: int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
most, done = held(), threading.Event()
begin = most
def watch():
    global most
    while not done.wait(0.001):
        most = max(most, held())
thread = threading.Thread(target=watch); thread.start()
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
    print(words, most - begin)
done.set(); thread.join()
print("MIB", most - begin)
"""
"""Runs commands one after the other: what one does not give back counts for the next."""

LARGE = {**MLP, "n_layer": 12, "n_embd": 1024, "intermediate_size": 2048, "vocab_size": 16384}


@pytest.mark.parametrize(
    "sharded",
    [
        pytest.param(False, id="file", marks=pytest.mark.ci),
        pytest.param(True, id="sharded", marks=pytest.mark.slow),
    ],
)
def test_memory_is_that_of_a_few_tensors_not_of_the_model(sharded, tmp_path):
    """Of 0.5 GB in tensors of up to 64 MiB; without the pages of files, which the system takes back."""
    torch.set_default_dtype(torch.float32)
    network = Llama(**LARGE)
    size = sum(weight.nbytes for weight in network.parameters()) / 2**20
    assert size > 450
    store(network, LARGE, tmp_path / "a.ckpt", sharded=sharded, data=False)
    del network

    commands = [
        ["export", f"--ckpt_path={tmp_path}/a.ckpt", f"--output={tmp_path}/hf", "--shard_gb=0.2"],
        ["export", f"--ckpt_path={tmp_path}/a.ckpt", f"--output={tmp_path}/pt", "--format=torch"],
        ["import", f"{tmp_path}/hf", f"--output={tmp_path}/b.ckpt"],
        ["export", f"--ckpt_path={tmp_path}/a.ckpt", "--format=gguf", f"--output={tmp_path}/a.gguf"],
        ["import", f"{tmp_path}/a.gguf", f"--output={tmp_path}/c.ckpt"],
    ]
    command = [sys.executable, "-c", MEASURE, json.dumps(commands)]
    done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"MIB ([\d.]+)", done.stdout)[1]) < 3 * 64 + 60, done.stdout
