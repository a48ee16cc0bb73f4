"""ExponentialMovingAverage against its closed form; its loss, its state, its cost."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from callbacks.exponential_moving_average import ExponentialMovingAverage
from core.errors import ConfigError
from core.language_module import LanguageModule
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from tests.support.tiny_training import trainer
from tests.support.token_runs import callback, fit, strategy
from tests.support.toy import ToyData


class Weights(Callback):
    """Keeps the weights before the first step and after each."""

    def __init__(self):
        self.history = []

    def on_train_start(self, trainer, pl_module):
        self.history.append([p.detach().double() for p in pl_module.network.parameters()])

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == len(self.history):
            self.on_train_start(trainer, pl_module)


def train(folder, average, *callbacks, ckpt_path=None, **options):
    trained = LanguageModule(
        lambda: GPT(vocab_size=64, n_layer=1, n_head=2, n_embd=16, max_sequence_length=16),
        CausalLM(),
        lambda groups: torch.optim.SGD(groups, lr=0.5),
    )
    torch.manual_seed(0)
    runner = trainer(folder, callbacks=[average, *callbacks], limit_val_batches=2, check_val_every_n_epoch=None,
                     **{"val_check_interval": 4, "max_steps": 12} | options)  # fmt: skip
    runner.fit(trained, datamodule=ToyData(), ckpt_path=ckpt_path)
    return runner, trained


def averaged(history, decay, every=1):
    """From the definition, in float64."""
    average = [value.clone() for value in history[0]]
    for updates, step in enumerate(range(every, len(history), every), 1):
        d = min(decay, updates / (updates + 9))
        average = [d * a + (1 - d) * w for a, w in zip(average, history[step], strict=True)]
    return average


@pytest.mark.parametrize(
    ("decay", "every", "accumulation"), [(0.4, 1, 1), (0.999, 1, 2), (0.9, 3, 1), (0.0, 1, 1)]
)
def test_it_is_the_average_of_its_definition(tmp_path, decay, every, accumulation):
    average, weights = ExponentialMovingAverage(decay, every), Weights()
    train(tmp_path, average, weights, accumulate_grad_batches=accumulation)
    assert len(weights.history) == 13
    expected = averaged(weights.history, decay, every)
    for found, value in zip(average.state_dict()["averages"].values(), expected, strict=True):
        # 12 interpolations of float32, each rounded by 2^-24
        torch.testing.assert_close(found.double(), value, rtol=1e-6, atol=1e-7)


def test_its_loss_is_that_of_a_network_with_the_averages_and_the_weights_stay(tmp_path):
    average, weights = ExponentialMovingAverage(0.9), Weights()
    runner, trained = train(tmp_path, average, weights)
    figures = {name: float(value) for name, value in runner.callback_metrics.items()}
    assert figures["val/ema_loss"] != pytest.approx(figures["val/loss"], rel=1e-5)
    for own, last in zip(trained.network.parameters(), weights.history[-1], strict=True):
        assert torch.equal(own.double(), last)

    trained.network.load_state_dict(trained.network.state_dict() | average.state_dict()["averages"])
    [again] = trainer(tmp_path, limit_val_batches=2).validate(trained, datamodule=ToyData(), verbose=False)
    assert figures["val/ema_loss"] == pytest.approx(again["val/loss"], rel=1e-6)  # which is logged in float32


@pytest.mark.ci
@pytest.mark.parametrize("sanity", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_under_fsdp_its_loss_is_that_of_one_process(sanity):
    usual = callback("ExponentialMovingAverage", decay=0.9), {"trainer": {"val_check_interval": 2}}
    rows = {"data": {"init_args": {"batch_size": 2}}}
    checked = {"trainer": {**strategy("FSDP")["trainer"], "num_sanity_val_steps": sanity}}
    found, expected = fit(*usual, rows, checked, ranks=2), fit(*usual)
    for step in "246":
        one, other = found.record["figures"][step], expected.record["figures"][step]
        assert one["val/ema_loss"] == pytest.approx(other["val/ema_loss"], rel=1e-6)
        assert one["val/ema_loss"] != pytest.approx(other["val/loss"], rel=1e-6)


def test_with_decay_0_it_is_the_weights(tmp_path):
    runner, _ = train(tmp_path, ExponentialMovingAverage(0.0))
    figures = runner.callback_metrics
    assert float(figures["val/ema_loss"]) == pytest.approx(float(figures["val/loss"]), rel=1e-7)


def test_the_run_itself_is_not_changed(tmp_path):
    _, plain = train(tmp_path, Weights())
    _, with_it = train(tmp_path, ExponentialMovingAverage())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), with_it.parameters(), strict=True))


def test_a_resumed_average_is_bitwise_the_same(tmp_path):
    whole, half, rest = (ExponentialMovingAverage(0.99, 2) for _ in range(3))
    expected, _ = train(tmp_path, whole)
    runner, _ = train(tmp_path, half, max_steps=5)
    runner.save_checkpoint(tmp_path / "five.ckpt")
    found, _ = train(tmp_path, rest, ckpt_path=tmp_path / "five.ckpt")
    one, other = whole.state_dict(), rest.state_dict()
    assert one["updates"] == other["updates"] == 6
    assert all(torch.equal(one["averages"][name], other["averages"][name]) for name in one["averages"])
    assert found.callback_metrics["val/ema_loss"] == expected.callback_metrics["val/ema_loss"]


def test_all_weights_are_averaged_by_one_call(tmp_path):
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    names, average = [], ExponentialMovingAverage()
    runner, trained = train(tmp_path, average)
    average._step -= 1
    with Names():
        average.on_train_batch_end(runner, trained, None, None, 0)
    assert names == ["_foreach_lerp_"]


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"every_n_steps": 0}])
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="ExponentialMovingAverage takes"):
        ExponentialMovingAverage(**options)
