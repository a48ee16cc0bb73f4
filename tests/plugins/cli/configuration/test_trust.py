"""A configuration imports and calls nothing that its user does not trust."""

import importlib
import json
import os
import sys

import pytest
import torch
import yaml

from core.__main__ import main
from plugins.checkpoints import checkpoint, finding
from plugins.cli.configuration import trust
from tests.conftest import TINY

PWNED = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "pwned"]}}
CANARY = "open('imported', 'w').close()\ndef touch(*_): open('pwned', 'w').close(); return 1.0\n"


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Calls the command line in this process, in a folder with `tiny.yaml`; returns (code, stderr)."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "leyden_canary.py").write_text(CANARY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    importlib.invalidate_caches()

    def run(*arguments):
        return main(list(map(str, arguments))), capfd.readouterr().err

    yield run
    for name in ("leyden_canary", "my_net", "no_net"):
        sys.modules.pop(name, None)


def refused(code, err, folder):
    assert code == 2, err
    assert len(err.splitlines()) <= 10
    assert not (folder / "pwned").exists()
    assert not (folder / "imported").exists()


LAMBDA = "torch.optim.lr_scheduler.LambdaLR"
HOSTILE = {
    "data under Any": {"data": {"class_path": "PretrainDataModule", "init_args": {
        "source": "x", "storage_options": {"x": PWNED}}}},
    "data as text": {"data": {"class_path": "PretrainDataModule", "init_args": {
        "source": "x", "storage_options": {"x": json.dumps(PWNED)}}}},
    "data deeper": {"data": {"class_path": "PretrainDataModule", "init_args": {
        "source": "x", "storage_options": {"x": {"y": [{"z": PWNED}]}}}}},
    "a function for a schedule": {"model": {"lr_scheduler": {"class_path": LAMBDA, "init_args": {
        "lr_lambda": "leyden_canary.touch"}}}},
    "a list of functions": {"model": {"lr_scheduler": {"class_path": LAMBDA, "init_args": {
        "lr_lambda": ["leyden_canary.touch"]}}}},
    "a class that is called": {"model": {"lr_scheduler": {"class_path": LAMBDA, "init_args": {"lr_lambda": PWNED}}}},
    "a hook": {"trainer": {"callbacks": [{"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {
        "on_train_start": "leyden_canary.touch"}}]}},
    "os.system as a hook": {"trainer": {"callbacks": [{"class_path": "lightning.pytorch.callbacks.LambdaCallback",
        "init_args": {"setup": "os.system"}}]}},
    "a function of torch's": {"model": {"lr_scheduler": {"class_path": LAMBDA, "init_args": {
        "lr_lambda": "torch.hub.load"}}}},
    "another's module in torch": {"model": {"lr_scheduler": {"class_path": LAMBDA, "init_args": {
        "lr_lambda": "torch.os.system"}}}},
    "a callback": {"trainer": {"callbacks": [{"class_path": "leyden_canary.X"}]}},
    "a callback as text": {"trainer": {"callbacks": ["leyden_canary.X"]}},
    "a callback as JSON": {"trainer": {"callbacks": [json.dumps({"class_path": "leyden_canary.X"})]}},
    "a strategy as text": {"trainer": {"strategy": "leyden_canary.X"}},
    "a network as text": {"model": {"network": "leyden_canary.X"}},
    "a network as JSON": {"model": {"network": json.dumps({"class_path": "leyden_canary.X"})}},
    "arguments of another kind": {"model": {"network": {"class_path": "GPT", "dict_kwargs": {"x": PWNED}}}},
    "an example that downloads": {"data": {"class_path": "lightning.pytorch.demos.mnist_datamodule.MNISTDataModule"}},
    "options of weights": {"model": {"parameter_options": {"x": {"y": PWNED}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_of_a_stranger_is_imported_or_called(name, call, tmp_path):
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(HOSTILE[name]))
    code, err = call("check", "--config=tiny.yaml", "--config=evil.yaml")
    refused(code, err, tmp_path)
    assert "leyden_canary" not in sys.modules
    assert "evil.yaml" in err


@pytest.mark.parametrize("command", ["check", "fit", "validate", "plot-schedule"])
def test_the_run_folders_name_is_a_text_and_nothing_else(command, call, tmp_path):
    """Its JSON was once put into an argument and parsed there, after the classes had been checked."""
    hostile = {
        "trainer": {"default_root_dir": json.dumps(PWNED)},
        "data": {
            "class_path": "PretrainDataModule",
            "init_args": {"source": "x", "storage_options": {"x": "${run_folder}", "y": ["a/${run_folder}"]}},
        },
    }
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(hostile))
    call(command, "--config=tiny.yaml", "--config=evil.yaml")
    assert not (tmp_path / "pwned").exists()


class Pickled:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return open, ("pwned", "w")


@pytest.mark.parametrize(
    "said", [{"weights_only": False}, {"weights_only": None}, {"weights_only": True}, {}], ids=str
)
def test_no_config_makes_lightning_unpickle(said, call, tmp_path):
    """Lightning resumes by itself from what OnExceptionCheckpoint finds, unpickled if `weights_only` is false."""
    (tmp_path / "left").mkdir()
    torch.save({"state_dict": {}, "x": Pickled()}, tmp_path / "left" / "on_exception.ckpt")
    names = {
        "plugins": "lightning.pytorch.plugins.io.TorchCheckpointIO",
        "callbacks": "lightning.pytorch.callbacks.OnExceptionCheckpoint",
    }
    trainer = {key: [{"class_path": name}] for key, name in names.items()}
    trainer["callbacks"][0]["init_args"] = {"dirpath": "left"}
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump({**said, "trainer": trainer}))
    code, err = call("fit", "--config=tiny.yaml", "--config=evil.yaml")
    refused(code, err[-2000:] if "tensors and plain values" in err else err, tmp_path)


