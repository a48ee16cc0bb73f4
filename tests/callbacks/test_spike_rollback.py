"""SpikeRollback: a poisoned run against a clean one, and against one that skips the same data by itself."""

import csv
import json
import math
import pydoc_data.topics
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.exponential_moving_average import ExponentialMovingAverage
from callbacks.gradient_clip import GradientClip
from callbacks.loss_curve import LossCurve, counts
from callbacks.periodic_checkpoint import PeriodicCheckpoint
from callbacks.sequence_length_schedule import SequenceLengthSchedule
from callbacks.spike_rollback import SpikeRollback
from callbacks.throughput import Throughput
from conformance.waits import Waits
from core.__main__ import main
from core.errors import ConfigError
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.cli import preflight
from plugins.loggers.metrics_csv import MetricsCSV
from plugins.networks.gpt import GPT
from plugins.optimizers.adamw import AdamW
from plugins.schedules.warmup_cosine import WarmupCosine
from tests.support.poison import Poison
from tests.support.same_states import same
from tests.support.tiny_training import VOCAB, fit, module, tiny_gpt, trainer, uneven_batches
from tests.support.tokens import StoredTokens
from toolkit import snapshots
from toolkit.snapshot_ring import SnapshotRing

STEP = 2 * 4 * 12
"""Tokens of an optimizer step: two micro-batches of 4 rows of 12."""

SMALL = {"window": 4, "sigma": 100.0, "rewind_steps": 2, "skip_batches": 6, "snapshot_every_n_steps": 2}
"""Of runs of some steps, with gradients poisoned by more than random ones ever differ."""


def poison(*steps, gradient=1e4):
    """Spoils the data that a run without rollbacks reads in these steps, counted from 1."""
    return Poison((steps[0] - 1) * STEP, steps[-1] * STEP, gradient)


class Steps(Callback):
    """Notes loss and rate of each optimizer step; does `then[n]` after the n-th that is taken."""

    def __init__(self, then=None, first=None):
        self.then, self.first, self.losses, self.rates = then or {}, first, [], []

    def on_train_start(self, trainer, pl_module):
        if self.first:
            self.first(trainer)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, *_):
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self.losses.append(float(pl_module.step_loss))
            self.then.get(len(self.losses), lambda trainer: None)(trainer)


