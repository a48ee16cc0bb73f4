"""Optimizers whose moments are float16: which eps keeps their updates finite, and that others are refused."""

import pytest
import torch

from core import catalog
from plugins.cli.selection import describe
from plugins.optimizers.adamw import AdamW
from plugins.optimizers.half_precision import LEAST_EPS
from toolkit.selection import Run

HALF = {"trainer": {"precision": "16-true"}}


@pytest.mark.parametrize(("eps", "goes_wrong"), [(1e-8, True), (LEAST_EPS, False)])
def test_gradients_whose_squares_are_0_in_float16(eps, goes_wrong):
    """As of an embedding or an expert without tokens in the next steps: v = 0, and m / eps remains."""
    weight = torch.nn.Parameter(torch.zeros(64, dtype=torch.float16))
    optimizer = AdamW([weight], lr=1e-3, eps=eps, weight_decay=0.0)
    for gradient in (5e-4, 0.0, 0.0):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    moved = float(weight.detach().abs().max())
    assert (moved > 1) if goes_wrong else (0 < moved <= 3 * 8e-3)


@pytest.mark.parametrize("name", ["AdamW", "AdEMAMix", "Muon", "ScheduleFreeAdamW", "SOAP"])
def test_an_eps_that_is_too_small_is_refused(name):
    entry = catalog.find(name, "optimizers")
    own = {
        eps: describe("model.optimizer", entry.load(), entry.class_path, {"eps": eps}) for eps in (1e-8, 1e-4)
    }
    [said] = entry.load().preflight(Run(config=HALF), own[1e-8])
    assert "eps is 1e-08" in said
    assert "set eps to 0.0001" in said
    assert not [*entry.load().preflight(Run(config=HALF), own[1e-4])]
    assert not [*entry.load().preflight(Run(config={"trainer": {"precision": "bf16-true"}}), own[1e-8])]


def test_a_plugin_of_half_precision_counts_too():
    kind = "lightning.pytorch.plugins.HalfPrecision"
    plugin = describe("trainer.plugins", torch.nn.Module, kind, {"precision": "16-true"})
    own = describe("model.optimizer", AdamW, "plugins.optimizers.adamw.AdamW", {"eps": 1e-8})
    assert [*AdamW.preflight(Run([plugin, own]), own)]
