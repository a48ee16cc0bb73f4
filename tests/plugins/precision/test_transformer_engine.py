"""TransformerEngine: what it asks for; with a stand-in for the package, what it does to a network and around a step."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from conformance.runs import run
from conformance.workshop import workshop
from core.technique import declaration_of
from plugins.precision.transformer_engine import TransformerEngine
from tests.support.tiny_training import tiny_gpt


def test_a_run_without_package_or_gpu_is_refused_with_what_to_do():
    words = ["--config=quickstart", "--config=techniques/transformer_engine", "--trainer.accelerator=cpu"]
    done = run(["check", *words], workshop())
    assert done.code == 2
    for need in declaration_of(TransformerEngine).needs:
        if (line := need.missing(SimpleNamespace(accelerator="cpu", offline=False))) is not None:
            assert line in done.stderr
    assert "a CUDA device of compute capability 8.9 or more is needed, this run is on CPU" in done.stderr


@pytest.fixture
def stand_in(monkeypatch):
    """The part of the package that is used: a Linear with an extra state, a recipe, an autocast that notes it."""
    entered = []

    class Linear(nn.Linear):
        def __init__(self, inputs, outputs, bias, params_dtype, device):
            super().__init__(inputs, outputs, bias, device, params_dtype)

        def get_extra_state(self):
            raise AssertionError("a pickle would be saved")

    @contextmanager
    def fp8_autocast(enabled, fp8_recipe):
        entered.append(fp8_recipe)
        yield

    members = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {"Linear": Linear, "fp8_autocast": fp8_autocast},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {
            "Float8CurrentScaling": lambda fp8_format: fp8_format,
            "Format": SimpleNamespace(HYBRID="hybrid", E4M3="e4m3"),
        },
    }
    for name, content in members.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]
    return SimpleNamespace(Linear=Linear, entered=entered)


def test_the_layers_of_the_blocks_are_replaced_around_their_parameters(stand_in):
    network = tiny_gpt(tie_embeddings=False)
    before = dict(network.named_parameters())
    TransformerEngine().change_network(network)
    replaced = [name for name, layer in network.named_modules() if isinstance(layer, stand_in.Linear)]
    assert len(replaced) == 12
    assert "lm_head" not in replaced
    after = dict(network.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)


def test_a_checkpoint_holds_no_pickle_and_is_loaded(stand_in):
    network = tiny_gpt()
    TransformerEngine().change_network(network)
    state = network.state_dict()
    assert all(value.numel() == 0 for name, value in state.items() if name.endswith("_extra_state"))
    network.load_state_dict(state)


def test_a_step_is_in_bf16_and_fp8(stand_in):
    with TransformerEngine("E4M3").forward_context():
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
    assert stand_in.entered == ["e4m3"]
