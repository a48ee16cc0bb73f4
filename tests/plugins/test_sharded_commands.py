"""`generate` and `validate` take a checkpoint that is a folder of ranks' parts as they take a file."""

import re

import pytest

from conformance.case import tiny
from conformance.runs import run
from conformance.workshop import text, workshop, write_config
from plugins.cli.configuration.config_files import merge

ALONE = ("--trainer.devices=1", "--trainer.strategy=auto")


@pytest.fixture(scope="module")
def checkpoints():
    """Returns the folder of a run on two ranks, and the file that `consolidate` makes of it."""
    folder = workshop() / "sharded"
    values = tiny([])
    callback = {"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": 4}}
    trainer = {"devices": 2, "strategy": "FSDP", "plugins": ["ShardedCheckpoint"], "callbacks": [callback]}
    data = {"source": str(text()), "cache_dir": str(workshop() / "prepared")}
    merge(values, {"trainer": trainer | {"default_root_dir": str(folder)}, "data": {"init_args": data}})
    done = run(["fit", f"--config={write_config('sharded', values)}"], folder, ranks=2)
    assert done.code == 0, done.error_text
    parts, whole = folder / "checkpoints" / "step-00000008.ckpt", folder / "whole.ckpt"
    assert (parts / "__1_0.distcp").is_file()
    done = run(["consolidate", str(parts), str(whole)], folder)
    assert done.code == 0, done.error_text
    return parts, whole


@pytest.mark.ci
def test_generate_continues_with_the_same_text(checkpoints):
    parts, whole = (
        run(["generate", f"--ckpt_path={path}", "--prompt=alpha", "--max_new_tokens=12"], path.parent)
        for path in checkpoints
    )
    assert (parts.code, whole.code) == (0, 0), parts.error_text
    assert parts.stdout == whole.stdout
    assert parts.stdout.startswith("alpha")


def test_validate_in_one_process_finds_the_same_loss(checkpoints):
    parts, whole = (run(["validate", f"--ckpt_path={path}", *ALONE], path.parent) for path in checkpoints)
    assert (parts.code, whole.code) == (0, 0), parts.error_text
    losses = [re.search(r"val/loss\D+([\d.]+)", done.stdout)[1] for done in (parts, whole)]
    assert losses[0] == losses[1]


def test_a_run_with_lightnings_own_plugin_is_told_how_to_make_a_file(checkpoints):
    parts, _ = checkpoints
    done = run(["validate", f"--ckpt_path={parts}", *ALONE, "--trainer.plugins=[]"], parts.parent)
    assert done.code == 2
    assert f"python -m core consolidate {parts} whole.ckpt" in done.error_text
