import contextlib
import io
import os
import re
import signal
import sys
import threading
import time

import pytest
from lightning.pytorch.callbacks import Callback

from callbacks.progress_bar import ProgressBar
from callbacks.text_samples import TextSamples
from callbacks.throughput import Throughput
from core.errors import ConfigError

LINE = re.compile(
    r"^step ([\d,]+)/([\d,]+) \((\d+)%\): loss [\d.]+ .*(?:\d+:\d\d:\d\d|-:--:--) left$", re.MULTILINE
)
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@contextlib.contextmanager
def terminal():
    """Makes stdout a terminal and yields what has been written to it so far."""
    master, slave = os.openpty()
    written = io.StringIO()

    def read():
        with contextlib.suppress(OSError):
            while chunk := os.read(master, 65536):
                written.write(chunk.decode(errors="replace"))

    reader = threading.Thread(target=read)
    reader.start()
    before, sys.stdout = sys.stdout, open(slave, "w")  # noqa: SIM115 - closed below
    try:
        yield written
    finally:
        sys.stdout.close()
        sys.stdout = before
        reader.join(120)
        os.close(master)


@pytest.fixture
def on_terminal(make_trainer, module, data, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("rich._console", None)  # the console of this process remembers that it had colours
    interrupt = signal.getsignal(signal.SIGINT)

    def run(*callbacks, function="fit", raises=None, **options):
        trainer = make_trainer(tmp_path, [Throughput(), *callbacks], **options)
        expected = pytest.raises(raises) if raises else contextlib.nullcontext()
        with terminal() as written, expected:
            getattr(trainer, function)(module(), datamodule=data())
        return written.getvalue()

    yield run
    signal.signal(signal.SIGINT, interrupt)  # Lightning leaves it ignored after an interrupt


class At(Callback):
    """Calls a function at the end of a step."""

    def __init__(self, step, function):
        self.step, self.function = step, function

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            self.function(trainer)


# -- elsewhere than on a terminal --------------------------------------------------------------------


def test_lightning_takes_it_for_the_bar(run):
    assert run.trainer.progress_bar_callback is run.callback(ProgressBar)
    assert type(run.trainer.progress_bar_callback) is ProgressBar


def test_plain_lines_at_the_first_logged_step_and_each_tenth(run):
    lines = [(int(step), int(percent)) for step, total, percent in LINE.findall(run.stdout)]
    assert [step for step, _ in lines] == [5, 10, 15, 20, 25, 30, 40, 45, 50, 55, 60]  # 35 is in 30's tenth
    assert lines[-1] == (60, 100)
    assert "\x1b" not in run.stdout


def test_plain_lines_show_speed_and_validation_loss(run):
    last = LINE.search(run.stdout[run.stdout.index("step 55/60") :]).group()
    assert re.search(r"loss \d\.\d{3}  val \d\.\d{3}  epoch [\d.]+  [\d,]+ tokens/s  0:00:00 left", last)
    loss = float(run.trainer.callback_metrics["val/loss"])
    assert f"step 60/60: validation loss {loss:.3f}" in run.stdout


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        (None, "epoch 1"),
        ({"text": 1.254}, "epoch 1.25"),
        ({"a": 0.4, "b": 2.1, "c": 1.0}, "epoch 0.40 to 2.10"),
    ],
)
def test_plain_lines_say_how_often_the_data_have_been_gone_through(
    counts, shown, fit, data, tmp_path, monkeypatch
):
    if counts:
        monkeypatch.setattr(data, "epochs", lambda self: counts, raising=False)
    run = fit(tmp_path, [ProgressBar()], max_steps=5, limit_val_batches=0)
    assert f"  {shown}  " in LINE.search(run.stdout).group()


def test_plain_lines_keep_their_distance(fit, tmp_path):
    run = fit(tmp_path, [ProgressBar(line_every_s=0)], max_steps=20, limit_val_batches=0)
    assert len(LINE.findall(run.stdout)) == 4
    run = fit(
        tmp_path, [ProgressBar()], max_steps=1000, max_epochs=1, limit_train_batches=40, limit_val_batches=0
    )
    assert [step for step, total, _ in LINE.findall(run.stdout)] == [
        str(s) for s in (5, 10, 15, 20, 25, 30, 35, 40)
    ]
    assert {total for _, total, _ in LINE.findall(run.stdout)} == {"40"}  # the epoch ends before max_steps


