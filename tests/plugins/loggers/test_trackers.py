"""Trackers: growing steps and attempts over rollbacks and resumes; what the real packages hold afterwards, offline."""

import os

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from callbacks.periodic_checkpoint import PeriodicCheckpoint
from callbacks.spike_rollback import SpikeRollback
from conformance.runs import run
from core import catalog
from core.errors import ConfigError
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.cli import preflight
from plugins.loggers.tracker import Tracker, flat
from plugins.optimizers.adamw import AdamW
from tests.support.poison import Poison
from tests.support.tiny_training import VOCAB, module, trainer
from tests.support.tokens import StoredTokens
from tests.support.tracker_stores import COPIES, READERS, ROWS, needs
from toolkit import pictures
from toolkit.checkpoint_names import step_named


class Kept(Tracker):
    """Keeps what a tracker's server would."""

    server = {}
    fails = False

    def _begin(self, run_id, name):
        return run_id or "first", self.server.setdefault(
            run_id or "first", {"rows": [], "config": {}, "files": []}
        )

    def _configure(self, config):
        self.run["config"].update(config)

    def _send(self, step, figures):
        if self.fails:
            raise OSError("no connection")
        self.run["rows"].append((step, dict(figures)))

    def _send_file(self, path):
        self.run["files"].append(self._picture_name(path))

    def _send_checkpoint(self, path, step, copy):
        self.run["files"].append((path.name, step, copy))

    def _end(self, failed):
        self.run["failed"] = failed


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(Kept, "server", {})
    return Kept.server


def log(logger, steps, loss=1.0):
    for step in steps:
        logger.log_metrics({"train/loss": loss, "train/tokens": 100.0 * step}, step)
        logger.log_metrics({"other/figure": 2.0}, step)


def attempts(rows):
    return [(step, row["optimizer_step"], row["attempt"]) for step, row in rows]


def go_through(folder, kind):
    """Logs a run with a rollback, killed, resumed from an earlier step, and resumed where it ended."""
    logger = kind(str(folder))
    log(logger, (10, 20, 30))
    logger.go_back(17)
    log(logger, (20, 30))
    logger.finalize("success")
    logger = kind(str(folder))
    logger.log_metrics({"val/loss": 3.0}, 20)  # it resumes step 20, and logged 30 before
    log(logger, (25,))
    logger.finalize("failed")
    logger = kind(str(folder))
    log(logger, (30,))
    logger.finalize("success")


STEPS = [
    (10, 10, 1),
    (20, 20, 1),
    (30, 30, 1),
    (31, 20, 2),
    (41, 30, 2),
    (42, 20, 3),
    (47, 25, 3),
    (52, 30, 3),
]
"""Step of the tracker, optimizer step, attempt, of the above."""


def test_steps_grow_over_rollbacks_and_resumes(tmp_path, server):
    go_through(tmp_path, lambda folder: Kept(folder, None))
    assert list(server) == ["first"]
    assert attempts(server["first"]["rows"]) == STEPS
    assert server["first"]["rows"][0][1].keys() >= {"train/loss", "train/tokens", "other/figure"}
    assert server["first"]["failed"] is False


def test_a_rollback_that_is_not_beyond_a_logged_step_begins_an_attempt_too(tmp_path, server):
    logger = Kept(str(tmp_path), None)
    log(logger, (10,))
    logger.go_back(10)
    log(logger, (20,))
    logger.finalize("success")
    assert attempts(server["first"]["rows"]) == [(10, 10, 1), (20, 20, 2)]


def test_validation_of_the_step_that_is_resumed_is_no_attempt(tmp_path, server):
    logger = Kept(str(tmp_path), None)
    log(logger, (10,))
    logger.finalize("success")
    logger = Kept(str(tmp_path), None)
    logger.log_metrics({"val/loss": 3.0}, 10)
    log(logger, (10,))  # but training it again is: the run was resumed from a step before
    logger.finalize("success")
    assert attempts(server["first"]["rows"]) == [(10, 10, 1), (10, 10, 1), (11, 10, 2)]


def test_what_cannot_be_sent_is_sent_later(tmp_path, server, monkeypatch):
    logger = Kept(str(tmp_path), None)
    monkeypatch.setattr(Kept, "fails", True)
    with pytest.warns(UserWarning, match="2 rows will be sent later: no connection"):
        log(logger, (10, 20, 30))
    assert server["first"]["rows"] == []
    monkeypatch.setattr(Kept, "fails", False)
    log(logger, (40,))
    assert [step for step, _ in server["first"]["rows"]] == [10, 20, 30]
    monkeypatch.setattr(Kept, "fails", True)
    with pytest.warns(UserWarning, match="1 rows of figures could not be sent"):
        logger.finalize("success")


