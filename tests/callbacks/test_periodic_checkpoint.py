"""PeriodicCheckpoint: when it saves, what it keeps."""

import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.periodic_checkpoint import PeriodicCheckpoint
from core.errors import ConfigError
from core.language_module import LanguageModule
from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.checkpoints.finding import newest
from plugins.checkpoints.sharded_checkpoint import ShardedCheckpoint
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from plugins.optimizers.adamw import AdamW
from tests.support.launched_ranks import forked
from tests.support.object_storage import answer_with, answering, passed_on
from tests.support.toy import ToyData
from toolkit import checkpoint_places, object_storage
from toolkit.remote_checkpoints import noted_return


class Recording(AtomicCheckpoint):
    """Writes down the names of what is saved, in order."""

    def __init__(self):
        self.saved = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        self.saved.append(Path(path).name)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains 16 batches an epoch; returns the callback and the steps that were saved, in order."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")

    def run(
        every=2,
        keep=2,
        ckpt_path=None,
        callbacks=(),
        io=None,
        policy=None,
        kind=PeriodicCheckpoint,
        **options,
    ):
        seed_everything(0, verbose=False)
        network = {"vocab_size": 64, "n_layer": 1, "n_head": 1, "n_embd": 8, "max_sequence_length": 16}
        module = LanguageModule(lambda: GPT(**network), CausalLM(), lambda groups: AdamW(groups, lr=0.01))
        policy = {"dirpath": str(tmp_path / "checkpoints"), **(policy or {})}
        callback, io = (
            PeriodicCheckpoint(every, keep, **policy),
            io or Recording(),
        )
        defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "log_every_n_steps": 2}
        quiet = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
        }
        options = {"num_sanity_val_steps": 0, **defaults, **quiet, **options}
        trainer = Trainer(callbacks=[*callbacks, callback], plugins=[io], **options)
        trainer.fit(module, ToyData(), ckpt_path=ckpt_path)
        names = getattr(io, "saved", [])
        return callback, [int(name.removeprefix("step-").removesuffix(".ckpt")) for name in names]

    return run


class FullOnOther(AtomicCheckpoint):
    """Finds out on rank 1 alone that the checkpoint is not complete."""

    def wait(self):
        if dist.get_rank() == 1:
            raise ConfigError("the disk of rank 1 is full")


@pytest.mark.ci
def test_what_fails_on_one_rank_ends_all_of_them(tmp_path):
    words = [
        "--trainer.plugins=tests.callbacks.test_periodic_checkpoint.FullOnOther",
        "--trainer.max_steps=2",
    ]
    done = forked(2, tmp_path, *words)
    assert done.codes == (2, 2)
    assert "the disk of rank 1 is full" in done.stderr  # rank 0's


@pytest.fixture
def kept(tmp_path):
    return lambda: sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (1, ["step-00000007.ckpt"]),
        (2, ["step-00000006.ckpt", "step-00000007.ckpt"]),
        (-1, [f"step-0000000{step}.ckpt" for step in (2, 4, 6, 7)]),
    ],
)
def test_it_keeps_the_newest_and_always_the_last_step(keep, left, train, kept, tmp_path):
    callback, saved = train(every=2, keep=keep, max_steps=7)
    assert saved == [2, 4, 6, 7]
    assert kept() == left
    assert callback.last_model_path == str(tmp_path / "checkpoints" / "step-00000007.ckpt")
    assert torch.load(callback.last_model_path, weights_only=True)["global_step"] == 7


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 6}, [2, 4, 6]),
        ({"max_steps": 6, "accumulate_grad_batches": 3}, [2, 4, 6]),
        ({"max_epochs": 1, "every": 4}, [4, 8, 12, 16]),
        ({"max_epochs": 1, "every": 5}, [5, 10, 15, 16]),
        ({"max_steps": 3, "every": 100}, [3]),
        ({"max_steps": 20, "every": 8, "val_check_interval": 4}, [8, 16, 20]),
        ({"max_steps": 20, "every": 8, "val_check_interval": 8}, [8, 16, 20]),
        ({"max_steps": 4, "num_sanity_val_steps": 2}, [2, 4]),
    ],
)
def test_each_step_is_saved_once(options, steps, train):
    assert train(**options)[1] == steps


def test_a_step_with_a_validation_is_saved_after_it(train):
    events = []

    class Listening(Callback):
        def on_validation_end(self, trainer, pl_module):
            events.append(("validated", trainer.global_step))

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            events.append(("saved", trainer.global_step))

    train(every=4, callbacks=[Listening()], max_steps=12, val_check_interval=4, check_val_every_n_epoch=None)
    assert events == [(what, step) for step in (4, 8, 12) for what in ("validated", "saved")]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_resumed_run_does_not_save_where_it_starts(micro_batches, train, kept):
    callback, _ = train(max_steps=4, accumulate_grad_batches=micro_batches)
    path = callback.last_model_path
    _, saved = train(max_steps=8, accumulate_grad_batches=micro_batches, ckpt_path=path)
    assert saved == [6, 8]
    assert kept() == ["step-00000006.ckpt", "step-00000008.ckpt"]


