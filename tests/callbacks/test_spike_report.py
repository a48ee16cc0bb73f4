"""SpikeReport: a poisoned run names the document, and goes on as without the report; the 20 of the benchmark take minutes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from callbacks.activation_monitor import ActivationMonitor
from callbacks.spike_report import REQUEST, ROLLBACKS, SpikeReport
from callbacks.weight_monitor import WeightMonitor
from conformance.case import tiny, with_text
from conformance.runs import run
from conformance.workshop import workshop, write_config
from core.errors import ConfigError
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.cli.preflight import ordered
from plugins.optimizers.adamw import AdamW
from tests.benchmarks.guilty_document import judge, tokenizer
from tests.support.same_run import same_bits
from tests.support.tiny_training import VOCAB, Record, module, trainer
from tests.support.tokens import StoredTokens
from toolkit.snapshot_ring import SnapshotRing


@pytest.mark.ci
def test_a_poisoned_run_names_the_document_and_goes_on_as_without_the_report(tmp_path):
    ends = []
    for reports in (True, False):
        found, poison, _report, weights = judge("random", 0, tmp_path / str(reports), reports)
        ends.append(weights)
        assert found == (poison if reports else None)
    assert all(map(torch.equal, *ends))
    text = next((tmp_path / "True/run/spike_report").glob("*.md")).read_text()
    assert f"**Guilty: document {poison}**" in text
    assert "Training went back to step" in text


@pytest.fixture
def train(tmp_path):
    """Trains some steps on random tokens with a report; returns the reports."""
    for split in ("train", "validation"):
        tokens = np.random.default_rng(0).integers(0, VOCAB, (80, 50)).tolist()
        TokenShards(1000).write(tokens, tmp_path / split, vocab_size=VOCAB)

    def run(*more, optimizer=lambda groups: AdamW(groups, lr=0.01), **options):
        torch.manual_seed(0)
        callbacks = ordered([*more, SpikeReport(window=100)])
        options = {"max_steps": 4, "limit_val_batches": 0, **options}
        runner = trainer(tmp_path / "run", callbacks=callbacks, **options)
        data = StoredTokens(str(tmp_path), 12, 4, shuffle=True)
        data.vocab_size, data.tokenizer_json = VOCAB, tokenizer()
        runner.fit(module(optimizer=optimizer), datamodule=data)
        return [
            json.loads(path.read_text()) for path in sorted((tmp_path / "run/spike_report").glob("*.json"))
        ]

    return run


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_report_on_request_lists_the_documents_of_the_step(train, tmp_path, micro_batches):
    Path(tmp_path, "run").mkdir()
    Path(tmp_path, "run", REQUEST).touch()
    (report,) = train(
        accumulate_grad_batches=micro_batches, use_distributed_sampler=False, log_every_n_steps=2
    )
    assert report["step"] == 2
    assert report["guilty"] is None  # an ordinary step
    assert not Path(tmp_path, "run", REQUEST).exists()
    lines = (
        next((tmp_path / "run/spike_report").glob("*.md"))
        .read_text()
        .partition("## Documents")[2]
        .splitlines()
    )
    places = [line.split(" | ")[0] for line in lines if line.startswith("| 0")]
    parts = [part for place in places for part in place.split("; ")]
    assert sum(int(part.rpartition("+")[2]) for part in parts) == 4 * 12 * micro_batches
    assert set(report["blocks"]) >= {"embed_tokens", "layers.0", "layers.1"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_under_zero_a_report_says_what_it_says_in_one_process(stage):
    def train(name, rows, ranks=1, strategy="auto", report=True):
        folder = workshop() / f"spike-report-{name}"
        folder.mkdir(exist_ok=True)
        (folder / REQUEST).touch()
        callbacks = [
            {"class_path": "conformance.recorder.Recorder", "init_args": {"folder": str(folder)}},
            *([{"class_path": "SpikeReport", "init_args": {"window": 100}}] if report else []),
            {"class_path": "conformance.recorder.Saver", "init_args": {"folder": str(folder), "save_at": 4}},
        ]
        trainer = {
            "devices": ranks, "strategy": strategy, "default_root_dir": str(folder), "callbacks": callbacks,
            "max_steps": 4, "log_every_n_steps": 2, "plugins": [{"class_path": "AtomicCheckpoint"}],
        }  # fmt: skip
        optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
        overlay = {
            "trainer": trainer,
            "model": {"optimizer": optimizer},
            "data": {"init_args": {"batch_size": rows}},
        }
        values = with_text(tiny([overlay]), {})
        done = run(["fit", f"--config={write_config(folder.name, values)}"], folder, ranks=ranks)
        assert done.code == 0, done.error_text
        return done

    def said(done):
        return json.loads(next((done.folder / "spike_report").glob("*.json")).read_text())

    zero = {"class_path": "DeepSpeedZero", "init_args": {"stage": stage, "persistence_threshold": 0}}
    found, alone = train(f"zero-{stage}", 2, 2, zero), train("alone", 4)
    one, other = said(found), said(alone)
    assert one.pop("blocks") == pytest.approx(other.pop("blocks"), rel=1e-3)  # rounded to the weights
    assert one == other
    without = train(f"without-{stage}", 2, 2, zero, report=False)
    assert same_bits(found.checkpoint()["state_dict"], without.checkpoint()["state_dict"])


class Planted(Callback):
    """From a step on, the gradients of a block are 10 times as large; two steps later those of all blocks."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for number, block in enumerate(pl_module.network.blocks):
            if trainer.global_step + 1 >= (20 if number == 1 else 22):
                for parameter in block.parameters():
                    parameter.grad.mul_(10)


