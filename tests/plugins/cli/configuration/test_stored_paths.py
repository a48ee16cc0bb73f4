"""What a checkpoint's configuration may write to: its run's folder, and what the user names."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from plugins.cli.configuration.stored_paths import Outside, is_place, rebase
from tests.support.cli_runs import RUN, checkpoint, state


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${run_folder}/checkpoints", "${run_folder}/checkpoints"),
        ("${run_folder}", "${run_folder}"),
        ("/old/runs/tiny/checkpoints", "${run_folder}/checkpoints"),
        ("/old/runs/tiny-3/a/b", "${run_folder}/a/b"),
        ("/new/tiny/a", "${run_folder}/a"),
        ("/old/runs/tiny", "${run_folder}"),
        ("/old/runs/tiny/../other", None),
        ("/old/runs/tinyx", None),
        ("/old/runs/tiny-x/a", None),
        ("${run_folder}/../other", None),
        ("${run_folder}x", None),
        ("/x/${run_folder}", None),
        ("relative", None),
        ("~/x", None),
        ("s3://bucket/x", None),
        ("file:/x", None),
        ("../x", None),
    ],
)
def test_a_path_lies_in_the_run_folder_or_is_marked(value, expected):
    item = {"class_path": "a.B", "init_args": {"dirpath": value, "other": 3}}
    stored = {"trainer": {"default_root_dir": "/old/runs/tiny", "callbacks": [item]}}
    rebase(stored, Path("/new/tiny"))
    found = item["init_args"]["dirpath"]
    assert isinstance(found, Outside) == (expected is None)
    assert found == (value if expected is None else expected)


@pytest.mark.parametrize(
    ("value", "is_it"),
    [
        ("s3://bucket/runs/first/checkpoints/", True),
        ("s3://bucket/${run_folder}/checkpoints", True),
        ("s3://bucket/${run_folder}", True),
        ("s3://bucket/runs/first", False),
        ("s3://bucket/runs/first/checkpoints/more", False),
        ("s3://buck.t/runs/first/checkpoints", False),
        ("gs://bucket/${run_folder}/checkpoints", False),
        ("/bucket/${run_folder}/checkpoints", False),
    ],
)
def test_the_folder_of_a_url_that_the_user_wrote(value, is_it):
    assert is_place(value, "s3://bucket/runs/first/checkpoints") == is_it
    assert not is_place(value, "")


def test_what_is_no_path_is_left_alone():
    values = {
        "name": "cosine",
        "accelerator": "cpu",
        "precision": "16-mixed",
        "monitor": "val/loss",
        "version": "",
    }
    stored = {"trainer": {"logger": {"init_args": dict(values)}}, "data": {"init_args": {"source": "/data"}}}
    rebase(stored, None)
    assert stored == {
        "trainer": {"logger": {"init_args": values}},
        "data": {"init_args": {"source": "/data"}},
    }
    assert not isinstance(stored["data"]["init_args"]["source"], Outside)


def strangers(folder, change):
    """Puts a checkpoint into a run folder whose configuration says something else than it did."""
    content = state(checkpoint(6))
    config = yaml.safe_load(content["leyden"]["config"])
    change(config["trainer"])
    content["leyden"]["config"] = yaml.safe_dump(config)
    torch.save(content, folder / "step-00000006.ckpt")
    return folder / "step-00000006.ckpt"


def writes_to(place):
    def change(trainer):
        trainer["callbacks"][0]["init_args"]["dirpath"] = str(place)

    return change


def logs_to(place):
    def change(trainer):
        trainer["logger"] = [
            {"class_path": "plugins.loggers.metrics_csv.MetricsCSV", "init_args": {"save_dir": str(place)}}
        ]

    return change


@pytest.mark.parametrize(("change", "option"), [(writes_to, "dirpath"), (logs_to, "save_dir")])
@pytest.mark.parametrize("alone", [True, False])
def test_a_strangers_checkpoint_neither_writes_nor_deletes_elsewhere(
    trained, tmp_path, change, option, alone
):
    mine = tmp_path / "mine"
    mine.mkdir()
    for step in (1, 2, 3):
        (mine / f"step-{step:08d}.ckpt").write_bytes(b"of the user")
    before = sorted(mine.iterdir())
    folder = tmp_path / "download" if alone else RUN / "checkpoints"
    folder.mkdir(exist_ok=True)
    path = strangers(folder, change(mine))
    done = trained("fit", f"--ckpt_path={path}", "--trainer.max_steps=8")
    assert done.code == 2
    assert f"sets {option} of" in done.err
    assert f"{mine}, outside of the run folder" in done.err
    assert len(done.err.splitlines()) <= 10
    assert sorted(mine.iterdir()) == before
    assert all(file.read_bytes() == b"of the user" for file in before)


def test_a_link_in_a_run_folder_leads_nowhere_else(trained, tmp_path):
    """An archive of a run folder can hold links: the run would write checkpoints there and prune others."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "step-00000001.ckpt").write_bytes(b"of the user")
    shutil.copy(checkpoint(6), RUN / "step-00000006.ckpt")
    shutil.rmtree(RUN / "checkpoints")
    (RUN / "checkpoints").symlink_to(mine)
    done = trained("fit", f"--ckpt_path={RUN}", "--trainer.max_steps=8")
    assert done.code == 2
    assert f"--callbacks.PeriodicCheckpoint.dirpath={mine}" in done.err
    assert [file.name for file in mine.iterdir()] == ["step-00000001.ckpt"]


