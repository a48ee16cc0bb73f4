"""fit, validate, test and predict: composing, overriding, resuming, and what is said of mistakes."""

import concurrent.futures
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from core.errors import ConfigError
from plugins.cli.configuration.arguments import split_configs
from plugins.cli.configuration.request import differences, prepare
from plugins.cli.runs import run_folder
from tests.conftest import HOUSE, TINY, run_core
from tests.support.cli_runs import RUN, checkpoint, state
from tests.support.full_disk import file_size_limit, room_once_it_waits, signalled


@pytest.fixture
def parsed(core):
    """The whole configuration that arguments lead to, as `--print_config` shows it."""

    def parse(*arguments):
        done = core("fit", *arguments, "--print_config")
        assert done.code == 0, done.err
        return yaml.safe_load(done.out)

    return parse


def assert_equal_weights(one, other):
    a, b = state(one)["state_dict"], state(other)["state_dict"]
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


# -- composing and overriding ----------------------------------------------------------------------


def test_configs_compose_from_left_to_right(parsed, write_yaml):
    write_yaml("a.yaml", {"trainer": {"max_steps": 7, "log_every_n_steps": 5}})
    write_yaml("b.yaml", {"trainer": {"max_steps": 8, "callbacks+": "Throughput"}})
    config = parsed("--config", "tiny", "--config=a", "-c", "b.yaml")
    assert (config["trainer"]["max_steps"], config["trainer"]["log_every_n_steps"]) == (8, 5)
    names = [item["class_path"].rpartition(".")[2] for item in config["trainer"]["callbacks"]]
    assert names == ["PeriodicCheckpoint", "Throughput"]
    assert parsed("-c", "tiny", "-c", "b", "-c", "a")["trainer"]["max_steps"] == 7


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "tiny", "--model.network=GPT", "--model.network.n_layer=3"],
        ["--model.network=GPT", "--model.network.n_layer=3", "--config", "tiny"],
        ["--model.network", "GPT", "--config=tiny", "--model.network.n_layer", "3"],
        ["--model.network.n_layer=3", "--config", "tiny"],
    ],
)
def test_arguments_win_wherever_they_stand(arguments, parsed):
    network = parsed(*arguments)["model"]["network"]
    assert network["class_path"] == "plugins.networks.gpt.GPT"
    assert (network["init_args"]["n_layer"], network["init_args"]["n_embd"]) == (3, 16)


def test_the_last_of_several_arguments_wins(parsed):
    config = parsed("--trainer.max_steps=8", "--config", "tiny", "--trainer.max_steps=9")
    assert config["trainer"]["max_steps"] == 9


