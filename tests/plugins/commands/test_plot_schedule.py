"""The command `plot-schedule`: what it writes is what a run then does, and it starts none."""

import csv

import matplotlib.image
import pytest
import yaml

from core.__main__ import main


@pytest.fixture
def plot(tiny, tmp_path, monkeypatch, capsys):
    """Runs the command on the tiny run in a folder of its own; returns (exit code, its output, the rows)."""

    def call(*words, **schedule):
        tiny["model"]["lr_scheduler"] = schedule or tiny["model"]["lr_scheduler"]
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny, sort_keys=False), encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        code = main(["plot-schedule", "--config=run.yaml", *words])
        output, path = capsys.readouterr(), tmp_path / "runs" / "plot-schedule" / "schedule.csv"
        rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
        return code, output.out + output.err, rows

    return call


def test_the_rows_are_what_the_run_does(plot, tmp_path, capsys):
    """A batch of the tiny run has 4 rows of 16 tokens."""
    logger = {"class_path": "MetricsCSV", "init_args": {"save_dir": "${run_folder}"}}
    code, output, rows = plot(
        "--trainer.accumulate_grad_batches=2",
        class_path="WarmupLinear",
        init_args={"warmup_tokens": 256, "total_tokens": 768, "min_lr_ratio": 0.1},
    )
    assert code == 0
    assert "6 optimizer steps, 768 tokens. Nothing was started." in output
    assert "Written: runs/plot-schedule/schedule.png and schedule.csv" in output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["plot-schedule"]
    assert [row["tokens"] for row in rows] == [str(128 * step) for step in range(1, 7)]
    assert {(row["tokens_per_step"], row["sequence_length"]) for row in rows} == {("128", "16")}

    config = yaml.safe_load((tmp_path / "run.yaml").read_text())
    config["trainer"] |= {"logger": [logger], "log_every_n_steps": 1, "accumulate_grad_batches": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config=run.yaml"]) == 0
    with open(tmp_path / "runs" / "run" / "metrics.csv", encoding="utf-8") as file:
        logged = [float(row["train/lr"]) for row in csv.DictReader(file) if row["train/lr"]]
    assert [float(row["learning_rate"]) for row in rows] == logged
    assert logged[-1] == 0.01 * 0.1


def test_the_picture_shows_three_curves(plot, tmp_path):
    assert plot("--trainer.max_steps=60")[0] == 0
    picture = matplotlib.image.imread(tmp_path / "runs" / "plot-schedule" / "schedule.png")
    for color in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E), (0x2C, 0xA0, 0x2C)):
        found = abs(picture[..., :3] - [part / 255 for part in color]).max(axis=-1) < 0.02
        assert found.any(axis=0).sum() > picture.shape[1] / 2  # over most of the width


def test_schedules_of_torch_and_none_at_all(plot):
    code, _, rows = plot(
        class_path="torch.optim.lr_scheduler.StepLR", init_args={"step_size": 2, "gamma": 0.5}
    )
    assert code == 0
    assert [float(row["learning_rate"]) for row in rows] == [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025]
    code, _, rows = plot("--model.lr_scheduler=null")
    assert {float(row["learning_rate"]) for row in rows} == {0.01}


def test_an_optimizer_that_warms_up_by_itself(plot, tiny):
    pytest.importorskip("schedulefree")
    init_args = {"lr": 0.02, "warmup_steps": 4}
    tiny["model"] |= {
        "optimizer": {"class_path": "ScheduleFreeAdamW", "init_args": init_args},
        "lr_scheduler": None,
    }
    code, _, rows = plot()
    assert code == 0
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(
        [0.005, 0.01, 0.015, 0.02, 0.02, 0.02]
    )


@pytest.mark.ci
def test_of_a_long_run_some_steps_are_kept(plot):
    code, output, rows = plot("--trainer.max_steps=12000")
    assert code == 0
    assert "12,000 optimizer steps, 768,000 tokens" in output
    assert 4000 <= len(rows) <= 5001
    assert (rows[0]["step"], rows[-1]["step"]) == ("1", "12000")


@pytest.mark.parametrize(("strategy", "readers"), [("DDP", 2), ("FSDP", 2), pytest.param("HybridParallel", 2, marks=pytest.mark.ci),
                                                   ("HybridParallel --trainer.strategy.tensor=2", 1)])  # fmt: skip
def test_the_rows_of_all_ranks_are_counted(plot, strategy, readers):
    words = f"--trainer.devices=2 --trainer.accelerator=cpu --trainer.strategy={strategy}".split()
    code, output, rows = plot(*words)
    assert code == 0, output
    assert int(rows[0]["tokens_per_step"]) == readers * 4 * 16


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--trainer.max_steps=-1", "set --trainer.max_steps"),
        ("--trainer.max_steps=10000001", "10,000,000 at most"),
        ("--model.lr_scheduler.warmup_steps=7", "Set --model.lr_scheduler.warmup_steps to less than 6"),
        ("--output=run.yaml", "cannot be written"),
        ("--model.lr_scheduler.warmup_step=2", "Did you mean warmup_steps?"),
    ],
)
def test_mistakes_end_with_code_2_and_what_to_do(plot, word, message):
    code, output, rows = plot(word)
    assert code == 2
    assert message in output
    assert not rows
