"""StochasticDepth against its formula: rates, scaling, expectation, and that only training is changed."""

from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from callbacks.stochastic_depth import StochasticDepth, draw, drop_block
from core.__main__ import main
from core.errors import ConfigError
from plugins.networks.gpt import GPT
from plugins.networks.mixtral import Mixtral
from plugins.objectives.balanced_routing import BalancedRouting
from plugins.objectives.causal_lm import CausalLM
from tests.support.tiny_training import Record, fit, module, tiny_gpt, uneven_batches
from toolkit.fused_masks import fused_mask
from toolkit.routing import recorded


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
    callback.on_fit_start(ALONE, SimpleNamespace(network=network))
    x = torch.zeros(20_000, 1)
    for layer in network.layers:
        seen.append((layer.train()(x, None, None, None) == 0).float().mean().item())
        assert torch.equal(layer.eval()(x, None, None, None), x + 1)
    # standard error below sqrt(0.25 / 20,000) = 0.0035
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8], abs=0.015)
    callback.on_fit_end(None, None)
    assert torch.equal(network.layers[3].train()(x), x + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_factor_is_a_number_of_the_data_type(dtype):
    for rate in (0.0, 0.003, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9, 0.99):
        expected = torch.tensor(1 / (1 - rate), dtype=torch.float64).to(dtype).item()
        assert draw(1, rate, dtype)[1] == expected


# -- only the rows that stay are computed -----------------------------------------------------------

ALONE = SimpleNamespace(strategy=None)


def built(**options):
    torch.manual_seed(0)
    network = GPT(61, n_layer=3, n_head=2, n_embd=16, max_sequence_length=12, **options).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return network


def batch(rows, documents=False):
    ids = torch.randint(61, (rows, 12), generator=torch.Generator().manual_seed(0))
    if not documents:
        return {"input_ids": ids}
    starts = torch.arange(12) >= torch.arange(1, rows + 1)[:, None]
    positions = torch.where(starts, torch.arange(12) - torch.arange(1, rows + 1)[:, None], torch.arange(12))
    return {"input_ids": ids, "document_ids": starts.long(), "position_ids": positions}


def trained(network, inputs, callback, seed=1):
    """Returns what it computes with a callback, and all gradients."""
    callback.on_fit_start(ALONE, SimpleNamespace(network=network))
    network.zero_grad()
    torch.manual_seed(seed)
    hidden = network(inputs)
    hidden.square().sum().backward()
    callback.on_fit_end(ALONE, None)
    return hidden.detach(), [p.grad.clone() for p in network.parameters()]


@pytest.mark.parametrize("rows", [1, 2, 12])  # 12: as many as tokens
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_running_the_kept_rows_alone_is_the_masked_form(
    norm_position, position, documents, rows, monkeypatch
):
    network, inputs = built(position=position, norm_position=norm_position), batch(rows, documents)
    callback = StochasticDepth(0.7, norm_position)
    for seed in range(4):
        found, gradients = trained(network, inputs, callback, seed)
        with monkeypatch.context() as patch:
            patch.setattr(network, "select_rows", lambda arguments, rows: None)
            expected, theirs = trained(network, inputs, callback, seed)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, theirs, rtol=1e-9, atol=1e-9)


def test_masks_of_flex_attention_have_all_rows_computed():
    """They are made for all rows; the network has them on CUDA alone."""
    ids = torch.zeros(2, 256, dtype=torch.int64)
    mask = fused_mask(256, 256, ids.device, (ids, ids))
    assert built().select_rows((None, mask, None), torch.tensor([0])) is None


def test_what_is_left_out_costs_nothing():
    network, inputs = built(), batch(8)

    def flops(callback):
        with FlopCounterMode(display=False) as counter:
            trained(network, inputs, callback)
        return counter.get_total_flops()

    torch.manual_seed(1)
    kept = [int(draw(8, 0.6 * number / 3, torch.float64)[0].sum()) for number in (1, 2, 3)]
    assert sum(kept) < 20
    assert flops(StochasticDepth(0.6)) * 24 == flops(StochasticDepth(0.0)) * sum(kept)


def test_with_no_row_left_the_block_has_zero_gradients_and_not_none():
    network = built()
    for seed in range(50):
        _, gradients = trained(network, batch(1), StochasticDepth(0.9), seed)  # or `p.grad` is None
        assert all(gradient.isfinite().all() for gradient in gradients)
        torch.manual_seed(seed)
        stays = [bool(draw(1, 0.9 * number / 3, torch.float64)[0]) for number in (1, 2, 3)]
        grown = [any(p.grad.any() for p in layer.parameters()) for layer in network.layers]
        assert grown == stays


def test_with_norms_last_a_row_is_the_blocks_input_or_its_output():
    network, inputs = built(norm_position="post"), batch(12)
    outs = []
    handles = [
        layer.register_forward_hook(lambda _, given, out: outs.append((given[0], out)))
        for layer in network.layers
    ]
    trained(network, inputs, StochasticDepth(0.6, "post"))
    for handle in handles:
        handle.remove()
    torch.manual_seed(1)
    for number, (layer, (x, out)) in enumerate(zip(network.layers, outs, strict=True), 1):
        stays = draw(12, 0.6 * number / 3, torch.float64, scaled=False)[0]
        assert stays.any()
        assert number < 3 or not stays.all()
        assert torch.equal(out[~stays], x[~stays])
        torch.testing.assert_close(out[stays], layer(x[stays], None, None, None))


def test_a_compiled_block_and_named_arguments_compute_all_rows():
    network, callback = built(), StochasticDepth(0.6)
    [first, *_] = network.layers
    x = torch.randn(8, 5, 16, dtype=torch.float64)
    callback.on_fit_start(ALONE, SimpleNamespace(network=network))
    torch.manual_seed(3)
    expected = first(x, None, None, None)
    torch.manual_seed(3)
    torch.testing.assert_close(first(x, rope=None, mask=None, cache=None), expected)
    torch.manual_seed(3)
    compiled = torch.compile(first, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, None, None, None), expected)
    callback.on_fit_end(None, None)


def test_routers_see_the_tokens_of_all_rows():
    """The losses of routing of the first layer are those without it, whichever rows it leaves out."""
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_head=2, n_kv_head=1, n_embd=16, intermediate_size=16)
    network = Mixtral(vocab_size=61, n_experts=4, experts_per_token=2, max_sequence_length=16, **sizes)
    objective, [inputs] = BalancedRouting(CausalLM(), z_loss=0.1), uneven_batches(1, rows=8)
    with recorded(network.train()) as plain:
        objective.loss(network, inputs)
    callback = StochasticDepth(0.6)
    callback.on_fit_start(ALONE, SimpleNamespace(network=network))
    with recorded(network) as found:
        loss, _ = objective.loss(network, inputs)
    loss.total.backward()
    callback.on_fit_end(ALONE, None)
    assert torch.equal(found[0].logits, plain[0].logits)
    assert found[1].logits.shape == plain[1].logits.shape
    assert all(p.grad.isfinite().all() for p in network.parameters())


def test_a_network_with_its_norms_elsewhere_is_refused(tiny, tmp_path, monkeypatch, capsys):
    tiny["trainer"]["callbacks"] += [{"class_path": "StochasticDepth"}]
    tiny["model"]["network"].setdefault("init_args", {})["norm_position"] = "post"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--config=run.yaml"]) == 2
    assert "norm_position is pre, that of the network post: set it to post" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"not pre or post\. Did you mean post\?"):
        StochasticDepth(0.1, "posst")


# -- in a run ----------------------------------------------------------------------------------------


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