@pytest.mark.parametrize("recorded", [True, False])
def test_the_block_that_moved_first_is_recorded_or_replayed_and_the_report_says_which(
    train, tmp_path, recorded
):
    Path(tmp_path, "run").mkdir()
    Path(tmp_path, "run", REQUEST).touch()
    monitors = [WeightMonitor(every_n_steps=1)] if recorded else []
    slow = lambda groups: torch.optim.SGD(groups, lr=0.005)  # noqa: E731 - updates in proportion to gradients
    (report,) = train(Planted(), *monitors, optimizer=slow, max_steps=25, log_every_n_steps=24)
    text = next((tmp_path / "run/spike_report").glob("*.md")).read_text()
    left = report["left_their_band"]
    if recorded:
        assert [(one["block"], one["step"]) for one in left] == [("block.1", 20), ("block.0", 22)]
        assert "Recorded by WeightMonitor: **block.1**, from step 20 on." in text
        assert left[0]["ratio"] > left[0]["high"] > left[0]["low"] > 0
    else:
        assert left is None
        assert f"Not recorded (WeightMonitor records it). By the trial step: {next(iter(report['blocks']))} moves most" in text  # fmt: skip


class GoesBack(Callback):
    """Goes back to the first step, once, as ConvergenceMonitor does when it begins again."""

    ring = None

    def on_train_batch_start(self, trainer, *args):
        if self.ring is None:
            self.ring = SnapshotRing(100)
            self.ring.add(trainer)
        elif trainer.global_step == 3 and len(self.ring):
            assert self.ring.go_back(trainer, 0) == 0
            self.ring = ()


def test_what_goes_back_for_another_reason_is_no_spike(train, tmp_path):
    earlier = dict.fromkeys(("loss", "gradient_norm"), 9.0) | dict.fromkeys(
        ("loss_limit", "gradient_norm_limit"), 1.0
    )
    Path(tmp_path, "run").mkdir()
    # a rollback of this run, but not the one that just happened
    Path(tmp_path, "run", ROLLBACKS).write_text(json.dumps([earlier | {"step": 3, "rewound_to_step": 2}]))
    going = GoesBack()
    assert train(going) == []
    assert going.ring == ()


def test_monitors_do_not_see_the_trial_steps(train, tmp_path):
    found = []
    Path(tmp_path, "run").mkdir()
    for asked in (False, True):
        if asked:
            Path(tmp_path, "run", REQUEST).touch()
        record = Record()
        # the report on step 2 is made as step 3 begins
        assert len(train(ActivationMonitor(3), record, log_every_n_steps=2)) == asked
        found.append({k: v for k, v in record.figures[-1].items() if "activation/" in k})
    assert found[0] == found[1]
    assert found[0]


def test_mistakes():
    with pytest.raises(ConfigError, match="window >= 2"):
        SpikeReport(window=1)
