"""ActivationCheckpointing: the same bits, fewer bytes, the same names; what is kept is not computed again."""

import os
import shutil
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from callbacks.activation_checkpointing import ActivationCheckpointing
from conformance.workshop import write_config
from core.errors import ConfigError
from plugins.cli.configuration.config_files import merge
from tests.benchmarks.activation_memory import activation_bytes
from tests.support.same_run import CONFIG
from tests.support.tiny_training import fit, module, tiny_gpt, uneven_batches

WAYS = [
    {},
    {"every_n_blocks": 2},
    {"keep": ["matmul", "attention"]},
    {"keep": ["silu", "mm"], "every_n_blocks": 2},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_are_bitwise_those_of_a_run_without(way, precision, tmp_path):
    """With dropout: random numbers are drawn again as they were, and those of later micro-batches as well."""
    weights = []
    for callbacks in ([], [ActivationCheckpointing(**way)]):
        trained = module(lambda: tiny_gpt(dropout=0.2, activation="swiglu"))
        options = dict(max_epochs=1, precision=precision, accumulate_grad_batches=2, gradient_clip_val=0.5)
        fit(tmp_path, trained, uneven_batches(6), callbacks, **options)
        weights.append(trained.state_dict())
    one, other = weights
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


class Count(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def calls(**way):
    network = tiny_gpt()
    if way:
        ActivationCheckpointing(**way).change_network(network)
    with Count() as count:
        network.logits(network({"input_ids": torch.arange(12).view(2, 6)})).sum().backward()
    return count.calls


def test_what_is_not_kept_is_computed_twice_and_what_is_kept_once():
    plain, full, selective = calls(), calls(every_n_blocks=1), calls(keep=["matmul"])
    per_block = 6  # projections
    assert full["addmm"] == plain["addmm"] + 2 * per_block - 2  # the last result of a block is not asked for
    assert selective["addmm"] == plain["addmm"]
    assert selective["gelu"] == full["gelu"] == 2 * plain["gelu"]
    assert calls(every_n_blocks=2)["gelu"] == plain["gelu"] + 1


def test_evaluation_and_names_do_not_change():
    network = tiny_gpt()
    names = [name for name, _ in network.named_modules()], list(network.state_dict())
    batch = {"input_ids": torch.arange(12).view(2, 6)}
    with torch.no_grad():
        expected = network(batch)
        ActivationCheckpointing().change_network(network)
        assert torch.equal(network(batch), expected)
    assert ([name for name, _ in network.named_modules()], list(network.state_dict())) == names


@pytest.mark.ci
def test_activation_bytes_are_ordered_as_they_must_be():
    """Blocks hold nearly all; every second block frees half of what all blocks free; selection keeps a part."""
    none, full = activation_bytes(), activation_bytes(ActivationCheckpointing())
    second = activation_bytes(ActivationCheckpointing(2))
    kept = activation_bytes(ActivationCheckpointing(keep=["matmul", "attention"]))
    assert none > second > full
    assert none > kept > full
    assert second == pytest.approx((none + full) / 2, rel=0.02)
    assert full < none / 10


def saved_by_compiled_blocks(memory_budget):
    """Returns the bytes that wait for backward, and the gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network, saved = tiny_gpt(activation="swiglu", norm="rmsnorm"), {}
    ActivationCheckpointing(memory_budget=memory_budget).change_network(network)

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = network.logits(network({"input_ids": torch.arange(48).view(2, 24)})).sum()
    loss.backward()
    return sum(saved.values()), [p.grad for p in network.parameters()]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.slow
def test_a_smaller_memory_budget_keeps_less_and_changes_no_gradient(monkeypatch):
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 1.0)  # restored afterwards
    (most, exact), (half, one), (least, other) = map(saved_by_compiled_blocks, (1.0, 0.5, 0.0))
    assert most > half > least
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(exact, one, other, strict=True))


@pytest.mark.ci
def test_a_memory_budget_is_set_where_the_command_line_has_left_the_compiler_out(tmp_path):
    callback = {"class_path": "ActivationCheckpointing", "init_args": {"memory_budget": 0.5}}
    trainer = {"max_steps": 1, "default_root_dir": str(tmp_path), "callbacks": [callback]}
    config = write_config("memory-budget", merge(deepcopy(CONFIG), {"trainer": trainer}))
    command = [sys.executable, "-m", "core", "fit", f"--config={config}"]
    # the compiler itself takes long, and has a test above
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"every_n_blocks": 0}, "every_n_blocks >= 1, not 0"),
        ({"keep": ["matmull"]}, "keep has 'matmull', which is no operator. Did you mean matmul?"),
        ({"memory_budget": 1.5}, "a memory_budget between 0 and 1, not 1.5"),
        ({"memory_budget": 0.5, "keep": ["mm"]}, "no `keep` beside it"),
    ],
)
def test_wrong_arguments_are_named(wrong, hint):
    with pytest.raises(ConfigError, match=hint.replace("?", r"\?")):
        ActivationCheckpointing(**wrong)