@pytest.fixture
def train(tmp_path):
    """Trains on random tokens; returns what happened, and the state of training at the end."""
    for split in ("train", "validation"):
        tokens = np.random.default_rng(0).integers(0, VOCAB, 4001)
        TokenShards(1000).write([tokens], tmp_path / split, vocab_size=VOCAB)

    def run(*callbacks, then=None, first=None, ckpt_path=None, folder="run", **options):
        torch.manual_seed(0)
        steps = Steps(then, first)
        defaults = {"max_steps": 14, "accumulate_grad_batches": 2, "use_distributed_sampler": False}
        defaults |= {"log_every_n_steps": 2, "limit_val_batches": 0}
        first_of_all = [steps, *(callback for callback in callbacks if isinstance(callback, Poison))]
        ordered = preflight.ordered([*first_of_all, *(c for c in callbacks if c not in first_of_all)])
        defaults["enable_checkpointing"] = any(isinstance(c, PeriodicCheckpoint) for c in callbacks)
        runner = trainer(tmp_path / folder, callbacks=ordered, **(defaults | options))
        trained = module(
            optimizer=lambda groups: AdamW(groups, lr=0.01),
            lr_scheduler=lambda o: WarmupCosine(o, warmup_steps=3, total_steps=14),
        )
        data = StoredTokens(str(tmp_path), 12, 4, shuffle=True)
        data.vocab_size = VOCAB
        try:
            runner.fit(trained, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        except ZeroDivisionError:
            return SimpleNamespace(losses=steps.losses)
        end = snapshots.take_snapshot(runner) | {"cursor": data.state_dict()["position"]["cursor"]}
        guard = end["callbacks"].pop("SpikeRollback", {})
        end["callbacks"] = {name: state for name, state in end["callbacks"].items() if state}
        path = tmp_path / folder / "spike_rollbacks.json"
        events = json.loads(path.read_text()) if path.exists() else []
        return SimpleNamespace(
            losses=steps.losses, rates=steps.rates, end=end, guard=guard, events=events, trainer=runner
        )

    return run


def shaping():
    """Callbacks whose state or timing training depends on."""
    return [
        ExponentialMovingAverage(0.9),
        GradientClip("adaptive", 0.5, warmup_steps=3),
        SequenceLengthSchedule(3, 10, "doubling"),
    ]


# -- the proof ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The documentation that every Python carries, byte by byte."""
    folder = tmp_path_factory.mktemp("text")
    text = "".join(pydoc_data.topics.topics.values()).encode()[:460_000]
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    for split, part in {"train": tokens[:-20_000], "validation": tokens[-20_000:]}.items():
        TokenShards(100_000).write([part], folder / split, vocab_size=256)
    shares = np.bincount(tokens[-20_000:]) / 20_000
    shares = shares[shares > 0]
    return folder, float(-(shares * np.log(shares)).sum())


@pytest.mark.ci
def test_a_poisoned_run_diverges_without_it_and_with_it_ends_as_the_clean_one(text, tmp_path):
    folder, by_frequencies = text
    poisoned = {"first": 100 * 512, "last": 106 * 512, "rate": 100.0, "garbage": True}
    guard = SpikeRollback(window=32, rewind_steps=10, skip_batches=30, snapshot_every_n_steps=5)

    def validation_loss(*callbacks):
        torch.manual_seed(0)
        network = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
        trained = module(
            lambda: GPT(256, max_sequence_length=64, n_layer=1, n_head=2, n_embd=32, **network),
            optimizer=lambda groups: AdamW(groups, lr=6e-3),
            lr_scheduler=lambda o: WarmupCosine(o, warmup_steps=20),
        )
        data = StoredTokens(str(folder), 64, 8, shuffle=True)
        data.vocab_size, data.train_tokens = 256, 440_000
        # in float64: 200 steps are the same on every processor
        options = {
            "max_steps": 200,
            "log_every_n_steps": 5,
            "use_distributed_sampler": False,
            "precision": "64-true",
        }
        trainer(tmp_path, callbacks=list(callbacks), limit_val_batches=0, **options).fit(trained, data)
        [figures] = trainer(tmp_path).validate(trained, data, verbose=False)
        return figures["val/loss"]

    clean = validation_loss()
    assert clean < 0.8 * by_frequencies
    assert validation_loss(Poison(**poisoned)) > by_frequencies  # all is lost that was learnt
    assert validation_loss(Poison(**poisoned), guard) == pytest.approx(clean, rel=0.01)
    [rollback] = guard.rollbacks
    assert rollback["step"] == 101
    assert rollback["rewound_to_step"] == 90


# -- what a rollback does -------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(("at", "rewind", "to", "seen"), [(7, 2, 4, 8), (3, 9, 0, 4), (8, 1, 6, 8)])
def test_it_is_the_run_that_skips_the_same_data_by_itself(train, on_disk, at, rewind, to, seen):
    def skip(trainer):  # six steps
        trainer.datamodule.skip_batches(12)

    guard = SpikeRollback(**SMALL | {"rewind_steps": rewind, "on_disk": on_disk})
    found = train(guard, poison(at, gradient=1e4 if at > 4 else math.nan), *shaping())
    expected = train(*shaping(), then={to: skip}, first=None if to else skip, folder="by-itself")
    assert found.losses[seen:] == expected.losses[to:]
    assert same(found.end, expected.end)
    [event] = found.events
    assert (event["step"], event["seen_at_step"], event["rewound_to_step"]) == (at, seen, to)
    assert event["batches_skipped"] == 6
    if at > 4:
        assert event["gradient_norm"] > event["gradient_norm_limit"]
        assert event["loss"] < event["loss_limit"]
    else:  # the window is not full
        assert (event["gradient_norm"], event["gradient_norm_limit"], event["loss_limit"]) == (
            "nan",
            "inf",
            "inf",
        )


def test_without_a_spike_nothing_happens(train):
    plain, found = train(*shaping()), train(SpikeRollback(**SMALL), *shaping(), folder="guarded")
    assert found.losses == plain.losses
    assert same(found.end, plain.end)
    assert not found.events


@pytest.mark.parametrize("gradient", [1e4, math.nan])
def test_what_is_not_finite_is_a_spike_before_the_window_is_full(train, gradient):
    found = train(SpikeRollback(**SMALL | {"window": 100}), poison(5, gradient=gradient))
    assert bool(found.events) == (not math.isfinite(gradient))
    if found.events:
        assert (found.events[0]["gradient_norm"], found.events[0]["rewound_to_step"]) == (str(gradient), 2)


def test_a_gradient_norm_of_the_long_tail_is_no_spike_and_one_of_many_times_the_mean_is(train):
    """Norms of a window differ so little here that 5 times their mean is far beyond 8 deviations."""
    options = SMALL | {"window": 6, "sigma": 8.0}
    for factor, gradient, steps in [(10.0, 5.0, []), (1.0, 5.0, [9]), (10.0, 50.0, [9])]:
        found = train(SpikeRollback(**options, norm_factor=factor), poison(9, gradient=gradient))
        assert [event["step"] for event in found.events] == steps, factor
        if factor == 10.0 and steps:
            assert found.events[0]["gradient_norm_limit"] * 4 < found.events[0]["gradient_norm"]


def test_gradients_that_overflow_in_fp16_are_no_spike(train):
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**60))
    norms = []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            norms.append(float(pl_module.gradient_norm(optimizer)))

    found = train(SpikeRollback(**SMALL), Norms(), plugins=[precision], max_steps=60)
    assert not all(map(math.isfinite, norms[:20]))
    assert all(map(math.isfinite, norms[-5:]))
    assert not found.events


