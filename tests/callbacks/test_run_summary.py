import csv
import math
import re
import shlex

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.periodic_checkpoint import PeriodicCheckpoint
from callbacks.run_summary import RunSummary
from plugins.cli.preflight import ordered
from plugins.objectives.causal_lm import CausalLM
from tests.callbacks.conftest import Bytes, language_module, new_trainer

GENERATE = re.compile(r'^  python -m core generate --ckpt_path (\S+) --prompt "The"$', re.MULTILINE)
FIT = re.compile(r"^  python -m core fit --ckpt_path (\S+) (--trainer\.\w+ \d+)$", re.MULTILINE)


def summary_of(run):
    return run.stdout[run.stdout.index("Trained to step") :]


def test_losses_stand_beside_the_unigram_entropy(run):
    with open(run.folder / "metrics.csv", newline="") as file:
        loss = float(list(csv.DictReader(file))[-1]["val/loss"])
    unigram = run.trainer.datamodule.unigram_loss
    text = summary_of(run)
    assert f"Validation loss             {loss:.3f} nats/token, perplexity {math.exp(loss):,.1f}" in text
    assert (
        f"Unigram entropy, same text  {unigram:.3f} nats/token, perplexity {math.exp(unigram):,.1f}" in text
    )
    assert loss < unigram
    assert f"it is {unigram - loss:.3f} nats per token better than token frequencies alone." in text


def test_a_model_that_learned_nothing_is_not_praised(fit, tmp_path):
    run = fit(tmp_path, [RunSummary()], max_steps=4, val_check_interval=4)
    assert "The model is not better than token frequencies alone yet" in run.stdout
    assert "better than token frequencies alone." not in run.stdout


def test_a_loss_that_is_not_per_token_has_its_unit_and_neither_perplexity_nor_unigram_entropy(
    fit, tmp_path, monkeypatch
):
    monkeypatch.setattr(CausalLM, "loss_unit", "nats/pair")
    run = fit(tmp_path, [RunSummary()], max_steps=4, val_check_interval=4)
    loss = float(run.trainer.callback_metrics["val/loss"])
    assert f"\nValidation loss             {loss:.3f} nats/pair\n" in run.stdout
    assert "perplexity" not in run.stdout
    assert "Unigram entropy" not in run.stdout


def test_a_loss_of_an_earlier_step_is_not_given_as_that_of_the_end(fit, tmp_path):
    run = fit(tmp_path, [RunSummary()], max_steps=7, val_check_interval=3)
    assert re.search(r"^Validation loss  .*, of step 6: none was run since$", run.stdout, re.MULTILINE)
    run = fit(tmp_path, [RunSummary()], max_steps=6, val_check_interval=3)
    assert "none was run since" not in run.stdout


def test_the_run_and_its_speed(run, resumed):
    median = float(run.trainer.callback_metrics["throughput/median_tokens_per_second"])
    first = summary_of(run).splitlines()[0]
    expected = rf"Trained to step 60, 15,360 tokens, in 0:00:\d\d; median {median:,.0f} tokens/s\."
    assert re.fullmatch(expected, first)
    assert "Trained to step 80, 20,480 tokens, in 0:00:" in resumed.stdout
    assert " since it was resumed at step 40; median" in resumed.stdout


def test_tokens_are_told_as_far_as_they_were_counted(fit, tmp_path):
    options = {"max_steps": 7, "limit_val_batches": 0}
    late = fit(tmp_path / "late", [RunSummary()], log_every_n_steps=5, **options)
    assert "Trained to step 7, 1,280 tokens by the last logged step, in 0:00:" in late.stdout
    none = fit(tmp_path / "none", [RunSummary()], log_every_n_steps=50, **options)
    assert "Trained to step 7, in 0:00:" in none.stdout


def test_what_is_listed_exists_and_what_exists_is_listed(run):
    listed = dict(re.findall(r"^(.+?)  +(/.*)$", summary_of(run), re.MULTILINE))
    assert listed == {
        "run folder": str(run.folder),
        "checkpoint": str(run.folder / "checkpoints" / "last.ckpt"),
        "loss curve": str(run.folder / "loss_curve.png"),
        "samples": str(run.folder / "samples.txt"),
        "metrics": str(run.folder / "metrics.csv"),
        "configuration": str(run.folder / "config.yaml"),
        "TensorBoard": str(run.folder / "tensorboard"),
    }


