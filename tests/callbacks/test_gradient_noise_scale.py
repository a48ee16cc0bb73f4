"""GradientNoiseScale on a quadratic problem whose noise scale is known, and its estimate in closed form."""

import pytest
import torch
import yaml

from callbacks.gradient_noise_scale import GradientNoiseScale
from conformance.runs import run
from core.errors import ConfigError
from plugins.checkpoints.checkpoint import read_checkpoint
from tests.support.quadratic import DISTANCE, LENGTH, NOISE_SCALE, ROWS, SIGMA, WIDTH
from toolkit.gradient_noise import estimate
from toolkit.selection import Run

STEPS = 200
REPLICAS = {"class_path": "FSDP", "init_args": {"replicas": 2}}


def fit(folder, monkeypatch, ranks=1, accumulate=1, steps=STEPS, average=0.995, **trainer):
    """Trains for some steps that stay where they are, all of which are measured."""
    monkeypatch.setenv("LEYDEN_TRUST", "tests")
    values = {
        "trainer": {
            "accelerator": "cpu", "devices": ranks, "max_steps": steps, "accumulate_grad_batches": accumulate,
            "log_every_n_steps": steps, "limit_val_batches": 0, "default_root_dir": str(folder), "logger": False,
            "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
            "callbacks": [
                {"class_path": "GradientNoiseScale", "init_args": {"every_n_steps": 1, "average": average}},
                {"class_path": "conformance.recorder.Saver", "init_args": {"folder": str(folder), "save_at": steps}},
            ],
            **trainer,
        },
        "model": {
            "network": {"class_path": "tests.support.quadratic.Point"},
            "objective": {"class_path": "tests.support.quadratic.Distance"},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.0}},
        },
        "data": {"class_path": "tests.support.quadratic.Points", "init_args": {"batches": steps * accumulate}},
    }  # fmt: skip
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    done = run(["fit", f"--config={config}"], folder, ranks=ranks)
    assert done.code == 0, done.error_text
    return done


def measured(folder, monkeypatch, ranks=1, accumulate=1, **trainer):
    """Returns the noise scale that a run of `STEPS` steps finds."""
    done = fit(folder, monkeypatch, ranks, accumulate, **trainer)
    figures = done.figures["metrics"][str(STEPS)]
    batch = ROWS * LENGTH * accumulate * ranks
    ratio = figures["noise_scale/tokens"] / figures["noise_scale/batch_ratio"]
    assert ratio == pytest.approx(batch, rel=1e-12)
    return figures["noise_scale/tokens"]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="halves"),
        pytest.param(1, {"accumulate": 4}, id="micro-batches"),
        pytest.param(2, {"strategy": "DDP"}, id="halves on two ranks", marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "DDP", "accumulate": 2}, id="micro-batches on two ranks", marks=pytest.mark.ci),
        pytest.param(2, {"strategy": "FSDP", "accumulate": 2}, id="sharded", marks=pytest.mark.ci),
        pytest.param(2, {"strategy": REPLICAS, "accumulate": 2}, id="replicas", marks=pytest.mark.ci),
    ],
)  # fmt: skip
def test_it_is_that_of_a_quadratic_problem(ranks, options, tmp_path, monkeypatch):
    # 200 x 32 tokens or more of 8 dimensions: tr(S) is known to about 1.5%, |G|^2 to 2 x 1 / (0.5 sqrt(8 x 6400)) = 1.8%
    found = measured(tmp_path, monkeypatch, ranks, **options)
    assert found == pytest.approx(NOISE_SCALE, rel=0.12)


@pytest.mark.parametrize(
    ("stage", "accumulate"),
    [
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.ci),
    ],
)
def test_under_zero_the_parts_are_the_micro_batches_of_each_rank(stage, accumulate, tmp_path, monkeypatch):
    zero = {"class_path": "DeepSpeedZero", "init_args": {"stage": stage, "persistence_threshold": 0}}
    options = {"ranks": 2, "accumulate": accumulate, "steps": 2, "average": 0.0}
    fit(tmp_path, monkeypatch, **options, strategy=zero)
    found = read_checkpoint(tmp_path / "checkpoints/step-2.ckpt")["callbacks"]["GradientNoiseScale"]
    size = 2 * accumulate, ROWS, LENGTH, WIDTH
    points = [torch.randn(size, generator=torch.Generator().manual_seed(1 + rank)) for rank in (0, 1)]
    parts = torch.stack([(DISTANCE + SIGMA * own[-accumulate:]).mean((1, 2)) for own in points]).view(
        -1, WIDTH
    )
    parts = parts.double()  # each minus a gradient, as the point stays at zero
    small, big, tokens = parts.square().sum(-1).mean(), parts.mean(0).square().sum(), ROWS * LENGTH
    expected = estimate(float(small), 1 / tokens, float(big), 1 / tokens / len(parts))
    assert (found["signal"], found["noise"]) == pytest.approx(expected, rel=1e-5)
    assert found["measurements"] == 2


def test_the_estimate_is_exact_where_the_model_is():
    signal, noise, sizes, total = 3.0, 40.0, torch.tensor([8.0, 5.0, 19.0]).double(), 32.0
    small = (signal + noise / sizes).mean()
    found = estimate(float(small), float((1 / sizes).mean()), signal + noise / total, 1 / total)
    assert found == pytest.approx((signal, noise), rel=1e-12)


def test_what_is_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="average from 0 to below 1"):
        GradientNoiseScale(average=1.0)


def test_a_step_of_one_row_is_refused_before_the_run():
    for rows, batches in ((1, 1), (2, 1), (1, 2)):
        data = {"class_path": "PretrainDataModule", "init_args": {"batch_size": rows}}
        config = {"data": data, "trainer": {"accumulate_grad_batches": batches}}
        found = list(GradientNoiseScale.preflight(Run((), config), None))
        assert len(found) == (rows * batches == 1)
