"""The words of `trainer.precision` mean what they say: in what the weights are kept, in what products are computed."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision
from torch.utils._python_dispatch import TorchDispatchMode

from core import __main__
from plugins.cli.configuration.builder import Builder
from tests.support.tiny_training import fit as fit_module
from tests.support.tiny_training import module, uneven_batches

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


class Products(TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            self.dtypes.add(str(result.dtype))
        return result


class Dtypes(Callback):
    """Writes to `dtypes.json` what the weights are and what a step's products, forward and backward, are in."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1:
            self.products = Products()
            self.products.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            self.products.__exit__(None, None, None)
            found = {
                "weights": sorted({str(p.dtype) for p in pl_module.parameters()}),
                "products": sorted(self.products.dtypes),
                "scaler": trainer.scaler is not None,
            }
            Path(trainer.default_root_dir, "dtypes.json").write_text(json.dumps(found))


@pytest.fixture
def fit(tiny, tmp_path, monkeypatch, capsys):
    """Runs `fit` on the tiny run with other values for the trainer; returns exit code, dtypes and stderr."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # `main` changes it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so does Lightning this: restored afterwards

    def run(**trainer):
        tiny["trainer"] |= {
            "max_steps": 3,
            "callbacks": [{"class_path": "tests.plugins.cli.configuration.test_building.Dtypes"}],
        }
        tiny["trainer"] |= {"default_root_dir": str(tmp_path / "run"), **trainer}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny))
        code = __main__.main(["fit", f"--config={tmp_path / 'run.yaml'}"])
        written = tmp_path / "run" / "dtypes.json"
        return code, json.loads(written.read_text()) if written.exists() else {}, capsys.readouterr().err

    return run


CPU_OBJECT = {"class_path": "lightning.pytorch.accelerators.CPUAccelerator"}


@pytest.mark.parametrize(
    ("trainer", "weights", "products"),
    [
        ({}, "float32", "float32"),
        ({"precision": "32-true"}, "float32", "float32"),
        ({"precision": "bf16-mixed"}, "float32", "bfloat16"),
        ({"precision": "bf16-mixed", "accelerator": CPU_OBJECT}, "float32", "bfloat16"),
        ({"precision": "bf16-true"}, "bfloat16", "bfloat16"),
        ({"precision": "16-mixed"}, "float32", "float16"),
        ({"precision": 16}, "float32", "float16"),
        ({"precision": "16-mixed", "accelerator": CPU_OBJECT}, "float32", "float16"),
        ({"precision": "16-mixed", "accelerator": "auto"}, "float32", "float16"),
        ({"plugins": ["FP16Mixed"]}, "float32", "float16"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about CPUs")
def test_weights_and_products_are_in_the_dtypes_that_a_word_promises(trainer, weights, products, fit):
    code, dtypes, _ = fit(**trainer)
    assert code == 0
    assert dtypes["weights"] == [f"torch.{weights}"]
    assert dtypes["products"] == [f"torch.{products}"]
    assert dtypes["scaler"] == (products == "float16")


def test_an_autocast_for_another_device_is_refused(fit):
    plugin = {"class_path": "lightning.pytorch.plugins.precision.MixedPrecision"}
    code, dtypes, message = fit(
        plugins=[{**plugin, "init_args": {"precision": "bf16-mixed", "device": "cuda"}}]
    )
    assert code == 2
    assert not dtypes
    assert "is set up for cuda, this run is on cpu and would train in float32. Set device to cpu" in message
    assert fit(plugins=[{**plugin, "init_args": {"precision": "bf16-mixed", "device": "cpu"}}])[0] == 0


def test_a_word_and_a_plugin_for_precision_are_one_too_many(fit):
    code, _, message = fit(precision="16-mixed", plugins=["FP16Mixed"])
    assert code == 2
    assert "precision" in message
    assert len(message.splitlines()) <= 10


class Noting(Callback):
    """Notes whose turn it was, and whether the network had values."""

    def __init__(self, name, noted):
        self.name, self.noted = name, noted

    def change_network(self, network):
        self.noted.append((self.name, next(network.parameters()).is_meta))


class NotingPrecision(Precision):
    change_network = Noting.change_network
    __init__ = Noting.__init__


def test_precision_then_callbacks_change_a_network_once_before_it_is_given_to_an_optimizer(tmp_path):
    noted = []

    def optimizer(groups):
        noted.append("optimizer")
        return torch.optim.SGD(groups, lr=0.1)

    callbacks = [Noting("first", noted), Noting("second", noted)]
    plugins = [NotingPrecision("precision", noted)]
    fit_module(
        tmp_path, module(optimizer=optimizer), uneven_batches(2), callbacks, plugins=plugins, max_epochs=1
    )
    assert noted == [("precision", False), ("first", False), ("second", False), "optimizer"]


def test_what_a_change_refuses_is_found_before_anything_is_prepared(fit):
    code, dtypes, message = fit(
        plugins=[{"class_path": "Float8", "init_args": {"layers": ["layers.0.mlp.up"]}}]
    )
    assert code == 2
    assert not dtypes
    assert (
        "Float8: no linear layer of GPT is named 'layers.0.mlp.up'. Did you mean layers.0.mlp.up_proj?"
        in message
    )


def test_arguments_may_have_any_name():
    def made(**options):
        return options

    assert Builder()(made, target=1, self=2) == {"target": 1, "self": 2}
