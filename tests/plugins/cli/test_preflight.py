"""Preflight: one message with every problem of a selection, and the order of callbacks."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.plugins import CheckpointIO, Precision

from core.errors import ConfigError
from core.technique import Declaration, Package, technique
from plugins.cli import preflight
from toolkit.selection import Run, Selected


def chosen(name, key="trainer.callbacks.0", target=None, **declared):
    return Selected(
        key,
        name,
        f"acme.{name}",
        "callbacks",
        "acme",
        "1.0",
        Declaration(paper="", **declared),
        target=target,
    )


def problems(*selected, faults=(), **run):
    with pytest.raises(ConfigError) as error:
        preflight.check(Run(selected, **run), *faults)
    lines = str(error.value).splitlines()
    assert len(lines) <= 10
    return lines


def test_a_selection_without_problems_passes():
    selected = [chosen("A"), chosen("B"), chosen("C", conflicts={"D": "reasons"}, owns=("learning_rate",))]
    assert preflight.check(Run(selected)) is None


@pytest.mark.parametrize(
    ("kind", "one"),
    [(CheckpointIO, "one writes its checkpoints"), (Precision, "one decides on its precision")],
)
def test_of_two_plugins_for_the_same_thing_one_is_to_be_kept(kind, one):
    pair = [chosen(n, f"trainer.plugins.{i}", type(n, (kind,), {})) for i, n in enumerate(("Old", "New"))]
    advice = "In YAML `plugins: {Old: null, New: {}}` puts the last in place of the first"
    assert problems(*pair)[1:] == [
        f"- Old and New are in trainer.plugins, and {one} of a run: keep one. {advice}"
    ]
    assert preflight.check(Run(pair[:1])) is None


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp_spawn",
        "ddp_notebook_find_unused_parameters_true",
        {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"start_method": "fork"}},
    ],
)
def test_ranks_that_would_be_copies_of_this_process_are_refused(strategy):
    [_, line] = problems(config={"trainer": {"strategy": strategy}})
    assert "set --trainer.strategy=ddp" in line


# -- needs, versions, processes ----------------------------------------------------------------------


class Wordy:
    def missing(self, run):
        return f"a lot\nof\nlines on {run.accelerator}"


def test_a_need_sees_the_run_and_takes_one_line_however_wordy():
    assert problems(chosen("A", needs=(Wordy(),)), accelerator="tpu")[1:] == ["- A: a lot of lines on tpu"]


@pytest.mark.parametrize(("api", "behind"), [(">=2", "leyden"), ("<1", "acme")])
def test_a_technique_for_another_core_says_what_to_upgrade(api, behind):
    lines = problems(chosen("A", api=api))
    expected = f"- A of acme 1.0 was written for core API {api}, this is 1.4: pip install --upgrade {behind}"
    assert lines[1:] == [expected]


def test_a_technique_for_this_core_passes():
    assert preflight.check(Run([chosen("A", api=">=1,<2"), chosen("B")])) is None


def test_more_processes_than_a_cpu_can_feed_are_refused():
    most = max(8, os.cpu_count())
    assert preflight.check(Run(devices=most, world_size=most)) is None
    assert preflight.check(Run(devices=most + 1, world_size=most + 1, accelerator="cuda")) is None
    [_, line] = problems(devices=most + 1, world_size=most + 1)
    assert line.startswith(f"- {most + 1} processes on {os.cpu_count()} cores ")
    assert line.endswith(f"set --trainer.devices to {most} or less")


# -- conflicts, duplicates, owners -----------------------------------------------------------------


@pytest.mark.parametrize("declaring", ["first", "second", "both"])
def test_a_conflict_declared_on_either_side_is_told_once_with_its_reason(declaring):
    first = {"conflicts": {"B": "both step the optimizer"}} if declaring != "second" else {}
    second = {"conflicts": {"A": "both step the optimizer"}} if declaring != "first" else {}
    lines = problems(chosen("A", **first), chosen("B", "trainer.strategy", **second))
    assert lines[0] == "This selection cannot run, 1 problem:"
    assert lines[1:] in (
        ["- A and B exclude each other, keep one (--callbacks.-A): both step the optimizer"],
        ["- B and A exclude each other, keep one (--callbacks.-A): both step the optimizer"],
    )


def test_a_callback_twice_is_a_problem():
    lines = problems(*(chosen("A", f"trainer.callbacks.{i}") for i in range(3)), chosen("B"))
    assert lines[1:] == ["- A is 3 times in trainer.callbacks; keep one."]


def test_two_callbacks_may_hold_an_argument_of_the_same_class():
    nested = [chosen("A", f"trainer.callbacks.{i}.init_args.inner") for i in range(2)]
    assert preflight.check(Run(nested)) is None
    assert preflight.check(Run([chosen("A", "trainer.logger.0"), chosen("A", "trainer.logger.1")])) is None


def test_two_owners_of_one_thing_are_a_problem():
    owners = [chosen(name, owns=("sequence_length", "own thing")) for name in "AB"]
    assert problems(*owners)[1:] == [
        "- A and B would both control the sequence length; keep one.",
        "- A and B would both control the own thing; keep one.",
    ]


def test_a_schedule_owns_the_learning_rate_without_saying_so():
    schedule = chosen("StepLR", "model.lr_scheduler")
    assert preflight.check(Run([schedule, chosen("A", owns=("batch_size",))])) is None
    lines = problems(schedule, chosen("A", owns=("learning_rate",)))
    assert lines[1:] == ["- StepLR and A would both control the learning rate; keep one."]


@pytest.mark.parametrize("value", [1.0, None])
def test_the_trainers_clipping_counts_beside_a_technique(value):
    run = Run(
        [chosen("A", owns=("gradient_clipping",))],
        {"trainer": {"gradient_clip_val": value}},
        {("trainer", "gradient_clip_val"): "x.yaml:4"},
    )
    if value is None:
        assert preflight.check(run) is None
        return
    with pytest.raises(ConfigError) as error:
        preflight.check(run)
    assert str(error.value).splitlines()[1:] == [
        "- A and trainer.gradient_clip_val (x.yaml:4; =null turns it off) would both control the gradient "
        "clipping; keep one."
    ]


@pytest.mark.parametrize("name", preflight.LEAST)
def test_numbers_that_lightning_divides_by_are_held_against_their_least(name):
    section, option = name.split(".")
    with pytest.raises(ConfigError, match=f"{name} is -1, not a finite number from"):
        preflight.check(Run([], {section: {option: -1}}))
    assert preflight.check(Run([], {section: {option: 1}})) is None


# -- what a class knows about its arguments ----------------------------------------------------------


class Judge:
    @classmethod
    def preflight(cls, run, own):
        yield f"{cls.__name__} at {own.key} in a run of {run.argument('trainer.max_steps')}"


class Namesake:
    preflight = "another thing of this name"

    def check(self): ...


def test_a_class_judges_its_arguments_against_the_run():
    class Heir(Judge):
        pass

    lines = problems(
        chosen("A", target=Judge), chosen("B", "data", target=Heir), config={"trainer": {"max_steps": 7}}
    )
    assert lines[1:] == [
        "- A: Judge at trainer.callbacks.0 in a run of 7",
        "- B: Heir at data in a run of 7",
    ]


class Broken:
    def missing(self, run):
        return run.no_such_attribute


def judging(body):
    return type("Judging", (), {"preflight": classmethod(lambda cls, run, own: body())})


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"needs": (Broken(),)}, "its needs failed with AttributeError: 'Run' object has no attribute"),
        ({"target": judging(lambda: None)}, "its preflight failed with TypeError: it returned None, where"),
        ({"target": judging(lambda: "no")}, "its preflight failed with TypeError: it returned 'no', where"),
        ({"target": judging(lambda: 1 / 0)}, "its preflight failed with ZeroDivisionError: division by zero"),
    ],
)
def test_a_fault_of_a_techniques_own_is_told_as_its_own(declared, expected):
    first, second = problems(chosen("A", **declared), chosen("B"))
    assert first.startswith(f"A of acme 1.0: {expected}")
    assert second.endswith("repair or upgrade it, or take A out of the run.")


def test_a_line_that_begins_with_an_argument_has_the_place_of_the_argument():
    judge = type("J", (), {"preflight": classmethod(lambda cls, run, own: ["n is 3", "all of it"])})
    item = Selected("data", "J", "acme.J", "-", "-", "-", Declaration(""), {"n": 3}, judge)
    config = {"data": {"class_path": "acme.J", "init_args": {"n": 3}}}
    places = {("data",): "x.yaml:1", ("data", "init_args", "n"): "--data.n"}
    lines = problems(item, config=config, places=places)
    assert lines[1:] == ["- J (--data.n): n is 3", "- J (x.yaml:1): all of it"]


def test_whatever_else_is_called_preflight_is_left_alone():
    class Method:
        def preflight(self, trainer, module):
            raise AssertionError

    assert preflight.check(Run([chosen("A", target=Namesake), chosen("B", target=Method)])) is None


# -- one message -------------------------------------------------------------------------------------


def test_all_problems_come_in_one_message():
    lines = problems(
        chosen("A", needs=(Wordy(),), conflicts={"B": "reasons"}, owns=("batch_size",), api="<1"),
        chosen("B", owns=("batch_size",), target=Judge),
        chosen("C", "trainer.callbacks.1"),
        chosen("C", "trainer.callbacks.2"),
        faults=["the trainer\nsays no"],
    )
    assert lines[0] == "This selection cannot run, 7 problems:"
    assert lines[1] == "- the trainer says no"
    assert len(lines) == 8


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (8, 8), (9, 8), (20, 8)])
def test_ten_lines_are_the_most(count, shown):
    need = Package("leyden-no-such-thing")
    lines = problems(*(chosen(f"A{i}", needs=(need,)) for i in range(count)))
    assert f"{count} problem" in lines[0]
    assert lines[1 : shown + 1] == [f"- A{i}: {need.missing()}" for i in range(shown)]
    assert lines[shown + 1 :] == ([f"- ... and {count - shown} more"] if count > shown else [])


def test_a_technique_is_named_with_its_place():
    places = {("trainer", "callbacks", 0): f"{os.getcwd()}/configs/x.yaml:3"}
    config = {"trainer": {"callbacks": [{"class_path": "acme.A"}]}}
    lines = problems(chosen("A", api="<1"), config=config, places=places)
    assert lines[1].startswith("- A (configs/x.yaml:3) of acme 1.0 was written for core API <1")


# -- order -----------------------------------------------------------------------------------------


def callbacks_of(declared):
    """An object per name, of a class of that name with the given `before` and `after`."""
    return [
        technique(paper="", **orders)(type(name, (), {}))() if orders is not None else type(name, (), {})()
        for name, orders in declared
    ]


def order(*declared):
    return [type(callback).__name__ for callback in preflight.ordered(callbacks_of(declared))]


def test_without_a_declared_order_the_order_stays():
    assert order(("C", None), ("A", {}), ("B", {"before": ("Z",), "after": ("Y",)})) == ["C", "A", "B"]


def test_before_and_after_hold_whatever_the_order_in_yaml():
    assert order(("A", {}), ("B", {"before": ("A",)})) == ["B", "A"]
    assert order(("A", {"after": ("B",)}), ("B", {})) == ["B", "A"]
    assert order(("A", {"after": ("C",)}), ("B", {"after": ("A",)}), ("C", None)) == ["C", "A", "B"]
    assert order(("X", {}), ("A", {"after": ("B",)}), ("Y", {}), ("B", {})) == ["X", "Y", "B", "A"]


def test_a_circle_is_an_error_that_names_its_callbacks():
    declared = [
        ("Y", {"after": ("A",)}),
        ("A", {"before": ("B",)}),
        ("X", {"before": ("A",)}),
        ("B", {"before": ("C",)}),
        ("C", {"before": ("A",)}),
    ]
    message = "A, B, C ask to come before each other in a circle; take one out of trainer.callbacks."
    with pytest.raises(ConfigError) as error:
        order(*declared)
    assert str(error.value) == message
    assert problems(*(chosen(name, **orders) for name, orders in declared))[1:] == [f"- {message}"]


@given(st.permutations("ABCDEF"), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
def test_every_order_that_can_hold_holds(listed, pairs):
    before = {name: [] for name in listed}
    for first, second in pairs:
        if first < second:  # so that there is no circle
            before["ABCDEF"[first]].append("ABCDEF"[second])
    result = order(*((name, {"before": tuple(before[name])}) for name in listed))
    assert sorted(result) == list("ABCDEF")
    assert all(result.index(a) < result.index(b) for a, later in before.items() for b in later)
    if not any(before.values()):
        assert result == list(listed)
