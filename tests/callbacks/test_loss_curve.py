import math
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
from lightning.pytorch.callbacks import Callback

from callbacks import loss_curve
from callbacks.loss_curve import MAX_POINTS, LossCurve, draw
from core.errors import ConfigError
from toolkit import pictures


def test_a_run_leaves_a_picture_and_nothing_else(run):
    picture = matplotlib.image.imread(run.folder / "loss_curve.png")
    assert picture.shape == (750, 1200, 4)
    assert picture.std() > 0.05  # not blank
    assert not list(run.folder.glob(".*"))


def test_the_curve_is_that_of_the_logs(run):
    state = run.callback(LossCurve).state_dict()
    assert [point[:2] for point in state["training"]] == [(step, 256 * step) for step in range(5, 61, 5)]
    assert [point[:2] for point in state["validation"]] == [(step, 256 * step) for step in (20, 40, 60)]
    assert state["training"][-1][2] == pytest.approx(float(run.trainer.callback_metrics["train/loss"]))
    assert state["validation"][-1][2] == pytest.approx(float(run.trainer.callback_metrics["val/loss"]))


@pytest.mark.ci
def test_a_resumed_run_goes_on_with_the_curve(run, resumed):
    before, after = run.callback(LossCurve).state_dict(), resumed.callback(LossCurve).state_dict()
    assert [step for step, _, _ in after["training"]] == [*range(5, 81, 5)]
    # the checkpoint of step 40 was written before its validation, which Lightning does not repeat
    assert [step for step, _, _ in after["validation"]] == [20, 60]
    assert after["validation"][0] == before["validation"][0]
    assert after["training"][:8] == before["training"][:8]


def test_an_exception_leaves_a_picture(fit, tmp_path):
    class Fail(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 12:
                raise ValueError("for the test")

    with pytest.raises(ValueError, match="for the test"):
        fit(tmp_path, [LossCurve(every_n_validations=0), Fail()], val_check_interval=6)
    assert (tmp_path / "loss_curve.png").exists()


@pytest.mark.parametrize(
    ("every", "expected"),
    [(0, [False] * 4), (1, [True] * 4), pytest.param(2, [False, True, True, True], marks=pytest.mark.ci)],
)
def test_pictures_in_between(every, expected, fit, tmp_path):
    class Look(Callback):
        seen = []

        def on_validation_end(self, trainer, pl_module):
            self.seen.append((tmp_path / "loss_curve.png").exists())

    Look.seen = seen = []
    curve = LossCurve(every_n_validations=every)
    fit(
        tmp_path,
        [curve, Look()],
        max_steps=20,
        val_check_interval=5,
        log_every_n_steps=2,
        num_sanity_val_steps=0,
    )
    assert seen == expected
    assert [tokens for _, tokens, _ in curve.state_dict()["validation"]] == [
        256 * step for step in (5, 10, 15, 20)
    ]


@pytest.mark.ci
@pytest.mark.parametrize(("share", "pictures"), [(1e-9, 1), (1e9, 4)])
def test_pictures_in_between_take_a_share_of_the_time(share, pictures, fit, tmp_path, monkeypatch):
    class Look(Callback):
        seen = []

        def on_validation_end(self, trainer, pl_module):
            self.seen.append((tmp_path / "loss_curve.png").stat().st_mtime_ns)

    Look.seen = seen = []
    monkeypatch.setattr(loss_curve, "SHARE", share)
    often = {"val_check_interval": 5, "log_every_n_steps": 2, "num_sanity_val_steps": 0}
    fit(tmp_path, [LossCurve(), Look()], max_steps=20, **often)
    assert len(seen) == 4
    assert len(set(seen)) == pictures
    assert (tmp_path / "loss_curve.png").stat().st_mtime_ns > seen[-1], "drawn at the end in any case"


def test_an_unwritable_picture_does_not_end_the_run(fit, tmp_path, recwarn):
    (tmp_path / "loss_curve.png").mkdir()
    run = fit(tmp_path, [LossCurve(every_n_validations=0)], max_steps=20, limit_val_batches=0)
    assert run.trainer.global_step == 20
    assert any("loss_curve.png could not be written" in str(warning.message) for warning in recwarn)


def test_long_runs_are_thinned_out_evenly():
    curve, module = LossCurve(), SimpleNamespace(logging_step=True, tokens_seen=0)
    for step in range(1, 5 * MAX_POINTS):
        module.tokens_seen = 10 * step
        trainer = SimpleNamespace(global_step=step, callback_metrics={"train/loss": 1.0})
        curve.on_train_batch_end(trainer, module, None, None, 0)
        assert len(curve._training) < MAX_POINTS
    gaps = np.diff([step for step, _, _ in curve._training])
    assert set(gaps) == {8}
    assert len(curve._training) > MAX_POINTS // 2


def points(losses, tokens_per_step=100):
    return [(step, tokens_per_step * step, loss) for step, loss in enumerate(losses, start=1)]


def test_a_loss_that_is_not_per_token_has_its_unit_and_no_perplexity():
    figure = draw(points([0.7, 0.6]), [(2, 200, 0.6)], unigram=4.2, title="x", unit="nats/pair")
    axes = figure.axes[0]
    assert axes.get_ylabel() == "loss (nats per pair)"
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["training (running mean)", "validation (last 0.600)"]


def test_labels_units_and_the_unigram_line():
    figure = draw(points([5.0, 4.0, 3.5]), [(3, 300, 3.6)], unigram=4.2, title="runs/x")
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("label tokens seen", "loss (nats per token)")
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend[1] == f"validation (last 3.600, perplexity {math.exp(3.6):.1f})"
    assert axes.get_title(loc="left") == "runs/x: loss over tokens"
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in dashed] == [[4.2, 4.2]]
    assert [upper.get_xlabel() for upper in axes.child_axes] == ["optimizer steps"]


def test_no_second_axis_where_steps_differ_in_tokens():
    training = [(step, step * step, 3.0) for step in range(1, 10)]
    assert draw(training, [], None, "").axes[0].child_axes == []


def test_axes_are_logarithmic_where_the_curve_spans_decades():
    axes = draw(points(np.linspace(5, 3, 50)), [], None, "").axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    axes = draw(points(np.geomspace(9, 0.1, 200)), [], None, "").axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_losses_that_are_not_finite_are_left_out():
    losses = [5.0, 4.0, math.nan, math.inf, 3.0, 2.0]
    smooth = draw(points(losses), [], None, "").axes[0].lines[1]
    assert list(smooth.get_xdata()) == [100, 200, 500, 600]
    assert np.isfinite(smooth.get_ydata()).all()


def test_running_mean_is_the_mean_of_its_window():
    values = np.random.default_rng(0).normal(size=200)
    expected = []
    for i in range(200):
        before = min(5, i // 4)
        expected.append(values[i - before : i + min(before, 199 - i) + 1].mean())
    np.testing.assert_allclose(pictures.running_mean(values), expected, rtol=1e-10)


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="every_n_validations"):
        LossCurve(every_n_validations=-1)