def test_an_argument_may_choose_another_class(parsed):
    config = parsed("--config", "tiny", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.5")
    assert config["model"]["optimizer"]["class_path"] == "torch.optim.SGD"
    assert config["model"]["optimizer"]["init_args"]["lr"] == 0.5
    assert parsed("--config", "tiny", "--model.lr_scheduler=null")["model"]["lr_scheduler"] is None


@pytest.mark.parametrize(
    "words", [["--trainer.callbacks+=Throughput"], ["--trainer.callbacks+", "Throughput"]]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_callback_is_appended_by_its_short_name(words, first, parsed):
    arguments = [*words, "--config", "tiny"] if first else ["--config", "tiny", *words]
    callbacks = parsed(*arguments)["trainer"]["callbacks"]
    assert [item["class_path"] for item in callbacks] == [
        "callbacks.periodic_checkpoint.PeriodicCheckpoint",
        "callbacks.throughput.Throughput",
    ]


def test_an_appended_callback_takes_arguments(parsed):
    words = ["--trainer.callbacks+=TextSamples", "--trainer.callbacks.seed=5"]
    callbacks = parsed("--config", "tiny", *words)["trainer"]["callbacks"]
    assert callbacks[1]["init_args"]["seed"] == 5


def test_a_printed_config_leads_to_itself(core, write_yaml, tmp_path):
    first = core("fit", "--config", "tiny", "--trainer.callbacks+=Throughput", "--print_config")
    write_yaml("printed.yaml", first.out)
    second = core("fit", "--config", "printed", "--print_config")
    root = "default_root_dir: runs/tiny"
    assert root in first.out
    assert second.out == first.out
    assert not (tmp_path / "runs").exists()


def test_a_time_limit_is_no_number_to_base_60(parsed, write_yaml):
    write_yaml("x.yaml", "trainer: {max_time: 10:00:00:00}")
    assert parsed("--config", "tiny", "--config", "x")["trainer"]["max_time"] == "10:00:00:00"


def test_an_empty_section_is_no_section(parsed, write_yaml):
    write_yaml("x.yaml", {**TINY, "trainer": None})
    assert parsed("--config", "x")["trainer"]["default_root_dir"] == "runs/x"


def test_configs_are_split_from_the_other_arguments():
    words = ["-c", "a", "--x", "1", "--config=b", "--config", "c", "--y=-c"]
    assert split_configs(words) == (["a", "b", "c"], ["--x", "1", "--y=-c"])
    with pytest.raises(ConfigError, match="--config needs a file"):
        split_configs(["--x", "--config"])


def test_differences_are_listed_leaf_by_leaf():
    old = {"a": {"b": 1, "c": [1, 2]}, "l": [{"x": 1}, {"x": 2}], "same": 0}
    new = {"a": {"b": 2, "c": [1]}, "l": [{"x": 1}, {"x": 3}], "same": 0, "more": 1, "none": None}
    assert differences(old, new) == [
        "a.b: 2 (the checkpoint has 1)",
        "a.c: [1] (the checkpoint has [1, 2])",
        "l.1.x: 3 (the checkpoint has 2)",
        "more: 1 (the checkpoint has (absent))",
    ]
    assert differences(old, old) == []


# -- the run folder --------------------------------------------------------------------------------


def test_the_run_folder_records_config_and_techniques(finished):
    text = (finished / RUN / "config.yaml").read_text()
    config = yaml.safe_load(text)
    (callback,) = config["trainer"]["callbacks"]
    assert (
        callback["init_args"]["dirpath"] == "${run_folder}/checkpoints"
    )  # kept, so that it can be run again
    assert config["model"]["network"]["init_args"]["n_layer"] == 1
    assert config["data"]["init_args"]["batch_size"] == 4  # a default
    table = (finished / RUN / "techniques.txt").read_text()
    for name in (
        "PeriodicCheckpoint",
        "AtomicCheckpoint",
        "GPT",
        "CausalLM",
        "AdamW",
        "WarmupCosine",
        "ToyData",
    ):
        assert f"\n{name} " in table
    assert table in (finished / "stdout").read_text()
    assert [path.name for path in sorted((finished / RUN / "checkpoints").iterdir())] == [
        "step-00000004.ckpt",
        "step-00000006.ckpt",
    ]
    assert yaml.safe_load(state(finished / checkpoint(6))["leyden"]["config"]) == config
    assert sorted(path.name for path in (finished / RUN).iterdir()) == [
        "checkpoints",
        "config.yaml",
        "techniques.txt",
    ]


def test_a_run_is_repeated_from_its_recorded_config_bitwise_in_a_folder_of_its_own(trained):
    done = trained("fit", "--config", RUN / "config.yaml")
    assert (done.code, done.err) == (0, "")
    assert "Run folder: runs/tiny-2" in done.out
    assert_equal_weights(checkpoint(6), checkpoint(6, Path("runs/tiny-2")))
    assert (RUN / "config.yaml").read_text() == Path("runs/tiny-2/config.yaml").read_text()
    assert "Run folder: runs/tiny-3" in trained("fit", "--config", "tiny").out


@pytest.mark.parametrize("taken", ["metrics.csv", "checkpoints"])
def test_a_folder_that_belongs_to_a_run_is_left_alone(taken, core):
    (RUN / taken).mkdir(parents=True)
    assert "Run folder: runs/tiny-2\n" in core("fit", "--config", "tiny", "--trainer.max_steps=3").out
    assert [path.name for path in RUN.iterdir()] == [taken]


def test_another_seed_gives_another_run(trained):
    assert trained("fit", "--config", "tiny", "--seed_everything=1").code == 0
    with pytest.raises(AssertionError):
        assert_equal_weights(checkpoint(6), checkpoint(6, Path("runs/tiny-2")))


def test_the_root_can_be_chosen(core):
    assert (
        core(
            "fit", "--config", "tiny", "--trainer.default_root_dir=elsewhere/a", "--trainer.max_steps=1"
        ).code
        == 0
    )
    assert checkpoint(1, Path("elsewhere/a")).is_file()


def test_a_folder_that_looks_like_a_number_is_a_folder(core, write_yaml):
    callback = {"class_path": "PeriodicCheckpoint", "init_args": {"dirpath": "PLACE"}}
    config = yaml.safe_dump({"trainer": {"max_steps": 3, "callbacks": [callback]}})
    write_yaml("x.yaml", config.replace("PLACE", '"1e3"'))
    assert core("fit", "--config", "tiny", "--config", "x").code == 0
    assert Path("1e3/step-00000003.ckpt").is_file()


def test_a_full_disk_at_the_last_checkpoint_loses_no_run(core, tmp_path):
    """It is the first one, too."""
    words = ["fit", "--config", "tiny", "--callbacks.PeriodicCheckpoint.every_n_steps=100"]
    with file_size_limit(30_000), room_once_it_waits():  # config.yaml is smaller, a checkpoint larger
        done = core(*words)
    assert done.code == 0
    assert "step-00000006.ckpt could not be written: File too large" in done.err.splitlines()[0]
    assert state(checkpoint(6))["global_step"] == 6


def test_a_run_that_is_ended_on_a_full_disk_says_what_to_do_and_leaves_no_debris(core):
    with file_size_limit(30_000), signalled():
        done = core("fit", "--config", "tiny")
    assert done.code == 2
    assert "start the run again as you did" in done.err
    assert list((RUN / "checkpoints").iterdir()) == []


# -- going on --------------------------------------------------------------------------------------


def test_last_takes_the_newest_and_goes_on_bitwise(trained):
    """From step 4 to 6, in the middle of an epoch: as if it had not stopped."""
    Path(checkpoint(6)).rename("whole.ckpt")
    done = trained("fit", "--config", "tiny", "--ckpt_path", "last")
    assert (done.code, done.err) == (0, "")
    assert f"Run folder: {RUN}\nFrom checkpoint: {checkpoint(4)}\n" in done.out
    assert "(the checkpoint has" not in done.out
    assert_equal_weights("whole.ckpt", checkpoint(6))
    optimizers = [state(path)["optimizer_states"][0]["state"] for path in ("whole.ckpt", checkpoint(6))]
    assert all(
        torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])
        for a, b in zip(*map(dict.values, optimizers), strict=True)
    )