@pytest.mark.parametrize(
    ("save", "steps", "seen"), [({}, [7], 10), ({"every_n_steps": 8}, [7], 8), ({}, [13], 14)]
)
def test_the_host_looks_before_a_checkpoint_and_the_end_of_the_run(train, tmp_path, save, steps, seen):
    """Figures are logged every 5 steps; else nothing is saved before a rollback that has seen the spike."""
    saver = [PeriodicCheckpoint(**save, dirpath=str(tmp_path / "checkpoints"))] if save else []
    found = train(SpikeRollback(**SMALL), poison(*steps), *saver, log_every_n_steps=5)
    assert [event["seen_at_step"] for event in found.events] == [seen]


def test_the_host_looks_before_a_validation(train):
    options = {"limit_val_batches": 1, "val_check_interval": 7, "check_val_every_n_epoch": None}
    found = train(SpikeRollback(**SMALL), poison(6), log_every_n_steps=5, **options)
    assert [event["seen_at_step"] for event in found.events] == [7]


def test_tries_are_counted_in_one_trouble_and_begin_anew_behind_it(train):
    guard = SpikeRollback(**SMALL | {"skip_batches": 0, "retries": 2, "lr_factor": 0.5})
    found = train(
        guard, poison(7, 10), poison(26), max_steps=30
    )  # 9 and 10: what comes after the first rewind
    assert [(event["step"], event["try"]) for event in found.events] == [(7, 1), (5, 2), (20, 1)]
    plain = train(folder="plain", max_steps=30)
    step, waiting, last = 0, list(found.events), None
    for rate in found.rates:
        step += 1
        troubled = last is not None and step <= last["step"] + 2
        assert rate == pytest.approx(
            plain.rates[step - 1] * (0.5 ** last["try"] if troubled else 1.0), abs=1e-12
        )
        if waiting and step == waiting[0]["seen_at_step"]:
            last = waiting.pop(0)
            step = last["rewound_to_step"]
    assert (step, waiting) == (30, [])


