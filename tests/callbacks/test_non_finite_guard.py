"""NonFiniteGuard: names the module, step and direction of planted NaNs; keeps the weights; is silent otherwise."""

import pytest
import torch
from torch import nn

from callbacks.non_finite_guard import NonFiniteGuard
from core.errors import ConfigError
from plugins.networks.gpt import GPT
from plugins.optimizers.adamw import AdamW
from tests.support.tiny_training import Record, fit, module, uneven_batches

BAD = 60


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bad):
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.where(ctx.bad, torch.inf, gradient), None


class Bomb(nn.Module):
    """A projection that goes wrong where the batch holds the token BAD."""

    def __init__(self, inner, kind):
        super().__init__()
        self.inner, self.kind, self.bad = inner, kind, torch.tensor(False)

    def forward(self, x):
        if self.kind == "forward":
            return torch.where(self.bad, torch.nan, self.inner(x))
        return self.inner(Backward.apply(x, self.bad))


class Mined(GPT):
    def __init__(self, kind):
        super().__init__(vocab_size=61, n_layer=3, n_head=2, n_embd=16, max_sequence_length=24, dropout=0.1)
        self.layers[1].mlp.up_proj = Bomb(self.layers[1].mlp.up_proj, kind)

    def forward(self, batch, cache=None):
        self.layers[1].mlp.up_proj.bad = (batch["input_ids"] == BAD).any()
        return super().forward(batch, cache)


def batches(count, bad):
    found = uneven_batches(count)
    for index, batch in enumerate(found):
        batch["input_ids"] = batch["input_ids"].clamp(max=BAD - 1)
        if index == bad:
            batch["input_ids"][0, 3] = BAD
    return found


def run(tmp_path, kind, bad, optimizer=AdamW, **options):
    record, trained = Record(), module(lambda: Mined(kind), optimizer=optimizer)
    options = {"max_steps": 12, "log_every_n_steps": 6} | options
    data = batches(12 * options.get("accumulate_grad_batches", 1), bad)
    try:
        fit(tmp_path, trained, data, [NonFiniteGuard(), record], **options)
    except ConfigError as error:
        return str(error), trained, record
    return None, trained, record


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("forward", "the output of layers.1.mlp.up_proj (Bomb) going forward, 384 of 1,536 values"),
        ("backward", "the gradient that layers.1.mlp.up_proj (Bomb) passes on going backward"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_module_step_and_direction_are_named(tmp_path, kind, named, options):
    bad = 8 * options.get(
        "accumulate_grad_batches", 1
    )  # the ninth step; the next that is logged is the twelfth
    message, trained, _ = run(tmp_path, kind, bad, **options)
    assert "in step 9 the loss is" in message
    assert named.partition(",")[0] in message
    assert len(message.splitlines()) <= 10
    assert all(p.isfinite().all() for p in trained.network.parameters())


def test_the_weights_are_those_before_the_step(tmp_path):
    _, stopped, _ = run(tmp_path, "forward", 8)
    _, before, _ = run(tmp_path, "forward", None, max_steps=8)
    assert all(torch.equal(a, b) for a, b in zip(stopped.parameters(), before.parameters(), strict=True))


def test_with_an_optimizer_that_cannot_drop_updates_the_weights_stay_finite(tmp_path):
    message, trained, _ = run(
        tmp_path, "backward", 7, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    )
    assert "in step 8" in message
    assert "layers.1.mlp.up_proj" in message
    assert all(p.isfinite().all() for p in trained.network.parameters())


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    class Broken(GPT):
        def init_weights(self):
            super().init_weights()
            with torch.no_grad():
                self.layers[0].attention.q_proj.weight[1, 2] = torch.inf

    trained = module(lambda: Broken(vocab_size=61, n_layer=1, n_head=2, n_embd=16, max_sequence_length=24))
    with pytest.raises(
        ConfigError, match=r"the weight layers.0.attention.q_proj.weight, before the step, 1 of 256"
    ):
        fit(tmp_path, trained, uneven_batches(2), [NonFiniteGuard()], max_steps=2)


def test_a_clean_run_is_the_run_without_it(tmp_path):
    message, guarded, record = run(tmp_path, "forward", None)
    assert message is None
    plain = module(lambda: Mined("forward"), optimizer=AdamW)
    fit(tmp_path, plain, batches(12, None), [], max_steps=12, log_every_n_steps=6)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), guarded.parameters(), strict=True))
    assert len(record.figures) == 2
