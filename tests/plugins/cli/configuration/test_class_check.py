"""Nothing that a configuration names is called unless it is a class of the kind that belongs in its place."""

import sys
from collections.abc import Callable

import pytest
import torch
import yaml

from core.__main__ import main
from core.errors import ConfigError
from plugins.checkpoints import checkpoint, stored_network
from plugins.networks.gpt import GPT
from tests.conftest import TINY


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Calls the command line in this process, in a folder with `tiny.yaml`; returns (code, stderr)."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")

    def run(*arguments):
        return main(list(arguments)), capfd.readouterr().err

    return run


TOUCH = {"command": "touch pwned"}
WRONG = {
    "a function": ({"model": {"network": {"class_path": "os.system", "init_args": TOUCH}}}, "os.system"),
    "a class of another kind": (
        {"model": {"network": {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "pwned"]}}}},
        "subprocess.Popen is not used",
    ),
    "an optimizer": ({"model": {"optimizer": {"class_path": "os.system", "init_args": {}}}}, "os.system"),
    "an optimizer as text": ({"model": {"optimizer": "os.system"}}, "os.system"),
    "a schedule": ({"model": {"lr_scheduler": {"class_path": "os.system", "init_args": {}}}}, "os.system"),
    "a reader as text": (
        {"data": {"class_path": "PretrainDataModule", "init_args": {
            "source": "touch pwned", "reader": "os.system", "tokenizer": "BPETokenizer", "writer": "TokenShards",
            "packing": "Concatenate"}}},
        "os.system",
    ),
    "a callback": ({"trainer": {"callbacks": [{"class_path": "os.system", "init_args": TOUCH}]}}, "os.system"),
    "a profiler": ({"trainer": {"profiler": {"class_path": "os.system", "init_args": TOUCH}}}, "os.system"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("command", ["fit", "check", "validate"])
def test_what_is_no_class_of_its_place_is_refused_and_not_called(name, command, call, tmp_path):
    values, said = WRONG[name]
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(values))
    code, err = call(command, "--config=tiny.yaml", "--config=wrong.yaml")
    assert code == 2
    assert said in err
    assert "wrong.yaml:" in err
    assert len(err.splitlines()) <= 10
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["fit", "validate", "generate"])
def test_a_checkpoint_from_a_stranger_runs_nothing(command, call, tmp_path):
    assert call("fit", "--config=tiny.yaml", "--trainer.max_steps=4")[0] == 0
    [path] = (tmp_path / "runs").rglob("step-00000004.ckpt")
    content = torch.load(path, weights_only=True)
    config = yaml.safe_load(content[checkpoint.RECORD]["config"])
    config["model"]["network"] = {"class_path": "os.system", "init_args": TOUCH}
    content[checkpoint.RECORD]["config"] = yaml.safe_dump(config)
    torch.save(content, tmp_path / "evil.ckpt")
    words = ["--prompt=x"] if command == "generate" else ["--trainer.max_steps=6"]
    code, err = call(command, "--ckpt_path=evil.ckpt", *words)
    assert code == 2, err
    assert not (tmp_path / "pwned").exists()


class Lazy(GPT):
    """Takes something to call among its arguments."""

    def __init__(self, activation: Callable[[], torch.nn.Module] = torch.nn.GELU) -> None:
        super().__init__(vocab_size=8, max_sequence_length=8, n_layer=1, n_head=1, n_embd=8)
        self.activation = activation()


def test_a_checkpoints_network_takes_only_classes_that_belong_among_its_arguments(tmp_path):
    config = {"class_path": f"{__name__}.Lazy", "init_args": {"activation": "torch.nn.ReLU"}}
    assert isinstance(stored_network.build_network(config).activation, torch.nn.ReLU)
    config["init_args"]["activation"] = "os.getcwd"
    with pytest.raises(ConfigError, match=r"model\.network\.init_args\.activation.*\n?.*os\.getcwd"):
        stored_network.build_network(config)
    config["init_args"] = {"activaton": "torch.nn.ReLU"}
    with pytest.raises(ConfigError, match="Option 'activaton' is not accepted") as error:
        stored_network.build_network(config)
    assert len(str(error.value).splitlines()) <= 9
