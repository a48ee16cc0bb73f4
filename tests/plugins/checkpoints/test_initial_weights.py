"""`--model.weights`: weights alone, of every form; a larger vocabulary; a longer context; refusals; resuming."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer

from core.errors import ConfigError
from plugins.checkpoints.initial_weights import InitialWeights
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from tests.support.cli_runs import RUN, checkpoint, core, finished, state, trained  # noqa: F401
from tests.support.reference_models import tokens
from tests.support.stored_networks import (
    LINEAR,
    MLP,
    PLAIN,
    ROTARY,
    SMALL,
    lively_network,
    store,
    tokenizer_json,
)

STILL = ("--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.0", "--model.lr_scheduler=null")
TINY_LLAMA = {**MLP, "vocab_size": 64, "max_sequence_length": 16}


@pytest.fixture
def llama(tmp_path, core):  # noqa: F811
    """A Llama as a.ckpt, as the folder hf, and the config `tiny` of a run with that network."""
    network = lively_network(Llama, TINY_LLAMA)
    store(network, TINY_LLAMA, tmp_path / "a.ckpt", data=False)
    assert core("export", "--ckpt_path=a.ckpt", "--output=hf").code == 0
    values = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    values["model"]["network"] = {"class_path": "Llama", "init_args": TINY_LLAMA}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    return network


def weights(step):
    return {k.removeprefix("network."): v for k, v in state(checkpoint(step))["state_dict"].items()}


@pytest.mark.parametrize("form", ["file", "sharded", "folder", "safetensors", "own names"])
def test_a_run_starts_from_every_form(form, llama, core, tmp_path):  # noqa: F811
    own = llama.state_dict()
    path = {"file": "a.ckpt", "folder": "hf", "safetensors": "hf/model.safetensors"}.get(form, form)
    if form == "sharded":
        store(llama, TINY_LLAMA, tmp_path / path, sharded=True, data=False)
    if form == "own names":
        path = "own.safetensors"
        save_file(own, tmp_path / path)
    done = core("fit", "--config=tiny", f"--model.weights={path}", "--trainer.max_steps=2", *STILL)
    assert done.code == 0, done.err
    assert done.err.count(f"tensors from {path}") == 1
    found = weights(2)
    assert all(torch.equal(found[name], own[name]) for name in own)
    config = yaml.safe_load((checkpoint(2).parent.parent / "config.yaml").read_text())
    assert config["model"]["weights"] == path


@pytest.mark.parametrize("form", ["a.ckpt", "sharded", "hf", "a.gguf", "hf/model.safetensors"])
def test_another_tokenizer_is_refused_with_the_numbers(form, llama, core, tmp_path):  # noqa: F811
    """Equal ones, further tokens on either side, and weights without a tokenizer are silent."""
    store(llama, TINY_LLAMA, tmp_path / "a.ckpt", sharded=form == "sharded")
    shutil.rmtree(tmp_path / "hf")
    assert core("export", "--ckpt_path=a.ckpt", "--output=hf").code == 0
    assert core("export", "--ckpt_path=a.ckpt", "--format=gguf", "--output=a.gguf").code == 0
    start = InitialWeights(str(tmp_path / (form if form != "sharded" else "a.ckpt")))

    def begin(text):
        start.change_network(Llama(**TINY_LLAMA), SimpleNamespace(datamodule=Data(text)))

    begin(tokenizer_json())
    begin(with_tokens(tokenizer_json(), 3))
    swapped = tokenizer_json().replace('"a":1,', '"a":2,').replace('"b":2,', '"b":1,')
    assert swapped != tokenizer_json()
    if form.endswith(".safetensors"):
        begin(swapped)
        return
    with pytest.raises(ConfigError) as caught:
        begin(with_tokens(swapped, 3))
    text = str(caught.value)
    assert "of 58 token ids here and 55 there, 2 mean another token (1: 'b', there 'a')" in text
    assert "--data.tokenizer=PretrainedTokenizer" in text
    assert len(text.splitlines()) == 2


class Data:
    def __init__(self, text):
        self.tokenizer_json = text


def with_tokens(text, count):
    """Returns a tokenizer.json with further tokens."""
    found = Tokenizer.from_str(text)
    found.add_tokens([f"new-token-{number}" for number in range(count)])
    return found.to_str()


def test_a_model_that_was_stored_without_its_head_is_read(tmp_path):
    """Its names lack the first word, and then some are names of ours."""
    for config, network in (
        (transformers.LlamaConfig, Llama(**TINY_LLAMA)),
        (transformers.GPT2Config, GPT(**{key: TINY_LLAMA[key] for key in PLAIN})),
    ):
        form = network.hugging_face
        values = form.config(
            type(network),
            TINY_LLAMA if isinstance(network, Llama) else {key: TINY_LLAMA[key] for key in PLAIN},
        )
        model = transformers.AutoModelForCausalLM.from_config(
            config(**{**values, "bos_token_id": None, "eos_token_id": None})
        )
        model.base_model.save_pretrained(tmp_path / form.model_type)
        InitialWeights(str(tmp_path / form.model_type / "model.safetensors")).change_network(network.eval())
        ids = tokens(length=12)
        with torch.no_grad():
            torch.testing.assert_close(
                network.logits(network({"input_ids": ids})), model.eval()(ids).logits, atol=1e-5, rtol=0
            )


def test_validate_takes_them_too(llama, core):  # noqa: F811
    one, other = (
        core("validate", "--config=tiny", *words).out
        for words in (["--model.weights=hf"], ["--ckpt_path=a.ckpt"])
    )
    pick = [next(line for line in text.splitlines() if "val/loss" in line) for text in (one, other)]
    assert pick[0] == pick[1]


def test_a_resumed_run_does_not_read_them_again(llama, core, tmp_path):  # noqa: F811
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    whole = core("fit", "--config=tiny", "--model.weights=hf")
    assert whole.code == 0, whole.err
    expected = state(checkpoint(6))["state_dict"]
    checkpoint(6).unlink()
    shutil.rmtree(tmp_path / "hf")
    done = core("fit", "--config=tiny", "--model.weights=hf", "--ckpt_path=last")
    assert done.code == 0, done.err
    assert "tensors from" not in done.err
    found = state(checkpoint(6))["state_dict"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    kept = state(checkpoint(6))[
        "hugging_face"
    ]  # what came with the weights goes on; the tokenizer is that of the data
    assert {"chat_template.jinja", "generation_config.json"} <= kept.keys()
    assert "tokenizer.json" not in kept
    assert core("export", f"--ckpt_path={checkpoint(6)}", "--output=out").code == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages[0].content }}!"
    again = core("fit", "--config=tiny", f"--model.weights={checkpoint(6)}", "--trainer.max_steps=1")
    assert again.code == 0, again.err
    assert state(checkpoint(1, RUN.with_name("tiny-2")))["hugging_face"] == kept


def test_a_checkpoint_without_an_optimizer_says_how_to_start_from_it(llama, core):  # noqa: F811
    assert core("import", "hf", "--output=b.ckpt").code == 0
    done = core("fit", "--config=tiny", "--ckpt_path=b.ckpt")
    assert done.code == 2
    assert "--model.weights=PATH" in done.err
    assert core("fit", "--config=tiny", "--model.weights=b.ckpt").code == 0


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_of_the_old(tied, tmp_path, capsys):
    arguments = {**MLP, "tie_embeddings": tied}
    old = lively_network(Llama, arguments)
    store(old, arguments, tmp_path / "a.ckpt")
    new = Llama(**arguments | {"vocab_size": 70})
    InitialWeights(str(tmp_path / "a.ckpt")).change_network(new)
    names = ["embed_tokens.weight"] if tied else ["embed_tokens.weight", "lm_head.weight"]
    for name, weight in new.state_dict().items():
        before = old.state_dict()[name]
        assert torch.equal(weight[: len(before)], before)
        assert (len(weight) > len(before)) == (name in names)
        if name in names:
            assert torch.allclose(weight[61:], before.mean(dim=0).expand(9, -1), atol=1e-7)
    assert f"new rows in {', '.join(names)} are the mean of the old ones" in capsys.readouterr().err


def test_the_context_grows_by_an_option_of_the_network(tmp_path):
    """With positions 4 times as dense, every fourth position is one of the shorter context."""
    old = lively_network(Llama, MLP)
    store(old, MLP, tmp_path / "a.ckpt")
    new = Llama(**MLP | {"max_sequence_length": 256, "rope_scaling": LINEAR}).eval()
    InitialWeights(str(tmp_path / "a.ckpt")).change_network(new)
    ids = tokens(length=50)
    every_fourth = {"input_ids": ids, "position_ids": 4 * torch.arange(50).expand(2, -1)}
    with torch.no_grad():
        assert torch.allclose(new(every_fourth), old({"input_ids": ids}), atol=1e-4)
        new({"input_ids": tokens(length=256)})


def test_a_gpt_with_the_options_of_llama_takes_its_weights(llama, tmp_path):
    network = GPT(
        **SMALL
        | ROTARY
        | {"vocab_size": 64, "max_sequence_length": 16, "intermediate_size": 96, "rope_theta": 500000.0}
    )
    InitialWeights(str(tmp_path / "hf")).change_network(network.eval())
    ids = tokens(length=16)
    with torch.no_grad():
        assert torch.allclose(network({"input_ids": ids}), llama({"input_ids": ids}), atol=1e-4)


REFUSED = {
    "another width": ({"n_embd": 64}, "embed_tokens.weight is (64, 32) there and (64, 64) in the network"),
    "more layers": ({"n_layer": 4}, "has no"),
    "fewer layers": ({"n_layer": 2}, "for which the network has no place"),
    "fewer rows": ({"vocab_size": 50}, "Set vocab_size to 64 or more"),
    "a head of its own": ({"tie_embeddings": False}, "has no lm_head.weight"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("form", ["a.ckpt", "hf"])
def test_weights_of_another_network_are_refused_before_the_run_begins(form, what, llama, core, tmp_path):  # noqa: F811
    changes, words = REFUSED[what]
    options = [f"--model.network.init_args.{key}={value}" for key, value in changes.items()]
    done = core("fit", "--config=tiny", f"--model.weights={form}", "--data.init_args.vocab_size=40", *options)
    assert done.code == 2
    if form == "a.ckpt" and what == "fewer layers":
        words = "which the network has not"
    assert words in done.err
    assert len(done.err.splitlines()) <= 4
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("b.ckpt", "Did you mean a.ckpt?"),
        ("s3://bucket/weights.safetensors", "Download them"),
        ("tiny.yaml", "tiny.yaml"),
        ("gemma", "Gemma3ForCausalLM"),
    ],
)
def test_what_is_no_weights_is_refused(path, words, llama, core, tmp_path):  # noqa: F811
    if path == "gemma":
        shutil.copytree(tmp_path / "hf", tmp_path / "gemma")
        config = (tmp_path / "gemma" / "config.json").read_text()
        (tmp_path / "gemma" / "config.json").write_text(config.replace("LlamaFor", "Gemma3For"))
    done = core("fit", "--config=tiny", f"--model.weights={path}")
    assert done.code == 2
    assert words in done.err
