"""Snapshots put the training back bit by bit; trial steps leave nothing behind."""

import os
import signal
from contextlib import suppress

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.exponential_moving_average import ExponentialMovingAverage
from callbacks.gradient_clip import GradientClip
from callbacks.loss_curve import LossCurve
from callbacks.skip_step import SkipStep
from core.errors import ConfigError
from core.training.stopping import listen
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.optimizers.adamw import AdamW
from plugins.optimizers.ademamix import AdEMAMix
from plugins.optimizers.muon import Muon
from plugins.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from plugins.optimizers.soap import SOAP
from plugins.schedules.warmup_cosine import WarmupCosine
from tests.support.same_states import same
from tests.support.tiny_training import VOCAB, fit, module, tiny_gpt, trainer, uneven_batches
from tests.support.tokens import StoredTokens
from toolkit import snapshots
from toolkit.trials import trial

SHAPING = [lambda: ExponentialMovingAverage(0.9), lambda: GradientClip("adaptive", 0.5), lambda: SkipStep(4)]
"""Callbacks whose state the training depends on."""


class Losses(Callback):
    """Notes the loss of each step; begins with `first` and does `then[step]` after a step."""

    def __init__(self, first=None, then=None):
        self.first, self.then, self.found = first, then or {}, []

    def on_train_start(self, trainer, pl_module):
        if self.first:
            self.first(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        self.found.append(float(pl_module.step_loss))
        if act := self.then.pop(trainer.global_step, None):
            act(trainer)


@pytest.fixture
def train(tmp_path):
    """Trains 9 steps of 8 rows, and returns the losses, and all that there is at the end."""
    for split in ("train", "validation"):
        tokens = np.random.default_rng(0).integers(0, VOCAB, 4001)
        TokenShards(1000).write([tokens], tmp_path / split, vocab_size=VOCAB)

    def run(first=None, then=None, dropout=0.0, optimizer=AdamW, rows=4, precision=None, **options):
        torch.manual_seed(0)
        losses = Losses(first, then)
        plugins = [MixedPrecision(precision, "cpu")] if precision else []
        runner = trainer(
            tmp_path, callbacks=[losses, *(make() for make in SHAPING if optimizer is AdamW)], plugins=plugins,
            **({"max_steps": 9, "accumulate_grad_batches": 2, "use_distributed_sampler": False} | options),
        )  # fmt: skip
        made = module(
            lambda: tiny_gpt(dropout=dropout),
            optimizer=lambda groups: optimizer(groups, lr=0.01),
            lr_scheduler=lambda o: WarmupCosine(o, warmup_steps=3),
        )
        data = StoredTokens(str(tmp_path), 12, rows, shuffle=True)
        data.vocab_size = VOCAB
        runner.fit(made, datamodule=data)
        position = runner.datamodule.state_dict()["position"]
        return losses.found, snapshots.take_snapshot(runner) | {"position": position}

    return run


@pytest.mark.parametrize("precision", [None, "16-mixed"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_trial_leaves_nothing_behind(train, dropout, precision):
    tried = []

    def look_ahead(trainer):
        with trial(trainer) as steps:
            tried.extend(float(next(steps)) for _ in range(5))

    plain, end = train(dropout=dropout, precision=precision)
    losses, after = train(look_ahead, dropout=dropout, precision=precision)
    assert losses == plain
    assert same(after, end)
    assert tried == plain[:5]  # on the same batches, at the same rates, with the same random numbers


@pytest.mark.parametrize("optimizer", [AdEMAMix, Muon, ScheduleFreeAdamW, SOAP])
def test_a_trial_before_the_first_step_is_not_counted_by_the_optimizer(train, optimizer):
    def look_ahead(trainer):
        with trial(trainer) as steps:
            for _ in range(3):
                next(steps)

    plain, end = train(optimizer=optimizer)
    losses, after = train(look_ahead, optimizer=optimizer)
    assert losses == plain
    assert same(after, end)


@pytest.mark.parametrize("optimizer", [AdamW, Muon, ScheduleFreeAdamW])
def test_a_run_goes_on_from_a_snapshot(train, optimizer):
    taken = []

    def go_back(trainer):
        snapshots.put_back(trainer, taken[0])
        assert same(snapshots.take_snapshot(trainer), taken[0])

    def skip(trainer):
        trainer.datamodule.skip_batches(6)  # three steps

    plain, _ = train(optimizer=optimizer)
    back, end = train(
        then={3: lambda trainer: taken.append(snapshots.take_snapshot(trainer)), 6: go_back},
        optimizer=optimizer,
    )
    skipped, other = train(then={3: skip}, optimizer=optimizer)
    assert back[:6] == plain[:6]
    assert back[6:] == skipped[3:]
    assert len(back) == 12
    assert end["position"].pop("done") == other["position"].pop("done") + 6  # batches trained on
    assert same(end, other)
    assert end["step"] == 9


def test_a_trial_that_fails_leaves_nothing_behind(train):
    def fail(trainer):
        with suppress(ZeroDivisionError), trial(trainer) as steps:
            raise ZeroDivisionError(next(steps))

    plain, end = train()
    losses, after = train(fail)
    assert losses == plain
    assert same(after, end)


def test_sigterm_ends_a_trial_after_its_step(train):
    seen = []

    def signalled(trainer):
        before = snapshots.take_snapshot(trainer)
        with pytest.raises(SIGTERMException), trial(trainer) as steps:  # noqa: PT012
            for number, _ in enumerate(steps):
                seen.append(number)
                os.kill(os.getpid(), signal.SIGTERM)
        assert same(snapshots.take_snapshot(trainer), before)
        trainer._signal_connector.received_sigterm = False  # let it go on, as no run does
        trainer.lightning_module.stop_signals.received = False

    plain, end = train()
    losses, after = train(signalled)
    assert seen == [0]
    assert losses == plain
    assert same(after, end)


def test_a_signal_between_a_trial_and_the_training_is_heeded(train):
    def signalled(trainer):
        listen(trainer.lightning_module)
        os.kill(os.getpid(), signal.SIGTERM)

    done = []
    with pytest.raises(SIGTERMException):
        train(
            signalled, {number: lambda trainer: done.append(trainer.global_step) for number in range(1, 10)}
        )
    assert done == [1]


def test_who_watches_takes_no_part():
    assert snapshots.is_observer(LossCurve())
    assert not snapshots.is_observer(ExponentialMovingAverage())


def test_a_snapshot_can_be_stored_without_a_pickle(train, tmp_path):
    _, end = train()
    torch.save(end, tmp_path / "snapshot.pt")
    assert same(torch.load(tmp_path / "snapshot.pt", weights_only=True), end)


def test_other_data_is_refused(tmp_path):
    def attempt(trainer):
        with trial(trainer) as steps:
            next(steps)

    with pytest.raises(ConfigError, match="Train on --data=PretrainDataModule"):
        fit(tmp_path, module(), uneven_batches(4), [Losses(attempt)])
