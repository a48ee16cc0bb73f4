import csv
import os
import random
import signal
import time

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from core.errors import ConfigError
from plugins.loggers.metrics_csv import MetricsCSV


def rows_of(folder):
    with open(folder / "metrics.csv", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert all(None not in row and None not in row.values() for row in rows), "a row has not all columns"
    return rows


def log_steps(folder, steps):
    logger = MetricsCSV(str(folder))
    for step in steps:
        logger.log_metrics({"train/loss": 1 / (step + 1), "train/tokens": 256 * (step + 1)}, step)
        if step % 20 == 9:
            logger.log_metrics({"val/loss": 2 / (step + 1), "epoch": 0}, step)
    logger.finalize("success")


def test_figures_of_a_step_share_its_row_and_read_back_exactly(tmp_path):
    logger = MetricsCSV(str(tmp_path))
    logger.log_metrics({"train/loss": 0.1 + 0.2, "epoch": 0}, step=9)
    logger.log_metrics({"val/loss": 1e-300}, step=9)
    logger.log_metrics({"train/loss": float("nan"), "epoch": 1}, step=19)
    assert rows_of(tmp_path) == [
        {"step": "9", "train/loss": "0.30000000000000004", "epoch": "0", "val/loss": "1e-300"},
        {"step": "19", "train/loss": "nan", "epoch": "1", "val/loss": ""},
    ]


def test_every_call_is_in_the_file_before_it_returns(tmp_path):
    logger = MetricsCSV(str(tmp_path))
    for step in range(3):
        logger.log_metrics({"train/loss": 1.0}, step)
        assert len(rows_of(tmp_path)) == step + 1


def test_a_file_that_claims_to_be_huge_is_not_read(tmp_path):
    with open(tmp_path / "metrics.csv", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="more than 1,073,741,824 bytes"):
        MetricsCSV(str(tmp_path)).log_metrics({"train/loss": 1.0}, 0)


def test_a_row_that_becomes_shorter_leaves_nothing_behind(tmp_path):
    logger = MetricsCSV(str(tmp_path))
    logger.log_metrics({"train/loss": 1.23456789012345}, 0)
    logger.log_metrics({"train/loss": 1.0}, 0)
    assert (tmp_path / "metrics.csv").read_text() == "step,train/loss\n0,1.0\n"


def test_resuming_gives_the_history_of_an_uninterrupted_run(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    log_steps(tmp_path / "whole", range(0, 100))
    log_steps(tmp_path / "resumed", range(0, 70))  # killed at 69; the last checkpoint is of step 40
    log_steps(tmp_path / "resumed", range(40, 100))
    whole = (tmp_path / "whole" / "metrics.csv").read_bytes()
    assert (tmp_path / "resumed" / "metrics.csv").read_bytes() == whole


def test_rows_beyond_the_resumed_step_are_dropped_and_a_validation_of_it_is_merged(tmp_path):
    log_steps(tmp_path, range(0, 70))
    logger = MetricsCSV(str(tmp_path))
    logger.log_metrics({"val/loss": 7.0, "epoch": 0}, 30)  # a resumed run may begin with its validation
    logger.log_metrics({"train/loss": 5.0}, 31)
    rows = rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == [*range(31), 31]
    assert (rows[30]["val/loss"], rows[30]["train/loss"]) == ("7.0", str(1 / 31))
    assert rows[31]["train/loss"] == "5.0"


def test_evaluation_alone_changes_nothing(tmp_path):
    log_steps(tmp_path, range(30))
    before = (tmp_path / "metrics.csv").read_bytes()
    logger = MetricsCSV(str(tmp_path))
    logger.log_metrics({"val/loss": 1.0, "epoch": 0}, 0)
    logger.log_metrics({"test/loss": 1.0}, 0)
    logger.finalize("success")
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_a_file_cut_off_anywhere_can_be_gone_on_with(tmp_path):
    log_steps(tmp_path, range(11))
    whole = (tmp_path / "metrics.csv").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "metrics.csv").write_bytes(whole[:length])
        logger = MetricsCSV(str(tmp_path))
        logger.log_metrics({"train/loss": 0.5}, 20)
        logger.finalize("success")
        rows = rows_of(tmp_path)
        complete = max(whole[:length].count(b"\n") - 1, 0)
        assert [int(row["step"]) for row in rows] == [*range(complete), 20]


def test_kill_9_leaves_a_file_that_reads_back(tmp_path):
    begun, begin = os.pipe()
    for attempt in range(8):
        pid = os.fork()
        if pid == 0:
            logger = MetricsCSV(str(tmp_path))
            for step in range(10**9):
                logger.log_metrics({"train/loss": 1 / (step + 1)}, step)
                logger.log_metrics({f"val/{step // 50 % 40}": 1.0}, step)  # new columns all the time
                if step == 100:
                    os.write(begin, b".")
        os.read(begun, 1)
        time.sleep(random.Random(attempt).uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        steps = [int(row["step"]) for row in rows_of(tmp_path)]
        assert steps == list(range(len(steps)))
        assert len(steps) > 50


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    log_steps(tmp_path, range(3))
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_file_is_named_and_kept(tmp_path):
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"metrics\.csv has no `step` column"):
        MetricsCSV(str(tmp_path)).log_metrics({"train/loss": 1.0}, 0)
    assert (tmp_path / "metrics.csv").read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n\0\xff\xfe\n",
        b"step,a\n1,\xff\n",
        b"step\0,a\n",
        b"\n\n",
        b"step,a\n" + b"9" * 200_000 + b",1\n",
    ],
    ids=["a picture", "no UTF-8", "NUL", "empty lines", "a long field"],
)
def test_a_file_that_is_no_table_is_named_and_kept_before_the_run_trains(content, tmp_path):
    (tmp_path / "metrics.csv").write_bytes(content)
    logger = MetricsCSV(str(tmp_path))
    with pytest.raises(ConfigError, match=r"metrics\.csv (is not a table of text|has no `step` column)"):
        logger.log_graph(None)
    assert (tmp_path / "metrics.csv").read_bytes() == content


def test_rows_without_a_number_as_step_are_left_out(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "a,step\n1,²\n2,٣\n3\n4,-1\n5,2\n6," + "9" * 40 + "\n", encoding="utf-8"
    )
    logger = MetricsCSV(str(tmp_path))
    logger.log_metrics({"a": 7}, 3)
    assert rows_of(tmp_path) == [{"a": "5", "step": "2"}, {"a": "7", "step": "3"}]


def test_a_url_is_no_folder():
    with pytest.raises(ConfigError, match="not to URLs yet"):
        MetricsCSV("s3://bucket/run")
