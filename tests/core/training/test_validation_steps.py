"""`val_check_interval` counts optimizer steps, whatever a step accumulates; of old checkpoints too."""

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from core.__main__ import main
from core.errors import ConfigError
from plugins.checkpoints import checkpoint, finding
from plugins.cli.configuration.validation_unit import UNIT, stored_in_steps
from tests.conftest import TINY
from tests.support.tiny_training import module, tiny_gpt, trainer
from tests.support.toy import ToyData


class Validations(Callback):
    """Notes behind which steps is validated, and changes what a step accumulates, as `then` says."""

    def __init__(self, then=None):
        self.steps, self.then = [], then or {}

    def on_train_batch_end(self, trainer, *_):
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            trainer.accumulate_grad_batches = self.then.get(
                trainer.global_step, trainer.accumulate_grad_batches
            )

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


def validations(tmp_path, then=None, **options):
    """Epochs have 16 micro-batches."""
    seen = Validations(then)
    trained = module(lambda: tiny_gpt(vocab_size=64))
    trainer(tmp_path, callbacks=[seen], limit_val_batches=1, **options).fit(trained, datamodule=ToyData())
    return seen.steps


OVER_EPOCHS = {"check_val_every_n_epoch": None}


@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_steps_are_counted_over_the_run(accumulated, tmp_path):
    options = {"val_check_interval": 3, "accumulate_grad_batches": accumulated, "max_steps": 10}
    assert validations(tmp_path, **options, **OVER_EPOCHS) == [3, 6, 9]


def test_steps_are_counted_within_epochs(tmp_path):
    options = {"val_check_interval": 3, "accumulate_grad_batches": 2, "max_steps": 16}
    assert validations(tmp_path, **options) == [3, 6, 8 + 3, 8 + 6]


@pytest.mark.parametrize("interval", [1.0, 0.5])
def test_a_share_of_an_epoch_stays_one(interval, tmp_path):
    options = {"val_check_interval": interval, "accumulate_grad_batches": 2, "max_steps": 16}
    assert validations(tmp_path, **options) == ([8, 16] if interval == 1.0 else [4, 8, 12, 16])


def test_a_step_that_grows_in_mid_run_counts_as_one(tmp_path):
    options = {"val_check_interval": 4, "max_steps": 13}
    assert validations(tmp_path, then={4: 2, 10: 1}, **options, **OVER_EPOCHS) == [4, 8, 12]


def test_a_second_fit_counts_for_itself(tmp_path):
    seen = Validations()
    runner = trainer(tmp_path, callbacks=[seen], limit_val_batches=1, accumulate_grad_batches=2, val_check_interval=3,
                     max_steps=6, **OVER_EPOCHS)  # fmt: skip
    runner.fit(module(lambda: tiny_gpt(vocab_size=64)), datamodule=ToyData())
    runner.fit_loop.epoch_loop.max_steps = 12
    runner.fit(module(lambda: tiny_gpt(vocab_size=64)), datamodule=ToyData())
    assert seen.steps == [3, 6, 9, 12]


def test_an_epoch_that_is_too_short_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"is 9 optimizer steps; an epoch has only 8 of them \(16 micro-batches, 2 a"
    ):
        validations(tmp_path, val_check_interval=9, accumulate_grad_batches=2, max_steps=3)
    assert validations(
        tmp_path, val_check_interval=9, accumulate_grad_batches=2, max_steps=9, **OVER_EPOCHS
    ) == [9]
    with pytest.raises(ConfigError, match="val_check_interval is 0"):
        validations(tmp_path, val_check_interval=0, max_steps=3)


# -- checkpoints of before -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "accumulated", "steps"),
    [(8000, 32, 250), (3, 2, 1), (1, 4, 1), (5, 1, 5), (0.5, 4, 0.5), (None, 4, None)],
)
def test_a_stored_configuration_is_understood(every, accumulated, steps):
    stored = {"trainer": {"val_check_interval": every, "accumulate_grad_batches": accumulated}, "model": {}}
    assert stored_in_steps(stored, {})["trainer"]["val_check_interval"] == steps
    assert stored_in_steps(stored, {UNIT: "steps"}) == stored
    assert stored["trainer"]["val_check_interval"] == every
    assert stored_in_steps({"trainer": "nonsense"}, {}) == {"trainer": "nonsense"}


@pytest.mark.parametrize("old", [pytest.param(True, marks=pytest.mark.ci), False])
def test_a_resumed_run_validates_as_often_as_before(old, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load(yaml.safe_dump(TINY))
    config["trainer"] |= {
        "accumulate_grad_batches": 2,
        "val_check_interval": 2,
        "limit_val_batches": 1,
        "max_steps": 4,
    }
    config["trainer"] |= {"check_val_every_n_epoch": None, "logger": [{"class_path": "MetricsCSV",
                          "init_args": {"save_dir": "${run_folder}"}}]}  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config=tiny.yaml", "--trainer.default_root_dir=run"]) == 0
    path = finding.newest(tmp_path / "run")
    if old:
        content = torch.load(path, weights_only=True)
        record = content[checkpoint.RECORD]
        assert record.pop(UNIT) == "steps"
        record["config"] = record["config"].replace("val_check_interval: 2", "val_check_interval: 4")
        torch.save(content, path)
    assert main(["fit", "--ckpt_path=run", "--trainer.max_steps=8"]) == 0, capfd.readouterr().err
    rows = [line.split(",") for line in (tmp_path / "run/metrics.csv").read_text().splitlines()]
    column = rows[0].index("val/loss")
    assert [int(row[rows[0].index("step")]) for row in rows[1:] if row[column]] == [2, 4, 6, 8]