def test_no_option_makes_lightning_unpickle(call, tmp_path):
    code, err = call("check", "--config=tiny.yaml", "--weights_only=false")
    refused(code, err, tmp_path)
    assert "--weights_only: weights_only is false" in err


def test_the_run_folder_goes_into_an_argument_as_it_is_written(call, tmp_path):
    from plugins.cli.run_commands import build

    data = {
        "class_path": f"{__name__}.Keeps",
        "init_args": {"any": "${run_folder}", "many": {"x": ["${run_folder}"]}},
    }
    (tmp_path / "own.yaml").write_text(json.dumps({"data": data, "trainer": {"default_root_dir": "1e3"}}))
    kept = build("fit", ["--config=tiny.yaml", "--config=own.yaml"]).datamodule
    assert (kept.any, kept.many) == ("1e3", {"x": ["1e3"]})


def test_the_command_line_imports_no_more_than_a_file(call, tmp_path):
    for option in (
        "--trainer.callbacks+=leyden_canary.X",
        "--model.network=leyden_canary.X",
        "--model.network.help=leyden_canary.X",
        "--trainer.strategy=leyden_canary.X",
    ):
        refused(*call("check", "--config=tiny.yaml", option), tmp_path)
    assert "leyden_canary" not in sys.modules


def test_what_is_refused_is_named_with_the_option_that_allows_it(call, tmp_path):
    (tmp_path / "evil.yaml").write_text("trainer:\n  callbacks+:\n    - class_path: leyden_canary.X\n")
    code, err = call("check", "--config=tiny.yaml", "--config=evil.yaml")
    assert code == 2
    assert "evil.yaml:3" in err
    assert "registered techniques" in err
    assert "--trust leyden_canary" in err


NET = """
from plugins.networks.gpt import GPT
class Mine(GPT):
    "Nothing new."
def flat(step): return 1.0
"""
OWN = {"model": {"network": {"class_path": "my_net.Mine"}, "lr_scheduler": {
    "class_path": LAMBDA, "init_args": {"lr_lambda": "my_net.flat"}}}}  # fmt: skip


def test_a_module_beside_the_config_is_trusted_and_another_is_when_it_is_named(call, tmp_path):
    (tmp_path / "my_net.py").write_text(NET)
    values = {**TINY, "model": {**TINY["model"], **OWN["model"]}}
    values["model"]["network"] = {**TINY["model"]["network"], "class_path": "my_net.Mine"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(values))
    code, err = call("check", "--config=own.yaml")
    assert code == 0, err
    (tmp_path / "elsewhere" / "own.yaml").write_text(yaml.safe_dump(values))
    sys.modules.pop("my_net")
    code, err = call("check", "--config=elsewhere/own.yaml")
    refused(code, err, tmp_path)
    assert "--trust my_net" in err
    assert "my_net" not in sys.modules
    code, err = call("check", "--config=elsewhere/own.yaml", "--trust", "my_net")
    assert code == 0, err