def test_what_a_run_has_gone_back_behind_is_renamed_and_not_taken(train, kept, tmp_path):
    """Another history would go on: `last` would take the higher step of the old one."""
    folder = tmp_path / "checkpoints"
    train(max_steps=8, keep=-1)
    train(max_steps=5, ckpt_path=str(folder / "step-00000004.ckpt"))
    renamed = ["step-00000006.abandoned.ckpt", "step-00000008.abandoned.ckpt"]
    assert kept() == ["step-00000004.ckpt", "step-00000005.ckpt", *renamed]
    assert newest(tmp_path) == folder / "step-00000005.ckpt"
    train(max_steps=6, ckpt_path=str(folder / "step-00000004.ckpt"))
    assert "step-00000005.abandoned.ckpt" in kept()
    assert newest(tmp_path) == folder / "step-00000006.ckpt"


def test_only_what_the_run_has_written_is_removed(train, kept, tmp_path):
    """Also beside it: another run's, a copy for good, names without a number or with odd ones."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    others = ["step-00000001.ckpt", "step-best.ckpt", "step-²²²²²²²².ckpt", "step-.ckpt", "best.ckpt"]
    for name in others:
        (folder / name).write_bytes(b"of somebody")
    callback, _ = train(max_steps=7, keep=1)
    assert kept() == sorted([*others, "step-00000007.ckpt"])
    train(max_steps=9, keep=1, ckpt_path=callback.last_model_path)
    assert kept() == sorted([*others, "step-00000009.ckpt"])


def test_a_checkpoint_that_names_others_removes_nothing_through_a_link(tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    run.mkdir()
    for step in (1, 2):
        (mine / f"step-0000000{step}.ckpt").write_bytes(b"of the user")
    (run / "checkpoints").symlink_to(mine)
    callback = PeriodicCheckpoint(dirpath=str(run / "checkpoints"), keep=1)
    names = ["step-00000001.ckpt", "step-00000002.ckpt"]
    callback.load_state_dict({"written": [*names, "../mine/step-00000001.ckpt", "/step-1.ckpt", "x.ckpt", 7]})
    assert callback._written == names
    callback._prune(Trainer(default_root_dir=run, logger=False, accelerator="cpu", devices=1))
    assert sorted(path.name for path in mine.iterdir()) == names


def test_a_folder_that_cannot_be_is_refused_before_training(train, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(ConfigError, match="is no folder"):
        train(max_steps=2)


@pytest.mark.parametrize("place", ["s4://bucket/run", "gs://", "file:///tmp/x"])
def test_urls_of_no_object_storage_are_refused(place):
    with pytest.raises(ConfigError, match=f"PeriodicCheckpoint: dirpath is {place}: "):
        PeriodicCheckpoint(dirpath=place)


def test_a_format_that_cannot_upload_is_refused(train):
    with pytest.raises(ConfigError, match="TorchCheckpointIO writes to folders of this machine only"):
        train(io=TorchCheckpointIO(), policy={"dirpath": "s3://bucket/run"})


class Moment(Callback):
    """Knows when a run is about to wait for its storage: at the save of step 4, after the last one, or as it goes back."""

    def __init__(self, where):
        self.where, self.now, self.down = where, threading.Event(), threading.Event()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3 and self.where == "back":
            saver = trainer.checkpoint_callback
            saver._settle(trainer)
            self.down.set()
            self.now.set()
            saver._go_back(trainer, 1)
        if trainer.global_step == 4 and self.where == "save":
            self.now.set()

    def answers(self, path):
        """Returns whether the storage still answers a request."""
        if self.where != "back" and f"step-0000000{4 if self.where == 'end' else 2}" in path:
            self.down.set()
        if self.down.is_set() and self.where == "end":
            self.now.set()
        return not self.down.is_set()


@pytest.mark.parametrize(
    ("where", "kept_here", "said"),
    [
        ("save", [2, 4], "step-00000002.ckpt"),
        pytest.param("end", [4], "step-00000004.ckpt", marks=pytest.mark.ci),
        pytest.param("back", [3], "/back cannot be read", marks=pytest.mark.ci),
    ],
)
def test_sigterm_while_a_run_waits_for_its_storage(
    where, kept_here, said, storage, train, tmp_path, monkeypatch, capsys
):
    """In an outage the run ends by its signal, and what is not uploaded, with the last step, is on this machine."""
    moment, sent, handler = Moment(where), [], signal.getsignal(signal.SIGTERM)

    def answer(request, body):
        if moment.answers(request.path):
            passed_on(request, body, storage.url)
            return
        if moment.now.is_set() and not sent:
            sent.append(signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM))
        answer_with(request, 503)

    for module in (object_storage, checkpoint_places):
        monkeypatch.setattr(module, "LOOK_S", 0.05)
    with answering(answer) as url:
        for name, value in {**storage.environment, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        options = {"policy": {"dirpath": f"s3://corpora/{where}"}, "default_root_dir": tmp_path}
        with pytest.raises(SIGTERMException):
            train(callbacks=[moment], max_steps=4 if where == "end" else 6, **options)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert sent
    staged = sorted(path.name for path in (tmp_path / "uploads").glob("*.ckpt"))
    assert staged == [f"step-{step:08d}.ckpt" for step in kept_here]
    assert noted_return(tmp_path) == (1 if where == "back" else None)
    told = capsys.readouterr().err
    assert said in told
    assert told.count(f"complete in {tmp_path}/uploads: {', '.join(staged)}.") == 1


def test_a_resumed_run_is_bitwise_the_one_that_went_on(train, tmp_path):
    """From the middle of an epoch of the test's own data, so that other tests can build on it."""
    train(max_steps=20, every=7, keep=-1)
    whole = torch.load(tmp_path / "checkpoints" / "step-00000020.ckpt", weights_only=True)["state_dict"]
    for step in (14, 7):
        train(
            max_steps=20,
            every=100,
            ckpt_path=str(tmp_path / "checkpoints" / f"step-{step:08d}.ckpt"),
            keep=-1,
        )
        resumed = torch.load(tmp_path / "checkpoints" / "step-00000020.ckpt", weights_only=True)["state_dict"]
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def steps_of(names):
    return [int(name.removeprefix("step-").removesuffix(".ckpt")) for name in names]


