import csv


def read(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_training_validation_and_throughput_share_the_row_of_their_step(run):
    rows = read(run.folder)
    assert [int(row["step"]) for row in rows] == [*range(5, 61, 5)]
    assert all(float(row["train/loss"]) > 0 for row in rows)
    assert [row["step"] for row in rows if row["val/loss"]] == ["20", "40", "60"]
    assert [row["step"] for row in rows if row["throughput/tokens_per_second"]] == [
        str(step) for step in range(10, 61, 5)
    ]


def test_a_resumed_run_goes_on_in_the_same_file(run, resumed):
    before, after = read(run.folder), read(resumed.folder)
    assert [int(row["step"]) for row in after] == [*range(5, 81, 5)]
    assert after[:8] == before[:8]
    same = ("train/loss", "train/tokens", "val/loss")  # not the speed
    assert [[row[name] for name in same] for row in after[8:12]] != [[""] * 3] * 4
    assert [row["train/tokens"] for row in after[8:12]] == [row["train/tokens"] for row in before[8:12]]


def test_validate_changes_nothing(run, make_trainer, module, data):
    from plugins.loggers.metrics_csv import MetricsCSV

    before = (run.folder / "metrics.csv").read_bytes()
    trainer = make_trainer(run.folder, [], logger=[MetricsCSV(str(run.folder))])
    trainer.validate(
        module(), datamodule=data(), ckpt_path=run.folder / "checkpoints" / "last.ckpt", verbose=False
    )
    assert (run.folder / "metrics.csv").read_bytes() == before