def test_when_tries_are_used_up_the_run_stops(train):
    guard = SpikeRollback(**SMALL | {"skip_batches": 0, "retries": 2})
    with pytest.raises(
        ConfigError, match=r"gone back as often as it may \(retries: 2\).*lower learning rate"
    ) as error:
        train(guard, poison(7, 40))
    assert str(error.value).count("\n") < 10
    assert len(guard.rollbacks) == 2


def test_a_run_that_begins_in_a_spike_says_so(train):
    def stop(trainer):
        raise ZeroDivisionError

    saver = Saves(5)
    train(SpikeRollback(**SMALL), poison(5), saver, then={6: stop}, log_every_n_steps=10)
    with pytest.raises(ConfigError, match="resumed in the middle of a spike"):
        train(SpikeRollback(**SMALL), ckpt_path=saver.path, log_every_n_steps=10)


class Saves(Callback):
    """Saves where nobody expects it."""

    def __init__(self, *steps):
        self.steps, self.path = steps, None

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.steps and not trainer.fit_loop.epoch_loop._should_accumulate():
            self.path = f"{trainer.default_root_dir}/saved.ckpt"
            trainer.save_checkpoint(self.path)


# -- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_disk", "spike", "stop", "newest"),
    [
        pytest.param(
            True, 9, 9, "step-00000008", marks=pytest.mark.ci
        ),  # before the spike is seen: the ring is needed at once
        pytest.param(
            True, 9, 15, "step-00000008", marks=pytest.mark.ci
        ),  # after it, in steps that come again
        pytest.param(True, 9, 12, "step-00000004", marks=pytest.mark.ci),  # right after the rewind
        pytest.param(
            False, 13, 9, "step-00000008", marks=pytest.mark.ci
        ),  # the new ring reaches far enough by then
        (False, 9, 15, "step-00000008"),
    ],
)
def test_a_resumed_run_is_bitwise_the_one_that_did_not_stop(train, tmp_path, on_disk, spike, stop, newest):
    def die(trainer):
        raise ZeroDivisionError

    def callbacks(folder):
        guard = SpikeRollback(**SMALL | {"rewind_steps": 4, "on_disk": on_disk, "lr_factor": 0.5})
        saver = PeriodicCheckpoint(4, keep=-1, dirpath=str(tmp_path / folder / "checkpoints"))
        return [guard, poison(spike), saver, *shaping()]

    whole = train(*callbacks("whole"), folder="whole", plugins=[AtomicCheckpoint()])
    assert len(whole.events) == 1
    killed = train(*callbacks("killed"), folder="killed", then={stop: die}, plugins=[AtomicCheckpoint()])
    assert killed.losses == whole.losses[:stop]
    saved = sorted((tmp_path / "killed/checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    assert saved[-1].stem == newest
    found = train(*callbacks("killed"), folder="killed", ckpt_path=saved[-1], plugins=[AtomicCheckpoint()])
    assert found.losses == whole.losses[-len(found.losses) :]
    assert same(found.end, whole.end)
    assert found.guard["rollbacks"] == whole.guard["rollbacks"]
    assert same(found.guard["window"], whole.guard["window"])
    if len(found.losses) > 10:
        assert found.events == whole.events


def test_with_snapshots_on_disk_a_signal_after_a_spike_does_not_change_the_run(train, tmp_path):
    def end(trainer):
        trainer._signal_connector.received_sigterm = True

    def callbacks(folder):
        guard = SpikeRollback(**SMALL | {"on_disk": True})
        saver = PeriodicCheckpoint(4, dirpath=str(tmp_path / folder / "checkpoints"))
        return [guard, poison(9), saver, *shaping()]

    whole = train(*callbacks("whole"), folder="whole", plugins=[AtomicCheckpoint()])
    with pytest.raises(SIGTERMException):
        train(*callbacks("ended"), folder="ended", then={9: end}, plugins=[AtomicCheckpoint()])
    saved = tmp_path / "ended/checkpoints/step-00000009.ckpt"
    found = train(*callbacks("ended"), folder="ended", ckpt_path=saved, plugins=[AtomicCheckpoint()])
    assert found.events == whole.events  # seen at the same step, too
    assert found.losses == whole.losses[9:]
    assert same(found.end, whole.end)


def test_trial_steps_before_a_resumed_run_do_not_lose_its_snapshots():
    resumed = SpikeRollback(on_disk=True)
    ring = {"number": 7, "entries": [[6, 100], [7, 150]]}
    resumed.load_state_dict(SpikeRollback().state_dict() | {"ring": ring})
    resumed.load_state_dict(resumed.state_dict())  # as `toolkit.trials` does, before training starts
    assert resumed.state_dict()["ring"] == ring


def test_files_of_snapshots_are_those_that_the_ring_and_two_checkpoints_need(train, tmp_path):
    numbers = []

    def look(trainer):
        numbers.append(sorted(int(path.name[:8]) for path in (tmp_path / "run/snapshots").iterdir()))

    saver = PeriodicCheckpoint(6, dirpath=str(tmp_path / "run/checkpoints"))
    guard = SpikeRollback(**SMALL | {"on_disk": True})
    train(guard, saver, then={5: look, 11: look, 14: look}, plugins=[AtomicCheckpoint()])
    # snapshots 1, 2, 3... of steps 0, 2, 4...; two reach back 2 steps; those of steps 4 and 6, 10 and 12 are saved
    assert numbers == [[2, 3], [3, 4, 5, 6], [3, 4, 6, 7]]


def test_snapshots_of_other_shapes_are_not_taken_up(train, tmp_path):
    saver = PeriodicCheckpoint(6, dirpath=str(tmp_path / "run/checkpoints"))
    found = train(SpikeRollback(**SMALL | {"on_disk": True}), saver, plugins=[AtomicCheckpoint()])
    ring = SnapshotRing(2, tmp_path / "run/snapshots")
    ring.find(found.trainer, found.guard["ring"])
    assert len(ring) == 2
    found.trainer.lightning_module.network = tiny_gpt(n_embd=32)
    ring = SnapshotRing(2, tmp_path / "run/snapshots")
    ring.find(found.trainer, found.guard["ring"])
    assert len(ring) == 0


# -- others that count steps ----------------------------------------------------------------------


def test_steps_that_come_again_are_logged_saved_and_drawn_again(train, tmp_path):
    saver = PeriodicCheckpoint(6, keep=-1, dirpath=str(tmp_path / "run/checkpoints"))
    curve, logger = LossCurve(), MetricsCSV(str(tmp_path / "run"))
    guard = SpikeRollback(**SMALL | {"rewind_steps": 4})
    found = train(guard, poison(9), saver, curve, Throughput(), logger=[logger], plugins=[AtomicCheckpoint()])
    [event] = found.events
    assert (event["seen_at_step"], event["rewound_to_step"]) == (10, 4)
    rows = list(csv.DictReader((tmp_path / "run/metrics.csv").open()))
    assert [int(row["step"]) for row in rows] == [2, 4, 6, 8, 10, 12, 14]
    assert [row["spike_rollback/rollbacks"] for row in rows] == ["0.0"] * 2 + ["1.0"] * 5
    steps = np.array([step for step, _, _ in curve.state_dict()["training"]])
    assert steps.tolist() == [2, 4, 6, 8, 10, 4 + 2, 8, 10, 12, 14]
    assert steps[counts(steps)].tolist() == [2, 4, 6, 8, 10, 12, 14]
    tokens = [tokens for _, tokens, _ in curve.state_dict()["training"]]
    assert tokens[:5] == [2 * STEP * n for n in range(1, 6)]
    assert tokens[5] == 6 * STEP
    saved = torch.load(tmp_path / "run/checkpoints/step-00000006.ckpt", weights_only=True)
    assert len(saved["callbacks"]["SpikeRollback"]["rollbacks"]) == 1  # overwritten
    assert (tmp_path / "run/loss_curve.png").exists()


def test_the_best_checkpoint_is_forgotten_when_training_goes_back_behind_it(tmp_path):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    saver = PeriodicCheckpoint(dirpath=str(tmp_path), keep_best=True)
    saver.setup(trainer, None, "fit")
    saver.on_train_start(trainer, None)
    saver._best, saver.best_model_path, saver._saved_step = 1.0, "folder/step-00000040.ckpt", 40
    saver._go_back(trainer, 40)
    assert saver.best_model_path
    saver._go_back(trainer, 30)
    assert (saver._best, saver.best_model_path) == (math.inf, "")


# -- what it costs, what it refuses -----------------------------------------------------------------


def test_ordinary_steps_do_not_wait(train):
    places = {}

    class Watch(Callback):
        def on_train_batch_start(self, trainer, pl_module, *_):
            if trainer.fit_loop.epoch_loop.batch_progress.current.ready % 2:
                self.waits = Waits()
                self.waits.start(trainer.optimizers)

        def on_train_batch_end(self, trainer, pl_module, *_):
            if not trainer.fit_loop.epoch_loop._should_accumulate():
                self.waits.stop()
                places[trainer.global_step] = [p for p in self.waits.places if "test_spike" not in p]

    train(Watch(), SpikeRollback(**SMALL), log_every_n_steps=7)
    assert places[7]  # it counts
    assert {step: found for step, found in places.items() if found and step not in (1, 7, 14)} == {}


@pytest.mark.parametrize("reach", [1, 3, 10, 100])
@pytest.mark.parametrize("every", [1, 7, 30, 50])
def test_a_ring_reaches_back_and_holds_no_more_than_that_takes(reach, every, monkeypatch):
    monkeypatch.setattr(snapshots, "take_snapshot", lambda trainer: {})
    ring, steps = SnapshotRing(reach), []
    runner = SimpleNamespace(global_rank=0, world_size=1)
    for step in range(0, 1000, every):
        runner.global_step = step
        ring.add(runner)
        steps = [step for _, step in ring.state_dict()["entries"]]
        assert steps[0] == 0 or steps[0] <= step + 1 - reach  # for a spike in the next step
        assert all(later > step + 1 - reach for later in steps[1:])
    assert all(b - a == every for a, b in pairwise(steps))


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1}, {"sigma": 0.0}, {"rewind_steps": 0}, {"skip_batches": -1}, {"retries": 0},
        {"lr_factor": 0.0}, {"lr_factor": 1.5}, {"norm_factor": 0.5}, {"snapshot_every_n_steps": 0},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=f"SpikeRollback takes.*{next(iter(options))}"):
        SpikeRollback(**options)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (None, "which ToyData cannot: set --data=PretrainDataModule"),
        ("SkipStep", "both react to the same outliers"),
        ("NonFiniteGuard", "it ends the run at the first loss that is not finite"),
    ],
)
def test_what_it_does_not_go_with_is_refused_before_the_start(
    other, message, tiny, tmp_path, monkeypatch, capsys
):
    names = filter(None, ["SpikeRollback", other])
    tiny["trainer"]["callbacks"] += [{"class_path": name} for name in names]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--config=run.yaml"]) == 2
    assert message in capsys.readouterr().err


def test_at_training_other_data_is_refused_too(tmp_path):
    with pytest.raises(ConfigError, match="Train on --data=PretrainDataModule"):
        fit(tmp_path, module(tiny_gpt), uneven_batches(2), [SpikeRollback()])
