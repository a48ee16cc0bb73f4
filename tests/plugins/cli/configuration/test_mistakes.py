"""Mistakes on the command line and in YAML: exit code 2, at most 10 lines, where, what, the nearest right name."""

from copy import deepcopy

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.__main__ import main
from tests.conftest import TINY
from tests.support.mistakes import ARGUMENTS, FILES

SEEN_LATE = [
    ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks+", "EarlyStopping needs monitor (str)"),
    ("--model.lr_scheduler=StepLR", "--model.lr_scheduler", "--model.lr_scheduler.step_size=VALUE"),
    ("--model.network.n_layer=0", "--model.network.n_layer", "at least 1"),
    ("--trainer.max_steps=-7", "--trainer.max_steps", "-7"),
    (
        "--callbacks.PeriodicCheckpoint.dirpath=${run_foldr}/x",
        "--callbacks.PeriodicCheckpoint.dirpath",
        "${run_folder}?",
    ),
    ("trainer.max_steps=3", "trainer.max_steps=3", "An option begins with `--`"),
    ("--config=.", "'.'", "that is a folder"),
    ("--trainer.devices=-5", "--trainer.devices", "It is '-5'"),
    ("--trainer.accelerator=mps", "--trainer.accelerator", "--trainer.accelerator=auto"),
    ("--trainer.strategy=DDPStrategy", "--trainer.strategy", "--trainer.strategy.class_path=DDPStrategy"),
]
"""Arguments that no schema of names and types can refuse."""

FILES_SEEN_LATE = [
    ("model:\n  network:\n    init_args:\n      n_layer: null", "mine.yaml:4", "n_layer is null, not int"),
    (
        "trainer:\n  strategy:\n    class_path: DDPStrategy\n    init_args: {find_unused: true}",
        "mine.yaml:4",
        "Did you mean find_unused_parameters?",
    ),
]


def complain(capsys, *words):
    code = main(["fit", "--config", "quickstart", *words])
    message = capsys.readouterr().err.strip()
    assert code == 2, message
    assert 1 <= len(message.splitlines()) <= 10, message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(("argument", "where", "hint"), [*ARGUMENTS, *SEEN_LATE])
def test_a_wrong_argument(argument, where, hint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = complain(capsys, argument)
    assert where in message
    assert hint in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", [".", "..", "./", "/"])
def test_a_folder_without_a_name_is_no_config(name, capsys, tmp_path, monkeypatch):
    """With a file beside the folder that it stands for, among which the nearest name is looked for."""
    (tmp_path / "here" / "below").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "here"):
        (folder / "mine.yaml").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here" / "below")
    assert "that is a folder. Name a file in it." in complain(capsys, f"--config={name}")


@pytest.mark.parametrize(("text", "where", "hint"), [*FILES[:-1], *FILES_SEEN_LATE])
def test_a_mistake_in_a_file_is_told_with_its_line(text, where, hint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    message = complain(capsys, "--config", "mine.yaml")
    assert where in message
    assert hint in message


def test_arguments_of_a_callback_that_was_just_added(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    added = ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_intervall=step"]
    message = complain(capsys, *added)
    assert message.startswith("--trainer.callbacks.logging_intervall: ")
    assert "Did you mean logging_interval?" in message


@pytest.mark.parametrize("words", [[], ["--config", "techniques/text_samples"]])
def test_nothing_to_run(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *words]) == 2
    message = capsys.readouterr().err
    assert "model.network" in message
    assert "--config quickstart" in message


FAILING = """
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy

class Refuses(Callback):
    def __init__(self, least: int = 3):
        raise ValueError(f"least is {least}, which I do not like")

class Imports(Callback):
    def __init__(self):
        import acme_absent

class Plan(SingleDeviceStrategy):
    def __init__(self):
        raise ValueError("no plan today")
"""


@pytest.mark.parametrize(
    ("argument", "hints"),
    [
        (
            "--trainer.callbacks+={}.Refuses",
            ["Refuses failed with ValueError: least is 3, which", "in __init__"],
        ),
        ("--trainer.callbacks={}.Refuses", ["Refuses failed with ValueError: least is 3, which"]),
        ("--trainer.callbacks+={}.Imports", ["No module named 'acme_absent'", "pip install acme_absent"]),
        ("--trainer.strategy.class_path={}.Plan", ["Plan failed with ValueError: no plan today"]),
        ("--trainer.callbacks+={}_quits.Quits", ["cannot be imported", "SystemExit: 3"]),
    ],
)
def test_a_class_that_fails_gives_its_own_reason(argument, hints, capsys, tmp_path, monkeypatch, packages):
    monkeypatch.chdir(tmp_path)
    packages.add("acme_failing", {}, FAILING)
    packages.add("acme_failing_quits", {}, "import sys\nsys.exit(3)\n")
    monkeypatch.setenv("LEYDEN_TRUST", "acme_failing,acme_failing_quits")
    message = complain(capsys, argument.format("acme_failing"))
    assert message.startswith(argument.partition("=")[0])
    assert "Union" not in message
    for hint in hints:
        assert hint in message


WORDS = ["trainer", "model", "data", "callbacks+", "class_path", "init_args", "network", "GPT", "LossCurve", "n_layer",
         "max_steps", "lr", "vocab_size", "", "x", "1e-3", "${run_folder}"]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-3, 70) | st.floats(width=16) | st.sampled_from(WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=2),
    max_leaves=4,
)


def places(value, path=()):
    """Every path of keys into nested values."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@st.composite
def mutated(draw):
    """A valid config with one to three values replaced, taken out, renamed or added."""
    config = deepcopy(TINY)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in places(config) if path]))
        holder = config
        for key in path[:-1]:
            holder = holder[key]
        change = draw(st.sampled_from(["replace", "remove", "rename", "add"]))
        if change == "replace" or isinstance(holder, list):
            holder[path[-1]] = draw(VALUES)
        elif change == "add":
            holder[draw(st.sampled_from(WORDS))] = draw(VALUES)
        else:
            value = holder.pop(path[-1])
            if change == "rename":
                holder[path[-1] + draw(st.sampled_from(["s", "+", "_x"]))] = value
    return config


@settings(max_examples=80, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
@pytest.mark.ci
@given(config=mutated())
def test_no_mutation_of_a_valid_config_ends_in_a_traceback(config, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mutated.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    code = main(["check", "--config", "mutated.yaml"])
    message = capsys.readouterr().err
    assert code in (0, 2), message
    assert "Traceback" not in message
    if code == 2:
        assert 1 <= len(message.splitlines()) <= 10, message
    assert not (tmp_path / "runs").exists()


def test_a_callback_is_changed_by_name_below_a_trainer_that_is_no_section(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("trainer: 5\n")
    message = complain(capsys, "--config=mine", "--callbacks.PeriodicCheckpoint.every_n_steps=5")
    assert "mine.yaml:1: trainer is a section" in message