def test_a_resumed_run_begins_at_its_step(resumed):
    assert LINE.findall(resumed.stdout)[0][:2] == ("45", "80")


def test_other_ranks_print_nothing(fit, tmp_path):
    bar = ProgressBar()
    bar.disable()
    assert fit(tmp_path, [bar], max_steps=10).stdout == ""


def test_test_and_predict_say_what_they_do(make_trainer, module, data, tmp_path, capsys):
    for function, words in (("test", "Testing: 2 batches"), ("predict", "Predicting: 2 batches")):
        trainer = make_trainer(tmp_path, [ProgressBar()])
        getattr(trainer, function)(module(), datamodule=data())
        assert words in capsys.readouterr().out


# -- on a terminal -----------------------------------------------------------------------------------


def test_bar_shows_step_loss_validation_speed_and_time(on_terminal):
    text = on_terminal(ProgressBar())
    last = text[text.rindex("step 60/60") :]
    assert re.search(r"━.* loss \d\.\d{3}  val \d\.\d{3}  epoch [\d.]+  [\d,]+ tokens/s  0:00:00 left", last)
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.index(HIDE) < text.index(SHOW)


def test_bar_is_redrawn_at_its_rate_however_fast_the_steps_are(on_terminal):
    begin = time.monotonic()
    text = on_terminal(ProgressBar(redraws_per_s=4), limit_val_batches=0)
    redraws = text.count("step ")
    assert redraws <= 4 * (time.monotonic() - begin) + 4
    assert redraws < 30  # 60 steps


@pytest.mark.ci
def test_bar_shows_the_passes_over_other_data(on_terminal):
    class Slow(Callback):
        def on_validation_batch_end(self, *args):
            time.sleep(0.25)

        on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    text = on_terminal(ProgressBar(redraws_per_s=10), Slow(), max_steps=5, val_check_interval=5)
    assert re.search(r"Sanity Checking [12]/2", text)
    assert re.search(r"Validation [12]/2", text)
    assert "Validation" not in text[text.rindex("step 5/5") :]
    assert "Testing 2/2" in on_terminal(ProgressBar(), Slow(), function="test")
    assert "Predicting 2/2" in on_terminal(ProgressBar(), Slow(), function="predict")


def test_what_is_printed_stands_above_the_bar(on_terminal):
    bar = ProgressBar(redraws_per_s=10)
    text = on_terminal(
        bar,
        At(3, lambda trainer: bar.print("hello", "[b]there", sep=" - ")),
        At(4, lambda trainer: print("plain print")),
        TextSamples(num_samples=1, max_new_tokens=4),
        max_steps=6,
        limit_val_batches=0,
    )
    # each on a line of its own: at the very start, or where the bar was wiped away
    assert re.search(re.escape("hello - [b]there").join([r"(\x1b\[2K|\?25l)", r"\r\n"]), text)
    assert re.search(r"\x1b\[2Kplain print\r\n", text)
    assert text.index("step 6/6") < text.index(SHOW) < text.index("Samples at step 6")
    assert "\x1b[2mThe\x1b[0m" in text  # the prompt is dim


def test_print_without_a_bar_is_print(capsys):
    ProgressBar().print("a", "b", sep="-")
    assert capsys.readouterr().out == "a-b\n"


@pytest.mark.parametrize(("exception", "raises"), [(KeyboardInterrupt, SystemExit), (ValueError, ValueError)])
def test_an_exception_gives_the_terminal_back(exception, raises, on_terminal):
    def fail(trainer):
        raise exception

    text = on_terminal(ProgressBar(), At(5, fail), limit_val_batches=0, raises=raises)
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.endswith(SHOW)
    assert re.search(r"step 5/60 .*left\r\n", text)
    for thread in [thread for thread in threading.enumerate() if "Refresh" in type(thread).__name__]:
        thread.join(120)  # it has been asked to end
        assert not thread.is_alive()


def test_a_dumb_terminal_gets_plain_lines(on_terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    text = on_terminal(ProgressBar(), max_steps=10)
    assert "\x1b" not in text
    assert LINE.search(text.replace("\r\n", "\n"))


@pytest.mark.parametrize("options", [{"redraws_per_s": 0}, {"redraws_per_s": 11}, {"line_every_s": -1}])
def test_wrong_arguments_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ProgressBar(**options)
