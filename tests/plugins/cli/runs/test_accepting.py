"""A checkpoint is accepted as a whole before a run writes anything; where the run goes on then."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from plugins.cli.runs.claims import CLAIM
from tests.support.chat_checkpoint import bytes_tokenizer, store_chat
from tests.support.cli_runs import RUN, checkpoint, state

LOGGERS = {
    "trainer": {
        "logger": [
            {"class_path": "lightning.pytorch.loggers.TensorBoardLogger",
             "init_args": {"save_dir": "${run_folder}", "name": "", "version": ""}},
            {"class_path": "MetricsCSV"},
        ],
        "callbacks+": [{"class_path": "LossCurve"}, {"class_path": "RunSummary"}],
    }
}  # fmt: skip


def snapshot(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def changed(change, step=6):
    """Changes the content of a checkpoint."""
    content = state(checkpoint(step))
    change(content)
    torch.save(content, checkpoint(step))


def other_shape(content):
    content["state_dict"]["network.norm.weight"] = torch.ones(7)


def other_optimizer(content):
    content["optimizer_states"][0]["param_groups"].pop()


def no_optimizer(content):
    content["optimizer_states"] = []


def no_moments(content):
    content["optimizer_states"][0]["state"] = {}


def other_position(content):
    content["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [{"place": 3}]


def other_settings(content):
    content["language_module"]["groups"] = [7, 8]


def with_a_curve(content):
    points = [(step, 100 * step, 4.0) for step in (2, 4, 6)]
    content["callbacks"]["LossCurve"] = {
        "training": points, "validation": [], "keep_one_in": 1, "offered": 3
    }  # fmt: skip


@pytest.mark.parametrize(
    "change", [other_shape, other_optimizer, no_optimizer, no_moments, other_position, other_settings]
)
def test_a_refused_resume_writes_nothing(change, trained, write_yaml, tmp_path):
    write_yaml("loggers.yaml", LOGGERS)
    changed(change)
    changed(with_a_curve)
    before = snapshot(tmp_path)
    done = trained("fit", "--config=loggers", f"--ckpt_path={checkpoint(6)}", "--trainer.max_steps=8")
    assert done.code == 2
    assert str(checkpoint(6)) in done.err or "The checkpoint holds another network" in done.err
    assert len(done.err.splitlines()) <= 10
    assert snapshot(tmp_path) == before
    assert not (RUN / CLAIM).exists()


def test_an_epoch_that_is_too_short_for_a_validation_is_found_before_anything_is_written(trained, tmp_path):
    before = snapshot(tmp_path)
    done = trained(
        "fit", f"--ckpt_path={checkpoint(4)}", "--trainer.max_steps=8", "--trainer.accumulate_grad_batches=2",
        "--trainer.val_check_interval=9", "--trainer.check_val_every_n_epoch=1", "--trainer.limit_val_batches=1",
    )  # fmt: skip
    assert done.code == 2
    assert "optimizer steps; an epoch has only" in done.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("change", [no_optimizer, no_moments])
def test_weights_without_an_optimizer_are_not_resumed_silently(change, trained):
    changed(change)
    done = trained("fit", f"--ckpt_path={checkpoint(6)}", "--trainer.max_steps=8")
    assert done.code == 2
    assert f"{checkpoint(6)} holds no state of the optimizer" in done.err
    assert trained("validate", f"--ckpt_path={checkpoint(6)}").code == 0


def test_a_schedule_that_begins_afresh_is_said(trained):
    changed(lambda content: content.update(lr_schedulers=[]))
    done = trained("fit", f"--ckpt_path={checkpoint(6)}", "--trainer.max_steps=8")
    assert done.code == 0
    assert "no state of a schedule: it begins at its first step" in done.err


def test_an_accepted_checkpoint_leads_to_the_usual_files(trained, write_yaml):
    write_yaml("loggers.yaml", LOGGERS)
    done = trained("fit", "--config=loggers", "--ckpt_path=runs/tiny", "--trainer.max_steps=8")
    assert done.code == 0, done.err
    names = {path.name.partition(".")[0] for path in RUN.iterdir()}
    assert {"config", "techniques", "events", "hparams", "metrics", "checkpoints"} <= names
    assert not (RUN / CLAIM).exists()


def test_a_teacher_of_other_tokens_is_refused_before_anything_is_written(core, write_yaml, tmp_path):
    store_chat(tmp_path / "teacher.ckpt")
    other = json.loads(bytes_tokenizer())
    words = other["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    write_yaml("tokenizer.json", json.dumps(other))
    write_yaml("text.txt", "a text of some words " * 200)
    tokenizer = {"class_path": "PretrainedTokenizer", "init_args": {"path": "tokenizer.json"}}
    data = {
        "source": "text.txt",
        "tokenizer": tokenizer,
        "sequence_length": 16,
        "batch_size": 2,
        "packing": "Concatenate",
    }
    taught = {
        "base": ["tiny", "data/text"],
        "model": {
            "network": {"init_args": {"vocab_size": 320}},
            "objective": {"class_path": "Distillation", "init_args": {"teacher": "teacher.ckpt"}},
        },
        "data": {"init_args": data | {"cache_dir": "cache"}},
    }
    write_yaml("taught.yaml", taught)
    write_yaml("loggers.yaml", LOGGERS)
    done = core("fit", "--config=taught", "--config=loggers")
    assert done.code == 2
    assert "the teacher in teacher.ckpt has another tokenizer than the data" in done.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_other_weights_beside_a_checkpoint_are_said_not_to_be_read(command, trained):
    words = (command, f"--ckpt_path={checkpoint(6)}", "--trainer.max_steps=6")
    assert "is not read" not in trained(*words).out
    done = trained(*words, "--model.weights=nowhere")
    assert done.code == 0, done.err
    assert "model.weights=nowhere is not read: the weights are those of the checkpoint." in done.out


def test_a_written_root_is_where_the_run_goes_on(trained):
    before = snapshot(RUN)
    words = [
        "fit",
        "--ckpt_path=runs/tiny",
        "--trainer.max_steps=8",
        "--trainer.default_root_dir=elsewhere/a",
    ]
    done = trained(*words)
    assert done.code == 0, done.err
    assert "Run folder: elsewhere/a\n" in done.out
    assert snapshot(RUN) == before
    assert {path.name for path in Path("elsewhere/a").iterdir()} == {
        "checkpoints",
        "config.yaml",
        "techniques.txt",
    }
    assert checkpoint(8, Path("elsewhere/a")).is_file()
    assert "Run folder: elsewhere/a-2\n" in trained(*words).out
    last = trained("fit", "--ckpt_path=elsewhere/a", "--trainer.max_steps=9")
    assert "Run folder: elsewhere/a\n" in last.out


def test_a_copied_run_goes_on_from_its_last_step(trained):
    """Copying gives every file another time, the older checkpoint perhaps the later one."""
    shutil.copytree(RUN, "copy", copy_function=shutil.copyfile)
    shutil.copyfile(checkpoint(4), checkpoint(4, Path("copy")))
    done = trained("fit", "--ckpt_path=copy", "--trainer.max_steps=7")
    assert done.code == 0, done.err
    assert f"Run folder: copy\nFrom checkpoint: {checkpoint(6, Path('copy'))}" in done.out
    assert not checkpoint(7).exists()


@pytest.mark.parametrize("folder", ["/", ".", "runs"])
def test_a_parent_folder_adopts_nobodys_run(folder, trained):
    before = snapshot(".")
    done = trained("fit", f"--ckpt_path={folder}", "--trainer.max_steps=8")
    assert done.code == 2
    assert "neither a run folder" in done.err
    assert snapshot(".") == before


# -- wrong types -------------------------------------------------------------------------------------

FIELDS = [
    (), ("state_dict",), ("state_dict", "network.norm.weight"), ("epoch",), ("global_step",),
    ("pytorch-lightning_version",), ("callbacks",), ("callbacks", 0), ("optimizer_states",), ("optimizer_states", 0),
    ("optimizer_states", 0, "state"), ("optimizer_states", 0, "state", 0), ("optimizer_states", 0, "state", 0, "exp_avg"),
    ("optimizer_states", 0, "state", 0, "step"), ("optimizer_states", 0, "param_groups"),
    ("optimizer_states", 0, "param_groups", 0), ("optimizer_states", 0, "param_groups", 0, "params"),
    ("optimizer_states", 0, "param_groups", 0, "lr"), ("lr_schedulers",), ("lr_schedulers", 0),
    ("lr_schedulers", 0, "last_epoch"), ("lr_schedulers", 0, "tokens"), ("loops",), ("loops", "fit_loop"),
    ("loops", "fit_loop", "epoch_progress"), ("loops", "fit_loop", "epoch_progress", "current"),
    ("loops", "fit_loop", "epoch_progress", "current", "ready"), ("loops", "fit_loop", "epoch_loop.batch_progress"),
    ("loops", "fit_loop", "epoch_loop.batch_progress", "total", "completed"),
    ("loops", "fit_loop", "epoch_loop.state_dict"), ("loops", "fit_loop", "state_dict"), ("loops", "fit_loop", "accumulated"),
    ("loops", "fit_loop", "epoch_loop.automatic_optimization.optim_progress"),
    ("leyden",), ("leyden", "config"), ("leyden", "version"), ("leyden", "ranks"),
    ("language_module",), ("language_module", "tokens_seen"), ("language_module", "window"),
    ("language_module", "groups"), ("language_module", "groups", 0),
]  # fmt: skip
WRONG = {"a text": "wrong", "none": None, "a list": [1], "a dict": {"x": 1}, "negative": -1, "missing": ...}


def mutated(content, path, wrong):
    """Returns a copy with one field changed; None if there is no such field."""
    if not path:
        return wrong
    copy = deepcopy(content)
    holder = copy
    for key in path[:-1]:
        holder = holder[
            list(holder)[key]
            if isinstance(holder, dict) and isinstance(key, int) and key not in holder
            else key
        ]
    key = path[-1]
    if isinstance(holder, dict) and isinstance(key, int) and key not in holder:
        key = list(holder)[key]
    if wrong is ...:
        del holder[key]
    else:
        holder[key] = wrong
    return copy


def check_mutations(trained, fields, kinds, resume):
    content, target = state(checkpoint(6)), checkpoint(6)
    kept = snapshot(RUN)
    refused, odd = 0, []
    for path in fields:
        for name in kinds:
            if not path and WRONG[name] is ...:
                continue
            torch.save(
                mutated(content, path, deepcopy(WRONG[name]) if WRONG[name] is not ... else ...), target
            )
            done = trained(*resume, f"--ckpt_path={target}")
            if done.code not in (0, 2) or len(done.err.splitlines()) > 10:
                odd.append((path, name, done.err))
            refused += done.code == 2
            shutil.rmtree(RUN)
            for file, data in kept.items():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
    assert not odd
    return refused


def test_a_field_of_another_type_is_refused(trained):
    fields = FIELDS[::12]
    found = check_mutations(trained, fields, ["a text", "missing"], ["fit", "--trainer.max_steps=7"])
    assert found >= len(fields)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("every", "least"),
    [pytest.param(6, 22, marks=pytest.mark.ci), pytest.param(1, 150, marks=pytest.mark.slow)],
)
def test_every_field_of_another_type_is_refused_or_does_no_harm(every, least, trained):
    found = check_mutations(trained, FIELDS[::every], WRONG, ["fit", "--trainer.max_steps=8"])
    assert found >= least


@pytest.mark.parametrize("command", ["validate", "generate", "consolidate"])
def test_other_readers_refuse_them_too(command, trained):
    for path, wrong in (
        (("state_dict",), [1]),
        (("leyden",), "x"),
        (("leyden", "config"), {}),
        ((), [1]),
        (("epoch",), "x"),
    ):
        torch.save(mutated(state(checkpoint(6)), path, wrong), "mutated.ckpt")
        words = {"validate": ["--ckpt_path=mutated.ckpt"], "generate": ["--ckpt_path=mutated.ckpt"],
                 "consolidate": ["mutated.ckpt", "whole.ckpt"]}[command]  # fmt: skip
        done = trained(command, *words)
        assert done.code == 2, (path, done)
        assert "mutated.ckpt" in done.err


def test_a_broken_newest_is_named_and_the_one_before_is_taken(trained):
    changed(lambda content: content.update(loops=[1]))
    done = trained("fit", "--ckpt_path=runs/tiny")
    assert done.code == 0
    assert f"{checkpoint(6)} is skipped: loops is a list, not a dict" in done.err
    assert f"From checkpoint: {checkpoint(4)}" in done.out
    assert yaml.safe_load((RUN / "config.yaml").read_text())["trainer"]["max_steps"] == 6


class Breaks(Callback):
    """Fails in the first step, as a technique with a mistake of its own does."""

    def on_before_backward(self, *_: object) -> None:
        raise KeyError("of the technique")


def test_a_techniques_own_mistake_is_not_the_checkpoints(trained):
    done = trained(
        "fit", "--ckpt_path=runs/tiny", "--trainer.max_steps=8", f"--trainer.callbacks+={__name__}.Breaks"
    )
    assert done.code == 1
    assert "KeyError: 'of the technique'" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [([], True), (["--trainer.deterministic=warn"], True), (["--trainer.deterministic=true"], False)],
    ids=str,
)
def test_a_run_says_that_a_gpu_does_not_resume_bitwise(words, said, trained, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # Lightning sets it
    try:
        done = trained("check", "--ckpt_path=last", "--trainer.accelerator=gpu", *words)
    finally:
        torch.use_deterministic_algorithms(False)
    assert done.code == 0, done.err
    assert ("Not bitwise as without the stop" in done.out) == said