def test_pictures_and_checkpoints_are_sent_when_they_change(tmp_path, server):
    logger = Kept(str(tmp_path), "reference")
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-00000010.ckpt", "step-00000020.abandoned.ckpt", "other.ckpt"):
        (tmp_path / "checkpoints" / name).write_bytes(b"x")
    (tmp_path / "loss.png").write_bytes(b"1")
    for step in (9, 10):
        (tmp_path / "evaluation" / f"step-{step:08d}").mkdir(parents=True)
        (tmp_path / "evaluation" / f"step-{step:08d}" / "recall.png").write_bytes(b"1")
    (tmp_path / "link.png").symlink_to("/etc/hostname")
    log(logger, (10,))
    logger.log_metrics({"val/loss": 1.0}, 10)
    log(logger, (20,))
    sent = ["evaluation/recall", "loss", ("step-00000010.ckpt", 10, False)]
    assert server["first"]["files"] == sent
    os.utime(tmp_path / "loss.png", ns=(1, 1))
    logger.finalize("success")
    assert server["first"]["files"][3:] == ["loss"]


def test_other_ranks_send_and_write_nothing(tmp_path, server, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    go_through(tmp_path, lambda folder: Kept(folder, None))
    assert server == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", ["{", '{"run": "../x", "step": 1, "ahead": 0, "attempt": 1}', '{"run": "a"}', "[]"]
)
def test_a_foreign_note_is_named(content, tmp_path, server):
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "Kept.json").write_text(content)
    with pytest.raises(ConfigError, match="Remove it"):
        Kept(str(tmp_path), None).log_graph(None)


def test_a_configuration_is_flat_with_classes_by_name():
    callbacks = [{"class_path": "callbacks.x.Watch", "init_args": {"every": 3}}, {"class_path": "Plain"}]
    found = dict(flat({"trainer": {"callbacks": callbacks, "plugins": [1, 2]}, "seed": 0}))
    assert found == {
        "trainer.callbacks.Watch.class_path": "callbacks.x.Watch",
        "trainer.callbacks.Watch.every": 3,
        "trainer.callbacks.Plain.class_path": "Plain",
        "trainer.plugins": [1, 2],
        "seed": 0,
    }


# -- the real packages --------------------------------------------------------------------------------


OWN = {"Trackio": {"project": "tracker-stores"}}
"""Trackio keeps its projects in one place for all tests."""


