"""Callbacks changed, added and taken out by name, in files and on the command line."""

import pytest
import yaml

from core.errors import ConfigError
from plugins.cli.configuration.request import prepare

BASE = {
    "trainer": {
        "callbacks": [
            {"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": 200}},
            {"class_path": "LossCurve"},
            {"class_path": "TextSamples", "init_args": {"temperature": 0.5, "top_k": 7}},
        ]
    }
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).write_text(text if isinstance(text, str) else yaml.safe_dump(text))
        return f"--config={name}"

    write("base.yaml", BASE)
    return write


def callbacks(*arguments):
    """Returns (short name, arguments) of each callback that a command line asks for."""
    found = prepare(list(arguments)).composed.values["trainer"]["callbacks"]
    return [(item["class_path"].rpartition(".")[2], item.get("init_args", {})) for item in found]


CURVE, SAMPLES = ("LossCurve", {}), ("TextSamples", {"temperature": 0.5, "top_k": 7})
CHANGED = ("PeriodicCheckpoint", {"every_n_steps": 50})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--callbacks.PeriodicCheckpoint.every_n_steps=50"], [CHANGED, CURVE, SAMPLES]),
        (["--callbacks.PeriodicCheckpoint.every_n_steps", "50"], [CHANGED, CURVE, SAMPLES]),
        (["--trainer.callbacks.PeriodicCheckpoint.every_n_steps=50"], [CHANGED, CURVE, SAMPLES]),
        (["--callbacks.-TextSamples", "--callbacks.PeriodicCheckpoint.every_n_steps=50"], [CHANGED, CURVE]),
        (
            ["--callbacks.TextSamples.top_k=null", "--callbacks.-PeriodicCheckpoint"],
            [CURVE, ("TextSamples", {"temperature": 0.5, "top_k": None})],
        ),
        (
            ["--callbacks.TextSamples.prompts=[A, B]", "--callbacks.-PeriodicCheckpoint", "--callbacks.-LossCurve"],
            [("TextSamples", {"temperature": 0.5, "top_k": 7, "prompts": ["A", "B"]})],
        ),
        (["--callbacks.-LossCurve", "--callbacks.-TextSamples", "--callbacks.-PeriodicCheckpoint"], []),
    ],
)  # fmt: skip
def test_arguments_change_callbacks_by_name(write, arguments, expected):
    assert callbacks("--config=base.yaml", *arguments) == expected


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "added", [["--trainer.callbacks+=Throughput"], ["--trainer.callbacks+", "Throughput"]]
)
def test_one_that_is_added_and_changed_by_arguments_stands_once(write, first, added):
    arguments = [*added, "--callbacks.Throughput.window=5"]
    request = prepare(["--config=base.yaml", *(arguments if first else [arguments[-1], *added])])
    assert request.composed.values["trainer"]["callbacks"][-1]["init_args"] == {"window": 5}
    assert request.arguments == []


NESTED = """
trainer:
  callbacks:
    - class_path: Rollouts
      init_args:
        reward: {class_path: LearnedReward, init_args: {path: runs/reward, batch_size: 4}}
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--callbacks.Rollouts.reward.path=best"], {"path": "best", "batch_size": 4}),
        (["--trainer.callbacks.Rollouts.reward.init_args.path=best"], {"path": "best", "batch_size": 4}),
        (["--callbacks.Rollouts.reward=LearnedReward", "--callbacks.Rollouts.reward.path=best"], {"path": "best", "batch_size": 4}),
        (["--callbacks.Rollouts.reward=ExactAnswer", "--callbacks.Rollouts.reward.field=result"], {"field": "result"}),
    ],
)  # fmt: skip
def test_arguments_of_an_argument_that_is_a_class(write, arguments, expected):
    request = prepare([write("nested.yaml", NESTED), *arguments])
    [rollouts] = request.composed.values["trainer"]["callbacks"]
    assert rollouts["init_args"]["reward"]["init_args"] == expected
    at = ("trainer", "callbacks", 0, "init_args", "reward", "init_args")
    name, _, _ = arguments[-1].partition("=")
    assert request.composed.positions[(*at, name.rpartition(".")[2])] == name


def test_a_mapping_in_a_file_changes_adds_and_takes_out(write):
    change = write(
        "change.yaml",
        "trainer:\n  callbacks:\n    PeriodicCheckpoint: {every_n_steps: 50}\n    LossCurve: null\n    Throughput: {}\n",
    )
    assert callbacks("--config=base.yaml", change) == [CHANGED, SAMPLES, ("Throughput", {})]


def test_a_mapping_alone_makes_the_list(write):
    write("alone.yaml", "trainer: {callbacks: {Throughput: {window: 5}}}")
    assert callbacks("--config=alone.yaml") == [("Throughput", {"window": 5})]


def test_other_callbacks_and_their_arguments_stay(write):
    write("change.yaml", "trainer: {callbacks: {TextSamples: {top_k: 3}}}")
    expected = ("TextSamples", {"temperature": 0.5, "top_k": 3})
    assert callbacks("--config=base.yaml", "--config=change.yaml")[2] == expected


def test_the_order_of_files_counts(write):
    write("out.yaml", "trainer: {callbacks: {LossCurve: null}}")
    assert CURVE not in callbacks("--config=base.yaml", "--config=out.yaml")
    with pytest.raises(ConfigError, match=r"out.yaml:1: LossCurve is not in trainer.callbacks"):
        prepare(["--config=out.yaml", "--config=base.yaml"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--callbacks.-TextSample"], "--callbacks.-TextSample: TextSample is not in trainer.callbacks. Did you mean TextSamples?"),
        (["--callbacks.TextSamples"], "write --callbacks.NAME.ARGUMENT=VALUE"),
        (["--callbacks.TextSamples=5"], "write --callbacks.NAME.ARGUMENT=VALUE"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_said(write, arguments, message):
    with pytest.raises(ConfigError) as error:
        prepare(["--config=base.yaml", *arguments])
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) <= 10


def test_each_value_keeps_the_place_where_it_was_written(write):
    write("change.yaml", "trainer:\n  callbacks:\n    LossCurve: null\n    TextSamples:\n      top_k: 3\n")
    positions = prepare(
        ["--config=base.yaml", "--config=change.yaml", "--callbacks.TextSamples.temperature=1"]
    ).composed.positions
    at = ("trainer", "callbacks", 1, "init_args")
    assert positions[(*at, "top_k")].endswith("change.yaml:5")
    assert positions[(*at, "temperature")] == "--callbacks.TextSamples.temperature"
    assert positions[("trainer", "callbacks", 0, "init_args", "every_n_steps")].endswith("base.yaml:5")
    assert ("trainer", "callbacks", 2) not in positions


def test_loggers_and_plugins_too(write):
    write("lists.yaml", {"trainer": {"logger": "MetricsCSV", "plugins": ["AtomicCheckpoint"]}})
    write("change.yaml", "trainer: {logger: {MetricsCSV: {save_dir: x}}, plugins: {AtomicCheckpoint: null}}")
    trainer = prepare(["--config=lists.yaml", "--config=change.yaml"]).composed.values["trainer"]
    assert [item["init_args"] for item in trainer["logger"]] == [{"save_dir": "x"}]
    assert trainer["plugins"] == []
