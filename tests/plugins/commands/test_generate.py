"""`generate` on checkpoints that are not whole: exit code 2 and a few lines."""

import copy
import shutil

import pytest
import torch
import yaml

from conformance.runs import run
from core.__main__ import main
from tests.conftest import TINY


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which a tiny network has been trained on text; its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"hello world number {number}. " * 20)
    config = copy.deepcopy(TINY)
    stages = {"reader": "TextDocuments", "writer": "TokenShards", "packing": "Concatenate"}
    tokenizer = {"class_path": "BPETokenizer", "init_args": {"vocab_size": 300}}
    sizes = {"sequence_length": 16, "batch_size": 2}
    paths = {"source": str(texts), "cache_dir": str(folder / "cache")}
    config["data"] = {
        "class_path": "PretrainDataModule",
        "init_args": {**stages, "tokenizer": tokenizer, **sizes, **paths},
    }
    config["model"]["network"]["init_args"]["vocab_size"] = 512
    config["trainer"] |= {"max_steps": 4, "default_root_dir": str(folder / "run")}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    done = run(["fit", f"--config={folder / 'config.yaml'}"], folder)
    assert done.code == 0, done.error_text
    return max((folder / "run" / "checkpoints").glob("*.ckpt"))


def generate(capsys, path, *words):
    code = main(["generate", "--ckpt_path", str(path), "--prompt", "hello", "--max_new_tokens", "2", *words])
    return code, capsys.readouterr().err


def part(content, key):
    return next(value for value in content.values() if isinstance(value, dict) and key in value)


def other_network(**arguments):
    def change(content):
        record = part(content, "config")
        config = yaml.safe_load(record["config"])
        config["model"]["network"]["init_args"] |= arguments
        record["config"] = yaml.safe_dump(config)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda content: part(content, "tokenizer").update(tokenizer='{"model"'),
            "tokenizer is damaged: EOF",
        ),
        (lambda content: part(content, "tokenizer").update(tokenizer=""), "tokenizer"),
        (lambda content: part(content, "tokenizer").update(end_of_text_id="x"), "end"),
        (lambda content: part(content, "tokenizer").update(end_of_text_id=512), "512"),
        (lambda content: part(content, "tokenizer").update(end_of_text_id=-1), "-1"),
        (other_network(n_layer=2), "Missing key(s) in state_dict"),
        (other_network(n_embd=32), "size mismatch"),
        (other_network(n_head=3), "n_head"),
        (lambda content: content.update(state_dict={}), ""),
        (lambda content: content.update(state_dict=None), ""),
    ],
)
def test_a_checkpoint_that_is_not_whole(change, said, trained, tmp_path, capsys):
    path = shutil.copy(trained, tmp_path / "changed.ckpt")
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    code, error = generate(capsys, path)
    assert code == 2, error
    assert said in error
    assert "changed.ckpt" in error
    assert len(error.splitlines()) <= 10
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "gpu"], "--device gpu cannot be used"),
        (["--device", "meta"], "--device meta cannot be used"),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used"),
        (["--seed", "9" * 30], "--seed is out of range"),
        (["--top_k", "0"], "top_k"),
        (["--temperature", "nan"], "temperature"),
    ],
)
def test_options_that_cannot_be(words, said, trained, capsys):
    code, error = generate(capsys, trained, *words)
    assert code == 2, error
    assert said in error


@pytest.mark.parametrize("words", [[], ["--top_k", "9" * 30], ["--temperature", "1e-300"], ["--seed", "-1"]])
def test_options_that_may_be(words, trained, capsys):
    code, error = generate(capsys, trained, *words)
    assert code == 0, error