@pytest.mark.ci
@pytest.mark.parametrize("name", READERS)
def test_a_run_in_a_real_tracker(name, tmp_path):
    """A run through the command line, resumed from its last checkpoint: what the tracker's own package reads of it."""
    needs(name)
    folder = tmp_path / "runs" / "small"
    config = {
        "base": "defaults",
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 6,
            "log_every_n_steps": 2,
            "val_check_interval": 4,
            "default_root_dir": str(folder),
            "callbacks": {"PeriodicCheckpoint": {"every_n_steps": 4, "keep": -1}},
            "logger+": [{"class_path": name, "init_args": {"checkpoints": "reference", **OWN.get(name, {})}}],
        },
        "model": {"network": {"class_path": "GPT", "init_args": {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 512,
                                                                 "max_sequence_length": 16}}},
        "data": {"init_args": {"source": str(tmp_path / "text"), "cache_dir": str(tmp_path / "cache"), "sequence_length": 16,
                               "batch_size": 2, "tokenizer": {"class_path": "BPETokenizer", "init_args": {"vocab_size": 300}}}},
    }  # fmt: skip
    (tmp_path / "text").mkdir()
    words = ("a cat sat on the mat and saw that it was good " * 40).split()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(" ".join(words[number:]) + f" {number}")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    done = run(["fit", f"--config={tmp_path / 'my.yaml'}"], tmp_path)
    assert done.code == 0, done.error_text
    (folder / "checkpoints" / "step-00000006.ckpt").unlink()
    done = run(["fit", f"--ckpt_path={folder}", "--trainer.max_steps=10"], tmp_path)
    assert done.code == 0, done.error_text
    found = READERS[name](folder)
    assert found.runs == 1
    rows = {step: row for step, row in found.rows.items() if "train/loss" in row}
    assert attempts(rows.items()) == [(2, 2, 1), (4, 4, 1), (6, 6, 1), (7, 6, 2), (9, 8, 2), (11, 10, 2)]
    again = [row["train/loss"] for row in rows.values()][2:4]
    assert again[0] == again[1]  # the same step, trained again
    assert all(row["train/tokens"] == row["optimizer_step"] * 32 for row in rows.values())
    assert found.config["model.network.n_embd"] in (16, "16")
    assert found.config["technique.PeriodicCheckpoint"].startswith("leyden ")
    assert found.config["technique.GPT"].split()[1][0].isdigit()
    assert "loss_curve" in found.pictures
    assert {4, 10} <= found.checkpoints


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "Wandb")) for name in COPIES]
)
def test_a_rollback_is_an_attempt_in_a_real_tracker_which_holds_copies_of_checkpoints(name, tmp_path):
    """Step 9 is poisoned, step 10 sees it, and training goes back to step 6."""
    needs(name)
    for split in ("train", "validation"):
        tokens = np.random.default_rng(0).integers(0, VOCAB, 4001)
        TokenShards(1000).write([tokens], tmp_path / split, vocab_size=VOCAB)
    folder = tmp_path / "runs" / "poisoned"
    own = {"Trackio": {"project": "tracker-copies"}}.get(name, {})
    tracker = catalog.find(name, "loggers").load()(str(folder), checkpoints="copy", **own)
    guard = SpikeRollback(window=4, sigma=100.0, rewind_steps=2, skip_batches=6, snapshot_every_n_steps=2)
    poison = Poison(8 * 48, 9 * 48, gradient=1e4)
    callbacks = preflight.ordered(
        [poison, guard, PeriodicCheckpoint(every_n_steps=6, keep=-1, dirpath=str(folder / "checkpoints"))]
    )
    torch.manual_seed(0)
    runner = trainer(folder, callbacks=callbacks, logger=tracker, max_steps=14, log_every_n_steps=2, limit_val_batches=0,
                     enable_checkpointing=True, use_distributed_sampler=False, plugins=[AtomicCheckpoint()])  # fmt: skip
    data = StoredTokens(str(tmp_path), 12, 4, shuffle=True)
    data.vocab_size = VOCAB
    runner.fit(module(optimizer=lambda groups: AdamW(groups, lr=0.01)), datamodule=data)
    if name == "Wandb":
        import wandb

        wandb.teardown()  # ends its own process, which writes the file
    (event,) = guard.rollbacks
    assert (event["step"], event["seen_at_step"], event["rewound_to_step"]) == (9, 10, 6)
    rows = ROWS[name](folder)
    expected = [(step, step, 1) for step in (2, 4, 6, 8, 10)] + [
        (step + 3, step, 2) for step in (8, 10, 12, 14)
    ]
    assert attempts((step, row) for step, row in rows.items() if "train/loss" in row) == expected
    kept = sorted((folder / "checkpoints").glob("step-*.ckpt"))
    assert [step_named(path) for path in kept] == [6, 12, 14]
    for path in kept:
        assert COPIES[name](folder, step_named(path)) == path.read_bytes()


@pytest.mark.ci
def test_pictures_do_not_take_the_steps_of_rows(tmp_path):
    """W&B gives what comes without a step one of its own, and ignores rows with steps that are not above it."""
    needs("Wandb")
    import wandb

    from plugins.loggers.wandb import Wandb

    for name in "abc":
        pictures.save(pictures.new_figure(1, 1), tmp_path / f"{name}.png")
    logger = Wandb(str(tmp_path))
    for step in (1, 2, 3):
        logger.log_metrics({"train/loss": 1.0 / step, "val/loss": 2.0}, step)
    logger.finalize("success")
    wandb.teardown()  # ends its own process, which writes the file
    found = READERS["Wandb"](tmp_path)
    assert {step: row["train/loss"] for step, row in found.rows.items()} == {1: 1.0, 2: 1 / 2, 3: 1 / 3}
    assert found.pictures == {"a", "b", "c"}


@pytest.mark.ci
def test_a_store_that_cannot_be_reached_is_a_mistake_of_the_user(tmp_path, monkeypatch):
    needs("Mlflow")
    from plugins.loggers.mlflow import Mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nothing://there")
    with pytest.raises(ConfigError, match="Mlflow: no run can be begun"):
        Mlflow(str(tmp_path)).log_graph(None)
    assert not (tmp_path / "trackers").exists()