def test_trust_in_a_module_is_no_trust_in_what_it_imports(call, tmp_path):
    (tmp_path / "my_net.py").write_text(f"import os\n{NET}")
    wrong = {
        "model": {"lr_scheduler": {"class_path": LAMBDA, "init_args": {"lr_lambda": "my_net.os.system"}}}
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(wrong))
    assert call("check", "--config=tiny.yaml", "--config=own.yaml")[0] == 2
    wrong["model"]["lr_scheduler"]["init_args"]["lr_lambda"] = "my_net.system"
    (tmp_path / "my_net.py").write_text(f"from os import system\n{NET}")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(wrong))
    assert call("check", "--config=tiny.yaml", "--config=own.yaml")[0] == 2


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
LATE = {
    "aliases": BOMB,
    "deep": "[" * 100_000,
    "deep blocks": "- " * 100_000,
    "a pipe": "pipe.yaml",
    "a file": "canary.yaml",
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize(
    "place",
    [
        "any",
        "network",
        *(pytest.param(name, marks=pytest.mark.ci) for name in ("number", "callbacks", "init_args")),
    ],
)
def test_a_text_is_no_file_to_be_read_and_no_bomb(name, place, call, tmp_path):
    """jsonargparse parses texts, too, and reads the files that they name."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "canary.yaml").write_text("class_path: leyden_canary.X\n")
    text = LATE[name]
    stage = {"class_path": "PretrainDataModule", "init_args": {"source": "x", "storage_options": {"x": text}}}
    hostile = {
        "any": {"data": stage},
        "number": {"trainer": {"max_steps": text}},
        "network": {"model": {"network": text}},
        "callbacks": {"trainer": {"callbacks": [text]}},
        "init_args": {"model": {"network": {"class_path": "GPT", "init_args": text}}},
    }
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(hostile[place]))
    code, err = call("check", "--config=tiny.yaml", "--config=evil.yaml")
    refused(code, err, tmp_path)
    assert len(err) < 3_000


def test_a_function_of_torch_is_used_when_it_is_named(call, tmp_path):
    hook = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook"
    strategy = {
        "class_path": "lightning.pytorch.strategies.DDPStrategy",
        "init_args": {"ddp_comm_hook": hook},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    code, err = call("check", "--config=tiny.yaml", "--config=own.yaml")
    assert code == 2
    assert f"--trust {hook}" in err
    assert call("check", "--config=tiny.yaml", "--config=own.yaml", f"--trust={hook}")[0] == 0


@pytest.mark.parametrize("word", ["--trust", "--trust=", "--trust=a/b", "--trust=a..b"])
def test_trust_takes_the_name_of_a_module(word, call):
    code, err = call("check", "--config=tiny.yaml", word)
    assert code == 2
    assert "takes the name of a module" in err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    options = [f"--trainer.default_root_dir={folder / 'run'}"]
    assert main(["fit", f"--config={folder / 'tiny.yaml'}", *options]) == 0
    return finding.newest(folder / "run")


def changed(path, target, change):
    """Writes a checkpoint with another stored config, as a stranger would."""
    content = torch.load(path, weights_only=True)
    config = yaml.safe_load(content[checkpoint.RECORD]["config"])
    change(config)
    content[checkpoint.RECORD]["config"] = yaml.safe_dump(config)
    content["data"] = {"tokenizer": "{}"}  # which ToyData has not; `generate` asks for one first
    target.parent.mkdir(exist_ok=True)
    torch.save(content, target)


@pytest.mark.parametrize("command", ["fit", "validate", "generate", "check"])
def test_a_checkpoints_config_imports_nothing_even_from_beside_the_config(command, call, trained, tmp_path):
    (tmp_path / "leyden_canary.py").write_text(CANARY)  # beside the config
    network = {"class_path": "leyden_canary.X", "init_args": {}}
    changed(trained, tmp_path / "evil.ckpt", lambda config: config["model"].update(network=network))
    (tmp_path / "less.yaml").write_text("trainer: {max_steps: 6}\n")
    words = ["--prompt=x"] if command == "generate" else ["--config=less.yaml"]
    code, err = call(command, "--ckpt_path=evil.ckpt", *words)
    refused(code, err, tmp_path)
    assert "leyden_canary" not in sys.modules
    assert "--trust leyden_canary" in err
    if command != "generate":
        assert "evil.ckpt (stored config), model.network.class_path" in err


def test_a_checkpoints_function_needs_trust(call, trained, tmp_path):
    schedule = {"class_path": LAMBDA, "init_args": {"lr_lambda": "leyden_canary.touch", "last_epoch": -1}}
    changed(trained, tmp_path / "evil.ckpt", lambda config: config["model"].update(lr_scheduler=schedule))
    code, err = call("fit", "--ckpt_path=evil.ckpt", "--trainer.max_steps=6")
    refused(code, err, tmp_path)
    assert "--trust leyden_canary" in err


def test_what_jsonargparse_may_do_is_as_before_afterwards():
    from jsonargparse import _common, _loaders_dumpers, _optionals

    def found():
        return (
            dict(_common.parsing_settings),
            _loaders_dumpers.get_yaml_default_loader(),
            _optionals._config_read_mode,
        )

    before = found()
    with trust.trusting(trust.Trust(("my_net",))):
        assert all(now != then for now, then in zip(found(), before, strict=True))
    assert found() == before


def test_a_technique_of_a_package_is_trusted_by_its_registered_paths(packages):
    packages.add(
        "acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, "class Guard: pass\nclass Other: pass\n"
    )
    with trust.trusting(trust.Trust()):
        assert trust.refusal("acme.Guard") is None
        assert "--trust acme" in trust.refusal("acme.Other")


@pytest.mark.parametrize("name", ["$HOME/run", "~/run", "a/${HOME}"])
def test_a_run_folder_that_loggers_would_expand_is_refused(name, call, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code, err = call("fit", "--config=tiny.yaml", f"--trainer.default_root_dir={name}")
    assert code == 2
    assert f"{tmp_path}/home" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "site", "tiny.yaml"]


from lightning.pytorch import LightningDataModule  # noqa: E402


class Keeps(LightningDataModule):
    """Keeps what it is given."""

    def __init__(self, any, many: dict) -> None:
        super().__init__()
        self.any, self.many = any, many
