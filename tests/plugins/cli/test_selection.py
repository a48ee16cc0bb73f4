"""What a run selected: classes, arguments, the places where they were written, the table."""

import os

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from packaging.version import Version

import core
from core.technique import Declaration, technique
from plugins.cli.selection import by_trainer, selection, table
from toolkit.selection import Run, Selected


def test_every_class_of_a_configuration_is_selected_with_its_package_and_arguments():
    selected = selection(
        {
            "seed_everything": 1,
            "trainer": {
                "logger": False,
                "callbacks": [
                    {"class_path": "callbacks.periodic_checkpoint.PeriodicCheckpoint"},
                    {
                        "class_path": "lightning.pytorch.callbacks.Timer",
                        "init_args": {"duration": "00:01:00:00"},
                    },
                ],
            },
            "model": {"network": {"class_path": "collections.OrderedDict", "init_args": {"x": None}}},
        }
    )
    assert [(item.key, item.name, item.kind, item.package) for item in selected] == [
        ("trainer.callbacks.0", "PeriodicCheckpoint", "callbacks", "leyden"),
        ("trainer.callbacks.1", "Timer", "-", "lightning"),
        ("model.network", "OrderedDict", "-", "(not a package)"),
    ]
    assert selected[0].version == core.__version__
    assert Version(selected[1].version) >= Version("2.6")
    assert [item.arguments for item in selected] == [{}, {"duration": "00:01:00:00"}, {"x": None}]
    assert selected[1].target is Timer


@technique(paper="a test", owns=("batch_size",))
class Declared:
    """Has a declaration."""

    class Inner:
        """Is named through another class."""


def test_declarations_are_read_from_classes_nested_anywhere():
    inner = {
        "class_path": f"{__name__}.Declared",
        "init_args": {"x": {"class_path": f"{__name__}.Declared.Inner"}},
    }
    first, second = selection({"data": {"init_args": {"stages": [{"inner": inner}]}}})
    assert first.key == "data.init_args.stages.0.inner"
    assert first.declaration.owns == ("batch_size",)
    assert second.target is Declared.Inner


def test_an_argument_is_found_with_and_without_init_args():
    run = Run(
        config={
            "trainer": {"max_steps": 4, "callbacks": [{"class_path": "A", "init_args": {"n": 1}}]},
            "data": {
                "class_path": "D",
                "init_args": {"tokenizer": {"class_path": "T", "init_args": {"n": 2}}},
            },
        }
    )
    assert run.argument("trainer.max_steps") == 4
    assert run.argument("trainer.callbacks.0.n") == run.argument("trainer.callbacks.0.init_args.n") == 1
    assert run.argument("data.tokenizer.n") == run.argument("data.init_args.tokenizer.init_args.n") == 2
    for absent in ("trainer.min_steps", "trainer.max_steps.x", "trainer.callbacks.7.n", "data.x.y", "test"):
        assert run.argument(absent) is None


def test_a_place_is_that_of_the_value_or_of_what_holds_it():
    places = {
        ("data",): "x.yaml:1",
        ("data", "init_args", "n"): f"{os.getcwd()}/x.yaml:3",
        ("trainer", "callbacks", 0): "--trainer.callbacks+",
    }
    run = Run(
        config={"data": {"class_path": "D", "init_args": {"n": 1, "m": 2}}, "trainer": {"callbacks": [{}]}},
        places=places,
    )
    assert run.place("data.n") == "x.yaml:3"
    assert run.place("data.m") == "x.yaml:1"
    assert run.place("trainer.callbacks.0.n") == "--trainer.callbacks+"
    assert run.place("model.network") == ""


def test_what_a_trainer_uses_besides_is_told_once():
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "precision": "bf16-mixed"}
    trainer = Trainer(**options, logger=False, callbacks=[Timer("00:01:00:00")], enable_model_summary=False,
                      enable_progress_bar=False)  # fmt: skip
    [timer] = selection({"trainer": {"callbacks": [{"class_path": "lightning.pytorch.callbacks.Timer"}]}})
    found = {item.name: (item.key, item.package) for item in by_trainer(trainer, [timer])}
    assert found == {
        "DDPStrategy": ("trainer.strategy", "lightning"),
        "MixedPrecision": ("trainer.precision", "lightning"),
        "ModelCheckpoint": ("by default", "lightning"),
    }


def test_the_table_has_a_line_for_each_with_columns_aligned():
    def chosen(name, key):
        return Selected(key, name, f"acme.{name}", "callbacks", "acme", "1.0", Declaration(paper=""))

    lines = table([chosen("A", "trainer.callbacks.0"), chosen("LongerName", "model.network")]).splitlines()
    assert lines[0].split() == ["technique", "kind", "package", "version", "selected", "at"]
    assert lines[1].split() == ["A", "callbacks", "acme", "1.0", "trainer.callbacks.0"]
    assert len({line.index(word) for line, word in zip(lines, ("kind", "callb", "callb"), strict=True)}) == 1
