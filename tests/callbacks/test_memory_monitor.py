"""MemoryMonitor: classes against closed forms, the picture, and that other steps are left alone."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from callbacks.activation_checkpointing import ActivationCheckpointing
from callbacks.memory_monitor import CLASSES, MIB, MemoryMonitor, allocator_figures, over_ranks
from core.errors import ConfigError
from plugins.optimizers.adamw import AdamW
from tests.support.launched_ranks import forked, results
from tests.support.tiny_training import fit, module, tiny_gpt, uneven_batches

LARGER = dict(n_embd=64, vocab_size=61)
STEPS = 6


class Modes(Callback):
    """Notes how many dispatch modes are on in the middle of each micro-batch."""

    def __init__(self):
        self.on = []

    def on_before_backward(self, trainer, pl_module, loss):
        self.on.append(_len_torch_dispatch_stack())


def run(tmp_path, monitor, *others, optimizer=AdamW, **options):
    trained = module(lambda: tiny_gpt(**LARGER), optimizer=lambda groups: optimizer(groups, lr=1e-3))
    batches = uneven_batches(options.pop("batches", STEPS), rows=4)
    return trained, fit(tmp_path, trained, batches, [monitor, *others], max_epochs=1, **options)


def figures(runner):
    metrics = runner.callback_metrics
    return {name: float(metrics[f"memory/peak_{name}_mib"]) for name in (*CLASSES, "total")}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.ci),
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.ci),
    ],
)
def test_what_parameters_gradients_and_optimizer_take_follows_from_their_number(options, tmp_path):
    trained, runner = run(tmp_path, MemoryMonitor(at_step=3), gradient_clip_val=0.5, **options)
    found, parameters = figures(runner), sum(p.numel() for p in trained.parameters()) * 4 / MIB
    largest = max(p.numel() for p in trained.parameters()) * 4 / MIB
    assert found["parameters"] == pytest.approx(parameters, abs=1e-3)  # and the buffers of nothing
    assert found["optimizer_state"] == pytest.approx(2 * parameters, rel=0.01)  # two moments; step numbers
    assert parameters <= found["gradients"] <= parameters + largest + 1e-3  # one on its way to be added
    assert found["activations"] > 0
    assert max(found[name] for name in CLASSES) < found["total"] <= sum(found[name] for name in CLASSES)


@pytest.mark.ci
def test_sgd_has_no_state_and_checkpointing_has_fewer_activations(tmp_path):
    _, plain = run(tmp_path, MemoryMonitor(), optimizer=torch.optim.SGD)
    _, fewer = run(tmp_path, MemoryMonitor(), ActivationCheckpointing(), optimizer=torch.optim.SGD)
    assert figures(plain)["optimizer_state"] < 1e-3  # what the step computes on the way
    assert figures(fewer)["activations"] < 0.75 * figures(plain)["activations"]


class Freezing(Callback):
    def change_network(self, network):
        network.embed_tokens.requires_grad_(False)


def test_frozen_parameters_have_neither_gradient_nor_state(tmp_path):
    trained, runner = run(tmp_path, MemoryMonitor(), Freezing())
    parameters = sum(p.numel() for p in trained.parameters()) * 4 / MIB
    frozen = trained.network.embed_tokens.weight.numel() * 4 / MIB
    assert figures(runner)["parameters"] == pytest.approx(parameters, abs=1e-3)
    assert figures(runner)["optimizer_state"] == pytest.approx(2 * (parameters - frozen), rel=0.01)


@pytest.mark.parametrize(
    ("monitor", "accumulated", "expected"),
    [
        (MemoryMonitor(at_step=2), 1, [0, 1, 0, 0, 0, 0]),
        (MemoryMonitor(at_step=2, every_n_steps=3), 1, [0, 1, 0, 0, 1, 0]),
        (MemoryMonitor(at_step=2), 2, [0, 0, 1, 1, 0, 0]),
        (MemoryMonitor(at_step=0), 1, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_only_the_steps_that_are_asked_for_are_looked_at(monitor, accumulated, expected, tmp_path):
    modes = Modes()
    run(tmp_path, monitor, modes, accumulate_grad_batches=accumulated)
    assert [count > 0 for count in modes.on] == [bool(on) for on in expected]
    steps = {2, 5} if monitor.every_n_steps else {2} if any(expected) else set()
    pictures = {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert set(pictures) == {f"memory_step_{step}.png" for step in steps}
    assert all(content.startswith(b"\x89PNG") and len(content) > 10_000 for content in pictures.values())


@pytest.mark.ci
def test_training_is_bitwise_the_same(tmp_path):
    looked, _ = run(tmp_path, MemoryMonitor(at_step=1, every_n_steps=1))
    other, _ = run(tmp_path, MemoryMonitor(at_step=99))
    assert all(torch.equal(a, b) for a, b in zip(looked.parameters(), other.parameters(), strict=True))


class Failing(Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        raise RuntimeError("out of luck")


def test_a_step_that_breaks_off_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError, match="out of luck"):
        run(tmp_path, MemoryMonitor(at_step=1), Failing())
    assert _len_torch_dispatch_stack() == 0
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


class Larger(Callback):
    """Takes 4 MiB on rank 1 while backward runs."""

    def on_before_backward(self, trainer, pl_module, loss):
        self.taken = None  # that of the micro-batch before
        self.taken = torch.ones(2**20) if trainer.global_rank == 1 else None


@pytest.mark.ci
def test_of_two_ranks_the_larger_one_and_the_mean_are_logged(tmp_path):
    words = [
        f"--trainer.callbacks+={__name__}.Larger",
        "--trainer.callbacks+=MemoryMonitor",
        "--trainer.max_steps=3",
    ]
    done = forked(2, tmp_path, *words)
    assert done.code == 0, done.error_text
    [row] = [row for row in results(tmp_path)[0].values() if row["memory/peak_total_mib"]]
    found = {name: float(value) for name, value in row.items() if name.startswith("memory/")}
    assert found["memory/peak_total_mib"] - found["memory/peak_total_mean_mib"] == pytest.approx(2, abs=0.05)
    assert found["memory/peak_parameters_mib"] == pytest.approx(
        found["memory/peak_parameters_mean_mib"], rel=1e-6
    )
    assert [path.name for path in (tmp_path / "run").glob("memory_*")] == ["memory_step_3.png"]


@pytest.mark.parametrize(
    "wrong", [{"at_step": -1}, {"every_n_steps": -1}, {"at_step": 0, "every_n_steps": 2}]
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="MemoryMonitor takes at_step >= 1 and every_n_steps >= 0"):
        MemoryMonitor(**wrong)


def test_fragmentation_is_what_lies_within_blocks_in_use():
    """The keys are those of torch.cuda.memory_stats."""
    stats = {"reserved_bytes.all.current": 8 * MIB, "allocated_bytes.all.current": 5 * MIB}
    found = allocator_figures(stats | {"inactive_split_bytes.all.current": 2 * MIB})
    assert found == {"memory/allocated_mib": 5, "memory/reserved_mib": 8, "memory/fragmentation": 0.25}
    assert (
        allocator_figures(dict.fromkeys([*stats, "inactive_split_bytes.all.current"], 0))[
            "memory/fragmentation"
        ]
        == 0
    )
    names, ranks = list(found), torch.tensor([[5.0, 8.0, 0.25], [7.0, 6.0, 0.75]])
    assert over_ranks(names, ranks) == {
        "memory/allocated_mib": 7,
        "memory/allocated_mean_mib": 6,
        "memory/reserved_mib": 8,
        "memory/reserved_mean_mib": 7,
        "memory/fragmentation": 0.75,
        "memory/fragmentation_mean": 0.5,
    }