def test_last_takes_the_newest_of_all_runs_of_the_root(trained):
    trained("fit", "--config", "tiny", "--trainer.max_steps=3")
    done = trained("fit", "--config", "tiny", "--ckpt_path=last", "--trainer.max_steps=4")
    assert "From checkpoint: runs/tiny-2/checkpoints/step-00000003.ckpt" in done.out
    assert checkpoint(4, Path("runs/tiny-2")).is_file()


def test_last_does_not_take_another_experiments_checkpoint(trained):
    shutil.copytree(RUN, "runs/tiny-v2", copy_function=shutil.copyfile)  # newer than the originals
    done = trained("fit", "--config", "tiny", "--ckpt_path=last", "--trainer.max_steps=7")
    assert f"From checkpoint: {checkpoint(6)}\n" in done.out


@pytest.mark.parametrize("argument", ["last", "runs/tiny"])
def test_a_truncated_newest_checkpoint_is_named_and_passed_over(argument, trained):
    with open(checkpoint(6), "r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    done = trained("fit", "--config", "tiny", "--ckpt_path", argument)
    assert done.code == 0
    assert done.err.startswith(f"{checkpoint(6)} is skipped: cut off")
    assert f"From checkpoint: {checkpoint(4)}" in done.out


def test_what_the_user_writes_wins_over_the_checkpoint_and_the_rest_comes_from_it(trained, write_yaml):
    write_yaml("more.yaml", {"trainer": {"max_steps": 8}})
    words = ["--config", "more", "--ckpt_path", RUN, "--model.optimizer.weight_decay=0.5"]
    done = trained("fit", *words)
    assert (done.code, done.err) == (0, "")
    shown = [line for line in done.out.splitlines() if "(the checkpoint has" in line]
    assert shown == [
        "  model.optimizer.init_args.weight_decay: 0.5 (the checkpoint has 0.1)",
        "  trainer.max_steps: 8 (the checkpoint has 6)",
    ]
    after = state(checkpoint(8))
    groups = after["optimizer_states"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert after["global_step"] == 8
    config = yaml.safe_load((RUN / "config.yaml").read_text())
    assert config["model"]["optimizer"]["init_args"]["lr"] == 0.01
    assert config["data"]["class_path"] == "tests.support.toy.ToyData"
    assert (
        yaml.safe_load((RUN / "config.1.yaml").read_text())["trainer"]["max_steps"] == 6
    )  # the first one is kept


def test_an_overlay_appends_to_the_callbacks_of_the_checkpoint(trained, write_yaml):
    write_yaml("more.yaml", {"trainer": {"max_steps": 7, "callbacks+": "Throughput"}})
    assert trained("fit", "--config", "more", "--ckpt_path", RUN).code == 0
    callbacks = yaml.safe_load((RUN / "config.yaml").read_text())["trainer"]["callbacks"]
    assert [item["class_path"].rpartition(".")[2] for item in callbacks] == [
        "PeriodicCheckpoint",
        "Throughput",
    ]
    assert callbacks[0]["init_args"]["every_n_steps"] == 2


def test_the_checkpoint_may_stand_in_a_config(trained, write_yaml):
    write_yaml("more.yaml", {"ckpt_path": str(checkpoint(4)), "trainer": {"max_steps": 7}})
    keep = "--callbacks.PeriodicCheckpoint.keep=-1"
    done = trained("fit", "--config", "more", "--ckpt_path", checkpoint(6), keep)
    assert f"From checkpoint: {checkpoint(6)}" in done.out
    assert f"From checkpoint: {checkpoint(4)}" in trained("fit", "--config", "more").out


def test_predict_says_that_there_is_nothing_to_write(trained):
    before = (RUN / "predictions.safetensors").exists()
    for option, words in (
        ("--return_predictions=false", "Leave it out"),
        ("--trainer.limit_predict_batches=0", "no batch"),
    ):
        done = trained("predict", "--ckpt_path", RUN, option)
        assert done.code == 2
        assert words in done.err
    assert (RUN / "predictions.safetensors").exists() == before


def test_validate_test_and_predict_agree_on_a_checkpoint(trained):
    before = {path.name: path.read_bytes() for path in RUN.iterdir() if path.is_file()}
    loggers = ["lightning.pytorch.loggers.TensorBoardLogger", "MetricsCSV"]
    log = [
        f"--trainer.logger={json.dumps([{'class_path': n, 'init_args': {'save_dir': str(RUN)}} for n in loggers])}"
    ]
    shown = {word: trained(word, "--ckpt_path", RUN, *log) for word in ("validate", "test", "predict")}
    assert [done.code for done in shown.values()] == [0, 0, 0]
    predicted = load_file(RUN / "predictions.safetensors")["log_probability_nats"]
    assert predicted.shape == (16, 16)
    for word, name in (("validate", "val/loss"), ("test", "test/loss")):
        (line,) = [line for line in shown[word].out.splitlines() if name in line]
        assert float(line.split()[3]) == pytest.approx(-predicted.mean().item(), rel=1e-5)
    # what the training has written of itself stays as it is: no points at step 0, no further configs
    (RUN / "predictions.safetensors").unlink()
    before.pop("predictions.safetensors", None)
    assert {path.name: path.read_bytes() for path in RUN.iterdir() if path.is_file()} == before
    assert not list(RUN.rglob("*tfevents*"))


# -- mistakes --------------------------------------------------------------------------------------


def network(**arguments):
    return {"model": {"network": {"init_args": arguments}}}


def early_stopping(monitor):
    return {"trainer": {"callbacks+": [{"class_path": "EarlyStopping", "init_args": {"monitor": monitor}}]}}


@pytest.mark.parametrize(
    ("written", "words", "hint"),
    [
        pytest.param({}, ["--config", "quikstart"], "Did you mean quickstart?", id="unknown config"),
        pytest.param({}, ["--config"], "--config needs a file", id="no config"),
        pytest.param({"base": "gone"}, [], "over.yaml:1: There is no config file 'gone'", id="unknown base"),
        pytest.param("a: [\n", [], "over.yaml:2: this is not YAML", id="broken yaml"),
        pytest.param({"modle": {"x": 1}}, [], "modle", id="unknown section"),
        pytest.param({"trainer": {"max_step": 1}}, [], "max_step", id="unknown key"),
        pytest.param({"model": {"netwrk": 1}}, [], "netwrk", id="unknown key of model"),
        pytest.param({}, ["--trainer.max_step=1"], "max_step", id="unknown argument"),
        pytest.param({}, ["word"], "word", id="stray word"),
        pytest.param({3: 4}, [], "3", id="number as key"),
        pytest.param(network(n_leyer=1), [], "n_leyer", id="unknown argument of a technique in yaml"),
        pytest.param({}, ["--model.network.n_leyer=1"], "n_leyer", id="unknown argument of a technique"),
        pytest.param({}, ["--model.network=GTP"], "GTP", id="unknown network"),
        pytest.param({"model": {"objective": "CausalML"}}, [], "CausalML", id="unknown objective in yaml"),
        pytest.param(
            {"trainer": {"callbacks+": "Troughput"}}, [], "Troughput", id="unknown callback in yaml"
        ),
        pytest.param({}, ["--trainer.callbacks+=Troughput"], "Troughput", id="unknown callback"),
        pytest.param({}, ["--data=ToyDta"], "ToyDta", id="unknown data"),
        pytest.param({"trainer": {"max_steps": "many"}}, [], "max_steps", id="wrong type in yaml"),
        pytest.param(network(n_layer="two"), [], "n_layer", id="wrong type of a technique in yaml"),
        pytest.param({}, ["--trainer.max_steps=1.5"], "max_steps", id="wrong type"),
        pytest.param({}, ["--trainer.strategy=fsdpp"], "fsdpp", id="unknown strategy"),
        pytest.param({}, ["--trainer.accelerator=gpuu"], "gpuu", id="unknown accelerator"),
        pytest.param({}, ["--trainer.precision=12"], "precision", id="unknown precision"),
        pytest.param({}, ["--model.network.n_head=3"], "n_embd=16", id="network refuses"),
        pytest.param({}, ["--model.lr_scheduler.warmup_steps=6"], "warmup_steps is 6", id="schedule refuses"),
        pytest.param({}, ["--data.vocab_size=65"], "vocab_size=128", id="data does not fit"),
        pytest.param(
            {}, ["--trainer.callbacks.every_n_steps=0"], "PeriodicCheckpoint takes", id="callback refuses"
        ),
        pytest.param({}, ["--trainer.callbacks+=PeriodicCheckpoint"], "is 2 times", id="preflight refuses"),
        pytest.param({}, ["--ckpt_path="], "--ckpt_path is empty", id="empty checkpoint"),
        pytest.param(
            {}, ["--seed_everything=-1"], "--seed_everything: seed_everything is -1", id="seed below 0"
        ),
        pytest.param(
            {"trainer": {"default_root_dir": "x" * 300}}, [], "cannot be made", id="folder's name too long"
        ),
        pytest.param(
            {"trainer": {"default_root_dir": "a\0b"}}, [], "NUL character", id="folder with a NUL character"
        ),
        pytest.param(
            {"trainer": {"default_root_dir": None}}, [], "default_root_dir is null", id="null as folder"
        ),
        pytest.param({"trainer": {"default_root_dir": [3]}}, [], "default_root_dir", id="list as folder"),
        pytest.param({}, ["--trainer.default_root_dir=null"], "Name a folder", id="null as folder, argument"),
        pytest.param(
            {"trainer": {"callbacks": {"PeriodicCheckpoint": {"dirpath": None}}}},
            [],
            "dirpath is null, not str",
            id="null as a callback's folder",
        ),
        pytest.param(
            {"trainer": {"logger": [{"class_path": "MetricsCSV", "init_args": {"save_dir": None}}]}},
            [],
            "save_dir is null, not str",
            id="null as a logger's folder",
        ),
        pytest.param({"base": "x" * 300}, [], "xxxx", id="base too long"),
        pytest.param({}, ["--trainer.val_check_interval=1000"], "batches (16)", id="never validated"),
        pytest.param(early_stopping("val/los"), [], "Did you mean val/loss?", id="unknown figure"),
        pytest.param(early_stopping("val/loss"), [], "there is no val/loss yet", id="figure of later"),
        pytest.param({}, ["--ckpt_path=gone.ckpt"], "there is no such file", id="missing checkpoint"),
        pytest.param({}, ["--ckpt_path=tiny.yaml"], "not a checkpoint", id="not a checkpoint"),
        pytest.param(
            {}, ["--ckpt_path=last"], "no complete checkpoint in runs/tiny", id="no last checkpoint"
        ),
    ],
)
def test_a_mistake_ends_with_2_and_at_most_ten_lines(written, words, hint, core, write_yaml, tmp_path):
    write_yaml("over.yaml", written)
    done = core("fit", "--config", "tiny", "--config", "over", *words)
    assert done.code == 2
    assert hint in done.err
    assert 1 <= len(done.err.splitlines()) <= 10
    assert "Traceback" not in done.out + done.err
    assert "usage:" not in done.err


def test_what_is_missing_altogether_is_named(core):
    done = core("fit")
    assert done.code == 2
    assert "model.network" in done.err
    assert "data" in done.err


def test_a_mistake_in_a_subprocess_ends_with_2(tmp_path):
    done = run_core("fit", "--config", "quikstart", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("Did you mean quickstart?\n")


@pytest.mark.ci
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_says_so_in_its_exit_code(sent, code, tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    process = subprocess.Popen(
        [sys.executable, "-m", "core", "fit", "--config", tmp_path / "tiny.yaml", "--trainer.max_steps=1000000",
         f"--trainer.default_root_dir={tmp_path / 'run'}"],
        cwd=HOUSE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("run/checkpoints/*.ckpt")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(sent)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in err


def test_what_a_run_does_not_name_is_not_imported(packages):
    packages.add("acme_bomb", {"leyden.callbacks": {"AcmeBomb": "acme_bomb:AcmeBomb"}}, "raise SystemExit\n")
    prepare(["--trainer.callbacks+=Throughput"])
    assert "acme_bomb" not in sys.modules


def test_runs_that_start_in_the_same_moment_take_folders_of_their_own(tmp_path):
    there = run_folder.present(tmp_path / "a" / "run")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(run_folder.fresh, [tmp_path / "a" / "run"] * 8))
    assert len(set(folders)) == 8
    for folder in folders:
        run_folder.claimed(folder, there).release(RuntimeError())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["--config=tiny.yaml", "--model.network.n_head=5"],
        ["--config=tiny.yaml", "--model.optimizer.lr=-1"],
        ["--config=quickstart", "--data.source=nowhere"],
        ["--config=tiny.yaml", "--trainer.max_steps=-1", "--trainer.max_epochs=-1"],
    ],
    ids=" ".join,
)
def test_a_run_that_cannot_start_leaves_nothing(core, tmp_path, words):
    done = core("fit", "--trainer.default_root_dir=a/b/run", *words)
    assert done.code == 2, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"], done.err


@pytest.mark.parametrize(
    "words",
    [["--callbacks.-LossCurve"], ["--config=out.yaml", "--trainer.default_root_dir=runs/tiny"]],
    ids=" ".join,
)
def test_a_resumed_run_takes_callbacks_out_by_name(core, tmp_path, words):
    assert core("fit", "--config=tiny.yaml", "--trainer.callbacks+=LossCurve").code == 0
    (tmp_path / "out.yaml").write_text("trainer: {callbacks: {LossCurve: null}}")
    wrong = core("fit", "--ckpt_path=runs/tiny", "--callbacks.-LossCurv")
    assert wrong.code == 2
    assert "Did you mean LossCurve?" in wrong.err
    done = core("fit", "--ckpt_path=runs/tiny", "--trainer.max_steps=8", *words)
    assert done.code == 0, done.err
    assert "LossCurve" not in done.out.partition("Run folder")[0]