def test_it_ends_with_exactly_two_commands(run):
    text = summary_of(run)
    (checkpoint,) = GENERATE.findall(text)
    ((folder, longer),) = FIT.findall(text)
    assert checkpoint == str(run.folder / "checkpoints" / "last.ckpt")
    assert folder == str(run.folder)
    assert longer == "--trainer.max_steps 120"
    assert text.count("python -m core") == 2
    assert text.rstrip().splitlines()[-1].strip().startswith("python -m core fit")


def test_samples_and_picture_come_first(run, everything, tmp_path):
    assert run.stdout.rindex("Samples at step 60") < run.stdout.index("Trained to step")
    names = [type(callback).__name__ for callback in ordered(everything(tmp_path)[::-1])]
    assert names.index("RunSummary") > max(names.index(n) for n in ("LossCurve", "TextSamples", "Throughput"))
    assert names.index("Throughput") < min(
        names.index(n) for n in ("LossCurve", "TextSamples", "ProgressBar")
    )


def test_paths_are_relative_and_quoted_where_they_need_it(fit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my runs"
    run = fit(folder, [RunSummary(), ModelCheckpoint(folder, every_n_train_steps=5)], max_steps=5)
    commands = [line for line in run.stdout.splitlines() if line.startswith("  python")]
    assert shlex.split(commands[0])[4:6] == ["--ckpt_path", "my runs/epoch=0-step=5.ckpt"]
    assert shlex.split(commands[1])[4:6] == ["--ckpt_path", "my runs"]


def test_a_run_that_its_epochs_ended_is_continued_by_epochs(fit, tmp_path):
    options = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 5, "limit_val_batches": 0}
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=5)
    run = fit(tmp_path, [RunSummary(), checkpoint], **options)
    assert FIT.findall(run.stdout)[0][1] == "--trainer.max_epochs 6"
    assert "Validation: none was run." in run.stdout


def test_without_a_checkpoint_no_command_is_offered(fit, tmp_path):
    run = fit(tmp_path, [RunSummary()], max_steps=2, limit_val_batches=0)
    assert "No checkpoint was saved" in run.stdout
    assert "python -m core" not in run.stdout


def test_a_finished_run_has_nothing_left_to_train(run, fit, tmp_path):
    checkpoint = run.folder / "checkpoints" / "last.ckpt"
    again = fit(tmp_path, [RunSummary()], ckpt_path=checkpoint, max_steps=60)
    assert "Nothing was left to train: the run is at step 60." in again.stdout


@pytest.mark.parametrize("saves", [True, False])
def test_an_exception_leaves_one_line(saves, fit, tmp_path, capsys):
    class Fail(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 7:
                raise ValueError("for the test")

    checkpoint = [ModelCheckpoint(tmp_path, every_n_train_steps=5)] if saves else []
    printed = []
    summary = RunSummary()
    inner = summary.on_exception

    def on_exception(*args):
        import contextlib
        import io

        with contextlib.redirect_stdout(io.StringIO()) as output:
            inner(*args)
        printed.append(output.getvalue())

    summary.on_exception = on_exception
    with pytest.raises(ValueError, match="for the test"):
        fit(tmp_path, [summary, Fail(), *checkpoint], limit_val_batches=0)
    where = f"Stopped at step 7. The run folder is {tmp_path}; "
    command = f"resume it with: python -m core fit --ckpt_path {tmp_path}\n"
    assert printed == [where + (command if saves else "it has no checkpoint yet\n")]


def test_an_exception_before_the_training_leaves_no_line(fit, tmp_path, capsys):
    class Fail(Callback):
        def setup(self, trainer, pl_module, stage):
            raise ValueError("for the test")

    summary = RunSummary()
    with pytest.raises(ValueError, match="for the test"):
        fit(tmp_path, [Fail(), summary])
    assert summary._began is None
    assert capsys.readouterr().out == ""


class Signal(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3:
            raise SIGTERMException


@pytest.mark.parametrize("inside", [True, False])
def test_a_run_that_a_signal_ends_before_its_first_checkpoint_can_be_resumed(inside, tmp_path, capsys):
    """PeriodicCheckpoint, which is called last, saves then; one that lies elsewhere is named itself."""
    run, folder = tmp_path / "run", tmp_path / ("run/checkpoints" if inside else "elsewhere")
    callbacks = [RunSummary(), Signal(), PeriodicCheckpoint(100, dirpath=str(folder))]
    with pytest.raises(SIGTERMException):
        new_trainer(run, callbacks, limit_val_batches=0).fit(language_module(), datamodule=Bytes())
    saved = folder / "step-00000003.ckpt"
    assert saved.exists()
    printed = capsys.readouterr().out
    assert printed.strip().endswith(
        f"resume it with: python -m core fit --ckpt_path {run if inside else saved}"
    )
