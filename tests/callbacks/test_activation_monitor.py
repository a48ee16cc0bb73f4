"""ActivationMonitor against the activations themselves; tests/distributed/test_monitors.py has the strategies."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.nn import functional as F

from callbacks.activation_checkpointing import ActivationCheckpointing
from callbacks.activation_monitor import SUMS, ActivationMonitor, add_moments, figures
from core.errors import ConfigError
from tests.support.tiny_training import Record, fit, module, tiny_gpt, uneven_batches


class Keep(Callback):
    """Keeps what the last block returns and the hidden layer of its MLP, computed here."""

    def __init__(self):
        self.outputs, self.hidden = [], []

    def on_train_start(self, trainer, pl_module):
        block = pl_module.network.layers[-1]
        keep = lambda kept, change: lambda module, inputs, output: kept.append(change(output.detach()))  # noqa: E731
        block.register_forward_hook(keep(self.outputs, torch.clone))
        block.mlp.up_proj.register_forward_hook(keep(self.hidden, F.relu))


def expected(values):
    x = torch.cat([value.flatten() for value in values]).double()
    variance = x.var(correction=0)
    return {
        "mean": x.mean(),
        "variance": variance,
        "kurtosis": ((x - x.mean()) ** 4).mean() / variance**2,
        "zeros": (x == 0).double().mean(),
        "saturated": (x.abs() >= 0.05).double().mean(),
    }


@pytest.mark.parametrize("others", [[], [ActivationCheckpointing()]], ids=["", "checkpointed"])
def test_figures_are_those_of_all_activations_of_the_step(others, tmp_path):
    keep, record, trained = Keep(), Record(), module(lambda: tiny_gpt(activation="relu"))
    monitor = ActivationMonitor(every_n_steps=2, saturation=0.05)
    callbacks = [keep, monitor, *others, record]
    fit(tmp_path, trained, uneven_batches(4), callbacks, max_steps=2, accumulate_grad_batches=2)
    for name, kept in (("block.1", keep.outputs), ("block.1.mlp", keep.hidden[: 2 * len(keep.hidden)])):
        forwards = (
            kept if name == "block.1" or not others else kept[::2]
        )  # each is computed again in backward
        for figure, value in expected(forwards[-2:]).items():
            found = record.figures[1][f"activation/{name}/{figure}"]
            assert found == pytest.approx(float(value), rel=1e-9, abs=1e-12), (name, figure)
    assert record.figures[1]["activation/block.1.mlp/zeros"] > 0.2
    assert not any(name.startswith("activation/") for name in record.figures[0])
    hooks = [one._forward_hooks or one._forward_pre_hooks for one in trained.network.modules()]
    assert sum(map(len, hooks)) == 2  # those of this test


def test_values_that_are_not_finite_are_saturated():
    sums = torch.zeros(2, 1, SUMS, dtype=torch.float64)
    add_moments(sums[0, 0], torch.tensor([1.0, float("nan"), float("inf"), -200.0, 0.0]), 100.0)
    found = figures(sums)
    assert found["activation/block.0/saturated"] == 3 / 5
    assert found["activation/block.0/zeros"] == 1 / 5
    assert not any(".mlp/" in name for name in found)


def test_what_is_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="saturation > 0, not 0"):
        ActivationMonitor(saturation=0)
