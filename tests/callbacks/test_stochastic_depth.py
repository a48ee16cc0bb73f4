"""StochasticDepth against its formula: rates, scaling, expectation, and that only training is changed."""

import pytest
import torch
from torch import nn

from callbacks.stochastic_depth import StochasticDepth, drop_block
from core.errors import ConfigError
from plugins.networks.gpt import GPT
from tests.core.test_language_module import Record, fit, module, tiny_gpt, uneven_batches


def test_a_row_is_its_input_or_has_the_block_divided_by_what_stays():
    torch.manual_seed(0)
    x, out = torch.randn(1000, 3, 5, dtype=torch.float64), torch.randn(1000, 3, 5, dtype=torch.float64)
    found = drop_block(x, out, 0.3)
    left_out = (found == x).flatten(1).all(1)
    torch.testing.assert_close(found[~left_out], (x + (out - x) / 0.7)[~left_out], rtol=1e-14, atol=1e-15)
    # binomial: 300 +- 14.5
    assert 240 < left_out.sum() < 360
    assert torch.equal(drop_block(x, out, 0.0), out)


def test_the_expectation_is_the_block():
    torch.manual_seed(0)
    x, out = torch.zeros(200_000, 1), torch.ones(200_000, 1)
    # standard error of the mean: sqrt(0.25 / 0.75 / 200,000) = 0.0013
    assert drop_block(x, out, 0.25).mean().item() == pytest.approx(1, abs=0.006)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])  # the latter under precision=bf16-true
def test_the_expectation_is_the_block_in_bfloat16_too(default):
    torch.manual_seed(0)
    x, out = torch.zeros(400_000, 1, dtype=torch.bfloat16), torch.ones(400_000, 1, dtype=torch.bfloat16)
    torch.set_default_dtype(default)
    try:
        found = drop_block(x, out, 0.02).float()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.unique().tolist() == [0, 1.0234375]  # not 1.0204: the mean of that many would be 1.003
    # standard error of the mean: sqrt(0.0234 / 400,000) = 0.00024; drawn in bfloat16 it is 0.0036 apart
    assert found.mean().item() == pytest.approx(1, abs=0.001)


class Counting(nn.Module):
    """Adds 1 to each row."""

    def forward(self, x, *rest):
        return x + 1


def test_rates_rise_linearly_with_depth_and_evaluation_is_left_alone():
    torch.manual_seed(0)
    network = GPT(vocab_size=16, n_layer=4, n_head=1, n_embd=4, max_sequence_length=4)
    for index in range(4):
        network.layers[index] = Counting()
    callback, seen = StochasticDepth(0.8), []
    callback.on_fit_start(None, type("Module", (), {"network": network}))
    x = torch.zeros(20_000, 1)
    for layer in network.layers:
        seen.append((layer.train()(x) == 0).float().mean().item())
        assert torch.equal(layer.eval()(x), x + 1)
    # standard error below sqrt(0.25 / 20,000) = 0.0035
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8], abs=0.015)
    callback.on_fit_end(None, None)
    assert torch.equal(network.layers[3].train()(x), x + 1)


def losses(tmp_path, *callbacks, **options):
    record = Record()
    fit(tmp_path, module(tiny_gpt), uneven_batches(6), [*callbacks, record], max_steps=6, **options)
    return [figures["train/loss"] for figures in record.figures]


def test_a_run_is_changed_by_it_repeats_and_is_not_changed_at_rate_0(tmp_path):
    plain, deep = losses(tmp_path), losses(tmp_path, StochasticDepth(0.5))
    assert losses(tmp_path, StochasticDepth(0.5)) == deep
    assert deep != plain
    assert all(loss < 10 for loss in deep)
    assert losses(tmp_path, StochasticDepth(0.0)) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_rates_out_of_range_are_refused(rate):
    with pytest.raises(ConfigError, match="from 0 to below 1"):
        StochasticDepth(rate)
