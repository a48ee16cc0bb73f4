"""Preflight: one message with every problem of a selection, and the order of callbacks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

import core
from core import preflight
from core.errors import ConfigError
from core.preflight import Selected
from core.technique import Declaration, Device, Package, declaration_of, technique


def chosen(name, key="trainer.callbacks.0", **declared):
    return Selected(key, name, f"acme.{name}", "callbacks", "acme", "1.0", Declaration(paper="", **declared))


def problems(*selected):
    with pytest.raises(ConfigError) as error:
        preflight.check(selected)
    lines = str(error.value).splitlines()
    assert len(lines) <= 10
    return lines


def test_a_selection_without_problems_passes():
    selected = [chosen("A"), chosen("B"), chosen("C", conflicts={"D": "reasons"}, owns=("learning_rate",))]
    assert preflight.check(selected) is None


# -- needs -----------------------------------------------------------------------------------------


def test_a_missing_package_comes_with_the_line_that_installs_it():
    lines = problems(chosen("A", needs=(Package("leyden-no-such-thing>=2"),)))
    assert lines[1] == "- A: leyden-no-such-thing is not installed: pip install 'leyden-no-such-thing>=2'"
    lines = problems(chosen("A", needs=(Package("leyden-no-such-thing>=2", extra="acme"),)))
    assert lines[1].endswith("pip install 'leyden[acme]'")


def test_a_package_that_is_too_old_is_named_with_both_versions():
    lines = problems(chosen("A", needs=(Package("PyYAML>=900"),)))
    assert lines[1].startswith("- A: PyYAML>=900 is needed, ")
    assert lines[1].endswith(" is installed: pip install 'PyYAML>=900'")


def test_an_installed_package_satisfies_also_as_prerelease_or_with_a_local_version(packages):
    packages.add("acme_nightly", {}, version="3.0.dev1")
    packages.add("acme_local", {}, version="2.1+cpu")
    for need in ("PyYAML>=6,<900", "pyyaml", "acme-nightly>=2", "acme_local>=2.1,<2.2"):
        assert Package(need).missing() is None


def test_a_device_that_is_not_there_is_missing():
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    for kind in ("cuda", "xpu"):
        expected = None if found and found.type == kind else f"no {kind.upper()} device is visible"
        assert (Device(kind).missing() or "None").startswith(str(expected))


def test_a_need_that_is_wordy_takes_one_line():
    class Wordy:
        def missing(self):
            return "a lot\nof\nlines"

    assert problems(chosen("A", needs=(Wordy(),)))[1:] == ["- A: a lot of lines"]


# -- conflicts, duplicates, owners -----------------------------------------------------------------


@pytest.mark.parametrize("declaring", ["first", "second", "both"])
def test_a_conflict_declared_on_either_side_is_told_once_with_its_reason(declaring):
    first = {"conflicts": {"B": "both step the optimizer"}} if declaring != "second" else {}
    second = {"conflicts": {"A": "both step the optimizer"}} if declaring != "first" else {}
    lines = problems(chosen("A", **first), chosen("B", **second))
    assert lines[0] == "This selection cannot run, 1 problem:"
    assert lines[1:] in (
        ["- A and B exclude each other: both step the optimizer"],
        ["- B and A exclude each other: both step the optimizer"],
    )


def test_a_callback_twice_is_a_problem():
    lines = problems(*(chosen("A", f"trainer.callbacks.{i}") for i in range(3)), chosen("B"))
    assert lines[1:] == ["- A stands 3 times in trainer.callbacks; keep one."]


def test_two_callbacks_may_hold_an_argument_of_the_same_class():
    assert preflight.check([chosen("A", f"trainer.callbacks.{i}.init_args.inner") for i in range(2)]) is None
    assert preflight.check([chosen("A", "trainer.logger.0"), chosen("A", "trainer.logger.1")]) is None


def test_two_owners_of_one_thing_are_a_problem():
    owners = [chosen(name, owns=("learning_rate",)) for name in "AB"]
    assert problems(*owners)[1:] == ["- A and B would both control the learning rate; keep one."]


def test_all_problems_come_in_one_message():
    missing = Package("leyden-no-such-thing")
    lines = problems(
        chosen("A", needs=(missing,), conflicts={"B": "reasons"}, owns=("batch_size",)),
        chosen("B", owns=("batch_size",)),
        chosen("C", "trainer.callbacks.1"),
        chosen("C", "trainer.callbacks.2"),
    )
    assert lines[0] == "This selection cannot run, 4 problems:"
    assert len(lines) == 5


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (8, 8), (9, 8), (20, 8)])
def test_ten_lines_are_the_most(count, shown):
    need = Package("leyden-no-such-thing")
    lines = problems(*(chosen(f"A{i}", needs=(need,)) for i in range(count)))
    assert f"{count} problem" in lines[0]
    assert lines[1 : shown + 1] == [f"- A{i}: {need.missing()}" for i in range(shown)]
    assert lines[shown + 1 :] == ([f"- ... and {count - shown} more"] if count > shown else [])


# -- what is selected ------------------------------------------------------------------------------


def test_every_class_of_a_configuration_is_selected_with_its_package():
    selected = preflight.selection(
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


def test_declarations_are_read_from_classes_nested_anywhere():
    inner = {"class_path": f"{__name__}.Declared"}
    (item,) = preflight.selection({"data": {"init_args": {"stages": [{"inner": inner}]}}})
    assert item.key == "data.init_args.stages.0.inner"
    assert item.declaration.owns == ("batch_size",)


@technique(paper="a test", owns=("batch_size",))
class Declared:
    """Has a declaration."""


class Derived(Declared):
    """Has none of its own."""


def test_a_declaration_is_not_inherited():
    assert declaration_of(Declared).paper == "a test"
    assert declaration_of(Derived) is None


def test_the_table_has_a_line_for_each_with_columns_aligned():
    lines = preflight.table([chosen("A"), chosen("LongerName", "model.network")]).splitlines()
    assert lines[0].split() == ["technique", "kind", "package", "version", "selected", "at"]
    assert lines[1].split() == ["A", "callbacks", "acme", "1.0", "trainer.callbacks.0"]
    assert len({line.index(word) for line, word in zip(lines, ("kind", "callb", "callb"), strict=True)}) == 1


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
    with pytest.raises(ConfigError, match="in a circle: A, B, C"):
        order(("A", {"before": ("B",)}), ("X", {}), ("B", {"before": ("C",)}), ("C", {"before": ("A",)}))


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