@pytest.mark.parametrize("name", ["metrics.csv", "config.yaml"])
def test_a_file_that_is_a_link_out_of_the_run_folder_is_not_written(name, trained, tmp_path):
    mine = tmp_path / "notes.txt"
    mine.write_text("of the user")
    (RUN / name).unlink(missing_ok=True)
    (RUN / name).symlink_to(mine)
    done = trained("fit", f"--ckpt_path={checkpoint(6)}", "--trainer.max_steps=8")
    assert done.code == 2
    assert f"is a link to {mine}" in done.err
    assert mine.read_text() == "of the user"


def test_a_pipe_in_place_of_the_record_is_not_waited_for(trained):
    path = checkpoint(6)
    (RUN / "config.yaml").unlink()
    os.mkfifo(RUN / "config.yaml")
    assert trained("config", "diff", str(path), "tiny").code == 0
    done = trained("fit", f"--ckpt_path={path}", "--trainer.max_steps=8")
    assert done.code in (0, 2)


def test_the_user_may_say_so(trained, tmp_path):
    mine = tmp_path / "mine"
    path = strangers(RUN / "checkpoints", writes_to(mine))
    refused = trained("fit", f"--ckpt_path={path}", "--trainer.max_steps=8")
    option = next(line for line in refused.err.splitlines() if line.startswith("--callbacks."))
    assert option == f"--callbacks.PeriodicCheckpoint.dirpath={mine}"
    done = trained("fit", f"--ckpt_path={path}", "--trainer.max_steps=8", option)
    assert done.code == 0, done.err
    assert [file.name for file in mine.iterdir()] == ["step-00000008.ckpt"]


def test_a_config_of_the_users_says_so_too(trained, tmp_path, write_yaml):
    mine = tmp_path / "mine"
    path = strangers(RUN / "checkpoints", writes_to(mine))
    write_yaml("own.yaml", {"trainer": {"callbacks": {"PeriodicCheckpoint": {"dirpath": str(mine)}}}})
    done = trained("fit", "--config=own", f"--ckpt_path={path}", "--trainer.max_steps=8")
    assert done.code == 0, done.err


def test_a_path_in_the_old_run_folder_follows_a_copy(trained, tmp_path):
    strangers(RUN / "checkpoints", writes_to(tmp_path / RUN / "weights"))
    shutil.copytree(RUN, tmp_path / "copy" / "tiny")
    done = trained("fit", "--ckpt_path=copy/tiny", "--trainer.max_steps=8")
    assert done.code == 0, done.err
    assert (tmp_path / "copy/tiny/weights/step-00000008.ckpt").is_file()
    assert not (tmp_path / RUN / "weights").exists()


def test_a_strangers_root_is_no_folder_to_write_to(trained, tmp_path):
    def change(trainer):
        trainer["default_root_dir"] = str(tmp_path / "elsewhere")

    (tmp_path / "download").mkdir()
    path = strangers(tmp_path / "download", change)
    done = trained("fit", f"--ckpt_path={path}", "--trainer.max_steps=8")
    assert done.code == 0, done.err
    assert "Run folder: runs/run\n" in done.out
    assert [file.name for file in (tmp_path / "download").iterdir()] == [path.name]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--callbacks.PeriodicCheckpoint.dirpath=ftp://bucket/run"],
        ["--trainer.default_root_dir=s3://bucket/run"],
        ["--trainer.logger=MetricsCSV", "--trainer.logger.save_dir=gs://bucket"],
        ["--ckpt_path=ftp://bucket/run"],
    ],
    ids=" ".join,
)
def test_a_url_is_refused_and_no_folder_of_its_name_is_made(words, core, tmp_path):
    done = core("fit", "--config", "tiny", *words)
    assert done.code == 2
    assert "bucket" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]