def test_some_are_kept_for_good(train, kept):
    train(every=2, keep=1, max_steps=11, policy={"keep_every_n_steps": 4})
    assert steps_of(kept()) == [4, 8, 11]


def test_the_best_is_kept_also_by_a_run_that_goes_on(train, kept):
    losses = {}

    class Listening(Callback):
        def on_validation_end(self, trainer, pl_module):
            losses[trainer.global_step] = float(trainer.callback_metrics["val/loss"])

    options = {"every": 100, "keep": 1, "val_check_interval": 3, "check_val_every_n_epoch": None}
    options |= {"policy": {"keep_best": True}, "callbacks": [Listening()]}
    callback, saved = train(max_steps=10, **options)
    lower = [step for step in losses if all(losses[step] < losses[earlier] for earlier in range(3, step, 3))]
    assert saved == [*lower, 10]
    assert steps_of(kept()) == [min(losses, key=losses.get), 10]
    assert callback.best_model_path.endswith(f"{lower[-1]}.ckpt")
    train(max_steps=14, ckpt_path=callback.last_model_path, **options)
    assert steps_of(kept()) == sorted({min(losses, key=losses.get), 14})
    assert list(losses) == [3, 6, 9, 12]


def test_the_best_is_not_looked_for_between_the_micro_batches_of_a_step(train):
    """Validations behind micro-batches 3 and 6 of an epoch: 6 ends a step; gradients of half a step are not saved."""
    options = {"val_check_interval": 0.5, "accumulate_grad_batches": 2, "limit_train_batches": 6}
    _, saved = train(every=100, keep=-1, max_steps=8, policy={"keep_best": True}, **options)
    assert 3 in saved
    assert set(saved) <= {3, 6, 8}


def test_checkpoints_written_in_the_background_are_there_at_the_end_and_old_ones_are_not(
    train, kept, tmp_path
):
    logger = Noting()
    callback, _ = train(every=2, keep=2, max_steps=7, io=ShardedCheckpoint(), logger=logger)
    assert steps_of(kept()) == [6, 7]
    assert newest(tmp_path) == Path(callback.last_model_path)
    stalls = [step for step, figures in logger.rows if "checkpoint/stall_s" in figures]
    assert stalls == [2, 4, 6, 7]


class Noting(DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


@pytest.mark.parametrize("number", [0, 3])
def test_steps_that_are_never_saved_cannot_be_kept_for_good(number):
    with pytest.raises(ConfigError, match="takes a multiple of every_n_steps"):
        PeriodicCheckpoint(every_n_steps=2, keep_every_n_steps=number)


@pytest.mark.parametrize("arguments", [{"every_n_steps": 0}, {"keep": 0}, {"keep": -2}])
def test_values_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigError, match="PeriodicCheckpoint takes"):
        PeriodicCheckpoint(**arguments)
