"""Mistakes on the command line and in YAML: exit code 2, at most 10 lines, where, what, the nearest right name."""

from copy import deepcopy

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.__main__ import main
from tests.conftest import TINY

ARGUMENTS = [
    ("--trainer.max_stepss=3", "--trainer.max_stepss", "Did you mean max_steps?"),
    ("--trainer.max_steps=abc", "--trainer.max_steps", "'abc', not int"),
    ("--trainer.precision=fp17", "--trainer.precision", "one of"),
    ("--trainer.gradient_clip_val=much", "--trainer.gradient_clip_val", "'much'"),
    ("--trainer.strategy=fsdpp", "strategy", "fsdpp"),
    ("--trainer.strategy=ddpp", "strategy", "Did you mean ddp?"),
    ("--trainer.accelerator=cpuu", "--trainer.accelerator", "Did you mean cpu?"),
    ("--trainer.callbacks+=LossCurv", "--trainer.callbacks+", "Did you mean LossCurve?"),
    ("--trainer.callbacks+=GPT", "--trainer.callbacks+", "GPT"),
    ("--trainer.callbacks+=LearningRateMonitr", "--trainer.callbacks+", "Did you mean LearningRateMonitor?"),
    ("--trainer.callbacks+=LossCurve", "LossCurve", "2 times"),
    ("--trainer.logger=MetricCSV", "--trainer.logger", "Did you mean MetricsCSV?"),
    ("--modl.network.n_layer=3", "modl", "Did you mean model?"),
    ("--model.netwerk=GPT", "--model.netwerk", "Did you mean network?"),
    ("--model.network=GTP", "--model.network", "Did you mean GPT?"),
    ("--model.network=AdamW", "--model.network", "no Network"),
    ("--model.network.n_layr=3", "--model.network.n_layr", "Did you mean n_layer?"),
    ("--model.network.n_layer=x", "--model.network.n_layer", "'x', not int"),
    ("--model.network.position=rotery", "--model.network.position", "Did you mean rotary?"),
    ("--model.network.n_head=5", "n_head", "n_embd"),
    ("--model.network.class_path=acme.Net", "--model.network.class_path", "pip install acme"),
    ("--model.network.class_path=plugins.networks.gpt.GTP", "class_path", "Did you mean GPT?"),
    ("--model.objective=CausalML", "--model.objective", "Did you mean CausalLM?"),
    ("--model.optimizer.lr=big", "--model.optimizer.lr", "'big', not float"),
    ("--model.optimizer.weight_decy=0", "--model.optimizer.weight_decy", "Did you mean weight_decay?"),
    ("--model.optimizer=AdamWW", "--model.optimizer", "Did you mean AdamW?"),
    ("--model.lr_scheduler.warmup=3", "--model.lr_scheduler.warmup", "warmup_steps"),
    ("--data.batchsize=3", "--data.batchsize", "Did you mean batch_size?"),
    ("--data.tokenizer.vocab=3", "--data.tokenizer.vocab", "Did you mean vocab_size?"),
    ("--data.reader=TextDocs", "--data.reader", "TextDocuments"),
    ("--data=PretrainDatModule", "--data", "Did you mean PretrainDataModule?"),
    ("--data.batch_size=0", "batch_size", "at least 1"),
    ("--ckpt_path=gone.ckpt", "gone.ckpt", "no such file"),
    ("--ckpt_path=last", "last", "no whole checkpoint"),
    ("--config=quickstrat", "quickstrat", "Did you mean quickstart?"),
    ("--trainer.callbacks=5", "--trainer.callbacks", "is 5, not list[Callback] | Callback | null"),
    ("--trainer.callbacks+=5", "--trainer.callbacks+", "of callbacks is 5, not Callback"),
    ("--model.optimizer=5", "--model.optimizer", "is 5, not Optimizer"),
    ("--model.optimizer.betas=[0.9,much]", "--model.optimizer.betas", "not tuple[float, float]"),
    (
        "--data.reader=BPETokeniser",
        "--data.reader",
        "Registered: HuggingFaceDocuments, JSONLinesDocuments, ParquetDocuments, TextDocuments.",
    ),
    ("--seed_everything=often", "--seed_everything", "'often'"),
]

FILES = [
    ("trainer: {max_stepss: 3}", "mine.yaml:1", "Did you mean max_steps?"),
    ("trainer:\n  max_steps: abc", "mine.yaml:2", "'abc', not int"),
    ("trainr:\n  max_steps: 3", "mine.yaml:1", "Did you mean trainer?"),
    ("trainer:\n  callbacks+:\n  - class_path: LossCurvee", "mine.yaml:3", "Did you mean LossCurve?"),
    ("trainer:\n  callbacks+:\n  - class: LossCurve", "mine.yaml:3", "class_path"),
    (
        "trainer:\n  callbacks+:\n  - class_path: Throughput\n  - class_path: NoSuch\n",
        "mine.yaml:4",
        "NoSuch",
    ),
    ("model:\n  network:\n    class_path: GPT\n    init_args:\n      n_layr: 2", "mine.yaml:5", "n_layer"),
    ("model:\n  network:\n    class_path: GPT\n    n_layer: 2", "mine.yaml:4", "init_args"),
    ("data:\n  init_args:\n    tokenizer:\n      class_path: BPE", "mine.yaml:4", "BPETokenizer"),
    ("model:\n  network: null", "mine.yaml:2", "network is null, not Network"),
    ("trainer:\n  max_steps: null", "mine.yaml:2", "max_steps is null, not int"),
    ("trainer:\n  callbacks+: [null]", "mine.yaml:2", "of callbacks is null, not Callback"),
    (
        "trainer:\n  callbacks+:\n  - LearningRateMonitor: {}",
        "mine.yaml:3",
        "- class_path: LearningRateMonitor",
    ),
    ("trainer: [1, 2]", "mine.yaml:1", "section"),
    ("trainer:\n  max_steps: 1\n max_epochs: 2", "mine.yaml:3", "not YAML"),
    ("trainer: {max_steps: 1}\ntrainer: {max_steps: 2}", "mine.yaml:2", "twice"),
    ("base: quickstrat", "mine.yaml:1", "Did you mean quickstart?"),
    ("- 1\n- 2", "mine.yaml:1", "mapping"),
    ("", "", None),
]


SEEN_LATE = [
    ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks+", "EarlyStopping needs monitor (str)"),
    ("--model.lr_scheduler=StepLR", "--model.lr_scheduler", "--model.lr_scheduler.step_size=VALUE"),
    ("--model.network.n_layer=0", "--model.network.n_layer", "at least 1"),
    ("--trainer.max_steps=-7", "--trainer.max_steps", "-7"),
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


@settings(max_examples=200, deadline=None, derandomize=True, database=None,
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
