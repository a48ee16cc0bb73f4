"""Configs: where they are found, how they compose, what is said when they are wrong."""

import math
import string
from copy import deepcopy

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import ConfigError
from plugins.cli.configuration.config_files import (
    compose,
    configs_folder,
    find_config,
    merge,
    merge_layers,
    read_layers,
)
from plugins.cli.configuration.request import prepare
from plugins.cli.configuration.yaml_texts import dump_yaml, parse_value, parse_yaml


def composed(*paths):
    return compose([str(path) for path in paths])


def values_of(text):
    return parse_yaml(text, "x.yaml")[0]


def message(call, *arguments):
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    assert len(str(error.value).splitlines()) <= 10
    return str(error.value)


# -- finding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
def test_a_shipped_config_is_found_by_name_from_any_folder(name, tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == configs_folder() / "quickstart.yaml"


def test_the_working_directory_comes_before_the_shipped_configs(write_yaml, monkeypatch):
    own = write_yaml("quickstart.yaml", {"a": 1})
    monkeypatch.chdir(own.parent)
    assert find_config("quickstart") == own
    assert composed("quickstart").values == {"a": 1}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("quikstart", "quickstart"), ("configs/quickstrat.yaml", "quickstart"), ("my_modle.yaml", "my_model")],
)
def test_an_unknown_config_is_answered_with_the_nearest(wrong, right, write_yaml, monkeypatch):
    monkeypatch.chdir(write_yaml("my_model.yaml", {}).parent)
    assert message(find_config, wrong).endswith(f"Did you mean {right}?")


def test_the_nearest_config_is_looked_for_in_the_folder_that_was_written(write_yaml, monkeypatch, tmp_path):
    write_yaml("experiments/large_batch.yaml", {})
    monkeypatch.chdir(tmp_path)
    assert "Did you mean experiments/large_batch?" in message(find_config, "experiments/large_bacth.yaml")


# -- base ------------------------------------------------------------------------------------------


def test_base_lies_below_the_file_and_bases_from_left_to_right(write_yaml):
    write_yaml("one.yaml", {"a": 1, "b": 1, "c": 1, "d": 1})
    write_yaml("sub/two.yaml", {"b": 2, "c": 2})
    nested = write_yaml("sub/nested.yaml", {"base": "two.yaml", "c": 3})
    top = write_yaml("top.yaml", {"base": ["one", "sub/nested.yaml"], "d": 4})
    result = composed(top)
    assert result.values == {"a": 1, "b": 2, "c": 3, "d": 4}
    files = [result.positions[(key,)].rpartition("/")[2] for key in "abcd"]
    assert files == ["one.yaml:1", "two.yaml:1", "nested.yaml:2", "top.yaml:4"]
    assert composed(nested).values == {"b": 2, "c": 3}


def test_a_shipped_config_is_a_base_from_anywhere(write_yaml):
    path = write_yaml("mine.yaml", {"base": "quickstart", "seed_everything": 7})
    result = composed(path)
    assert result.values["seed_everything"] == 7
    assert result.values["trainer"] == composed("quickstart").values["trainer"]


def test_a_cycle_of_bases_shows_its_chain(write_yaml):
    write_yaml("b.yaml", {"base": "c.yaml"})
    write_yaml("c.yaml", {"base": "a.yaml"})
    path = write_yaml("a.yaml", {"base": "b.yaml"})
    assert "(a.yaml -> b.yaml -> c.yaml -> a.yaml)" in message(composed, path)


@pytest.mark.parametrize(
    "text", ["trainer: {max_steps: 1\n", "a: 1\na: 2\n", "base: gone\n", "base: bad.yaml\n"]
)
def test_a_mistake_names_the_file_as_it_is_seen_from_the_working_directory(
    text, write_yaml, tmp_path, monkeypatch
):
    write_yaml("bad.yaml", text)
    (tmp_path / "below").mkdir()
    for folder, shown in ((tmp_path, "bad.yaml:"), (tmp_path / "below", "../bad.yaml:")):
        monkeypatch.chdir(folder)
        assert message(composed, shown.rstrip(":")).startswith(shown)


def test_two_files_may_share_a_base(write_yaml):
    write_yaml("base.yaml", {"a": 1, "b": 1})
    left, right = (write_yaml(f"{n}.yaml", {"base": "base", n: 2}) for n in "ab")
    assert composed(left, right).values == {"a": 1, "b": 2}  # the second brings its base again


def test_a_missing_base_is_named_with_file_line_and_nearest(write_yaml):
    path = write_yaml("top.yaml", "a: 1\nbase: quickstrat\n")
    text = message(composed, path)
    assert text.startswith(f"{path}:2: There is no config file 'quickstrat'")
    assert text.endswith("Did you mean quickstart?")


def test_a_missing_base_of_a_base_is_named_where_it_stands(write_yaml):
    middle = write_yaml("middle.yaml", "\n\nbase: gone\n")
    assert message(composed, write_yaml("top.yaml", "base: middle")).startswith(f"{middle}:3: ")


@pytest.mark.parametrize("base", ["{a: 1}", "3", "[a, 3]", ""])
def test_base_takes_names_only(base, write_yaml):
    path = write_yaml("top.yaml", f"x: 1\nbase: {base}\n")
    assert message(composed, path).startswith(f"{path}:2: `base:` takes")


# -- merging ---------------------------------------------------------------------------------------


def test_plus_appends_a_list_or_a_single_item(write_yaml):
    a = write_yaml("a.yaml", {"trainer": {"callbacks": ["A"]}})
    b = write_yaml("b.yaml", {"trainer": {"callbacks+": ["B", "C"]}})
    c = write_yaml("c.yaml", {"trainer": {"callbacks+": {"class_path": "D"}}})
    assert composed(a, b, c).values == {"trainer": {"callbacks": ["A", "B", "C", {"class_path": "D"}]}}
    assert composed(c, a).values == {"trainer": {"callbacks": ["A"]}}
    assert composed(b).values == {"trainer": {"callbacks": ["B", "C"]}}


def test_appending_changes_no_list_that_was_there():
    old = {"x": [1]}
    assert merge(merge({}, old), {"x+": 2}) == {"x": [1, 2]}
    assert old == {"x": [1]}


def test_another_class_takes_none_of_the_first_ones_arguments():
    first = {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 1.0, "fused": True}}}
    other = {"optimizer": {"class_path": "Muon", "init_args": {"lr": 2.0}}}
    assert merge(deepcopy(first), other) == other
    again = {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 2.0}}}
    assert merge(deepcopy(first), again)["optimizer"]["init_args"] == {"lr": 2.0, "fused": True}
    assert merge(deepcopy(first), {"optimizer": {"init_args": {"lr": 3.0}}})["optimizer"] == {
        "class_path": "AdamW",
        "init_args": {"lr": 3.0, "fused": True},
    }


@pytest.mark.parametrize("spelling", ["AdamW", "plugins.optimizers.adamw.AdamW"])
@pytest.mark.parametrize("other", ["AdamW", "plugins.optimizers.adamw.AdamW"])
def test_the_same_class_in_short_and_in_full_keeps_its_arguments(spelling, other):
    first = {"optimizer": {"class_path": spelling, "init_args": {"lr": 1.0}}}
    merged = merge(first, {"optimizer": {"class_path": other, "init_args": {"eps": 0.1}}})
    assert merged == {"optimizer": {"class_path": other, "init_args": {"lr": 1.0, "eps": 0.1}}}


def test_a_plain_name_is_a_class_without_arguments():
    only_arguments = {"optimizer": {"init_args": {"lr": 2.0}}}
    assert merge({"optimizer": "AdamW"}, only_arguments) == {
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 2.0}}
    }
    mapping = {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 1.0}}}
    assert merge(deepcopy(mapping), {"optimizer": "AdamW"}) == mapping
    assert merge(deepcopy(mapping), {"optimizer": "Muon"}) == {"optimizer": "Muon"}


def test_a_section_with_all_its_lines_commented_out_takes_nothing_away(write_yaml):
    a = write_yaml("a.yaml", {"trainer": {"max_steps": 3}, "seed_everything": 1})
    b = write_yaml("b.yaml", "trainer:\n  # max_steps: 9\nmodel:\nseed_everything: 2\n")
    assert composed(a, b).values == {"trainer": {"max_steps": 3}, "seed_everything": 2}


def test_null_deeper_down_is_a_value(write_yaml):
    a = write_yaml("a.yaml", {"model": {"lr_scheduler": {"class_path": "X"}}})
    b = write_yaml("b.yaml", "model: {lr_scheduler: null}")
    assert composed(a, b).values == {"model": {"lr_scheduler": None}}


def test_composing_over_given_values_leaves_those_as_they_are(write_yaml):
    below = {"trainer": {"callbacks": ["A"], "max_steps": 1}}
    path = write_yaml("a.yaml", {"trainer": {"callbacks+": "B"}})
    assert merge_layers(read_layers([str(path)]), below).values == {
        "trainer": {"callbacks": ["A", "B"], "max_steps": 1}
    }
    assert below == {"trainer": {"callbacks": ["A"], "max_steps": 1}}


names = st.text(string.ascii_lowercase, min_size=1, max_size=2)
values = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
leaves = st.none() | values
inner = st.dictionaries(names, leaves | st.dictionaries(names, leaves, max_size=2), max_size=3)
configs = st.dictionaries(names, values | inner, max_size=4)  # null at the top level is no value
unhurried = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def plain_deep_merge(a, b):
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return b
    both = {key: plain_deep_merge(a[key], b[key]) for key in a.keys() & b.keys()}
    return {**a, **b, **both}


@unhurried
@given(configs, configs)
def test_without_lists_and_classes_composing_is_a_plain_deep_merge(tmp_path_factory, a, b):
    folder = tmp_path_factory.getbasetemp()
    for name, config in (("a", a), ("b", b)):
        (folder / f"{name}.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert composed(folder / "a.yaml", folder / "b.yaml").values == plain_deep_merge(a, b)


@unhurried
@given(configs)
def test_what_is_dumped_is_read_back_the_same_by_us_and_by_jsonargparse(config):
    from jsonargparse._loaders_dumpers import get_yaml_default_loader

    text = dump_yaml(config)
    assert values_of(text) == config
    assert yaml.load(text, Loader=get_yaml_default_loader()) == config


@pytest.mark.parametrize("text", ["1e3", "7e12", "12:30:00", "2026-01-31", "yes", "null", "010", ".5e3"])
def test_text_that_looks_like_something_else_stays_text(text):
    from jsonargparse._loaders_dumpers import get_yaml_default_loader

    assert yaml.load(dump_yaml({"a": text}), Loader=get_yaml_default_loader()) == {"a": text}
    assert values_of(f"a: '{text}'") == {"a": text}


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 1e-3), ("1E5", 1e5), ("-2.5e-1", -0.25), ("3e+2", 300.0), (".5", 0.5), ("1.", 1.0),
        ("12", 12), ("-7", -7), ("1_000", 1000), ("0x1f", 31), ("0", 0),
        ("10:00:00:00", "10:00:00:00"), ("2026-01-31", "2026-01-31"), ("1e", "1e"), ("e3", "e3"), ("08", "08"),
        ("true", True), ("null", None), ("~", None), ("'1e-3'", "1e-3"),
    ],
)  # fmt: skip
def test_scalars_are_what_they_look_like(written, value):
    read = values_of(f"a: {written}")["a"]
    assert read == value
    assert type(read) is type(value)


def test_infinity_and_nan_are_numbers():
    assert values_of("a: -.inf") == {"a": -math.inf}
    assert math.isnan(values_of("a: .nan")["a"])


def test_positions_are_the_lines_on_which_keys_and_items_stand(write_yaml):
    path = write_yaml(
        "a.yaml",
        "# comment\nseed: 1\ntrainer:\n  callbacks:\n    - A\n\n    - class_path: B\n      x: {y: 1}\n",
    )
    lines = {at: int(where.rpartition(":")[2]) for at, where in composed(path).positions.items()}
    assert lines == {
        (): 2, ("seed",): 2, ("trainer",): 3, ("trainer", "callbacks"): 4, ("trainer", "callbacks", 0): 5,
        ("trainer", "callbacks", 1): 7, ("trainer", "callbacks", 1, "class_path"): 7,
        ("trainer", "callbacks", 1, "x"): 8, ("trainer", "callbacks", 1, "x", "y"): 8,
    }  # fmt: skip


def test_positions_follow_values_into_the_composition(write_yaml):
    a = write_yaml("a.yaml", "trainer:\n  max_steps: 1\n  callbacks: [A, B]\n")
    b = write_yaml(
        "b.yaml", "trainer:\n  callbacks+:\n    - class_path: C\n      init_args: {n: 1}\n    - D\n"
    )
    c = write_yaml("c.yaml", "trainer:\n  max_steps: 2\n  callbacks+:\n    class_path: E\n")
    result = composed(a, b, c)
    callbacks = {at[2:]: line for at, line in result.positions.items() if at[:2] == ("trainer", "callbacks")}
    assert callbacks == {
        (): f"{a}:3", (0,): f"{a}:3", (1,): f"{a}:3",
        (2,): f"{b}:3", (2, "class_path"): f"{b}:3", (2, "init_args"): f"{b}:4", (2, "init_args", "n"): f"{b}:4",
        (3,): f"{b}:5",
        (4,): f"{c}:3", (4, "class_path"): f"{c}:4",
    }  # fmt: skip
    assert result.positions["trainer", "max_steps"] == f"{c}:2"


def test_what_is_replaced_leaves_no_position_behind(write_yaml):
    below = {
        "trainer": {"callbacks": [{"class_path": "A", "init_args": {"x": 1}}], "max_steps": 3},
        "model": {},
    }
    a, b = write_yaml("a.yaml", below), write_yaml("b.yaml", "trainer:\n  callbacks:\n  - B\nmodel:\n")
    positions = composed(a, b).positions
    assert {at: line for at, line in positions.items() if line.startswith(str(a))} == {
        ("trainer", "max_steps"): f"{a}:6",
        ("model",): f"{a}:7",
    }
    assert positions["trainer", "callbacks", 0] == f"{b}:3"


def test_a_repeated_key_is_an_error_with_its_line(write_yaml):
    path = write_yaml("a.yaml", "trainer:\n  max_steps: 1\n  devices: 1\n  max_steps: 2\n")
    assert message(composed, path) == f"{path}:4: 'max_steps' is here twice; keep one of the two."


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 3), ("a: 1\n\tb: 2\n", 2), ("a: 'open\n", 2), ("a: *nobody\n", 1),
        ("a: 1\n---\nb: 2\n", 2), ("a: 1\nb: !!python/name:os.system\n", 2), ("a: b: c\n", 1),
    ],
)  # fmt: skip
def test_broken_yaml_is_an_error_with_its_line(text, line, write_yaml):
    path = write_yaml("a.yaml", text)
    assert message(composed, path).startswith(f"{path}:{line}: this is not YAML: ")


@pytest.mark.parametrize("text", ["a: \x00", "a: !!int word", "a: &x {<<: *x}"])
def test_what_no_yaml_reader_can_hold_is_an_error_too(text, write_yaml):
    path = write_yaml("a.yaml", text)
    assert message(composed, path).startswith(f"{path}: this is not YAML: ")


def test_python_objects_are_not_built():
    assert "this is not YAML" in message(values_of, "a: !!python/object/apply:os.getcwd []\n")


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "list"), ("just text", "str"), ("3", "int")])
def test_a_config_is_a_mapping(text, kind, write_yaml):
    path = write_yaml("a.yaml", text)
    assert message(composed, path) == f"{path}:1: a config is a mapping (`key: value`), this is a {kind}."


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n"])
def test_an_empty_file_says_nothing(text, write_yaml):
    assert composed(write_yaml("a.yaml", text)).values == {}


@pytest.mark.parametrize("name", ["latin1.yaml", "folder.yaml/"])
def test_a_file_that_cannot_be_read_is_an_error(name, tmp_path):
    (tmp_path / "latin1.yaml").write_bytes(b"a: \xe9\n")
    (tmp_path / "folder.yaml").mkdir()
    assert name.rstrip("/") in message(composed, tmp_path / name)


@pytest.mark.parametrize("key", ["on", "null", "1.5", "[a, b]", "{a: 1}"])
def test_a_key_that_is_no_word_is_an_error(key):
    assert message(values_of, f"a: 1\n? {key}\n: 2\n").startswith("x.yaml:2: ")


def test_integers_are_keys_for_those_who_map_epochs():
    assert values_of("scheduling: {0: 8, 4: 2}") == {"scheduling": {0: 8, 4: 2}}


def test_anchors_and_merge_keys_work():
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2}\nc: {<<: [*b, *a], z: 3}\nd: *b\ne: [*a, *a]\n"
    b = {"x": 1, "y": 2}
    assert values_of("a: &a {x: 1}\nb: &b {y: 2}\nc:\n  <<: *a\n  <<: *b\n")["c"] == b
    assert values_of(text) == {
        "a": {"x": 1, "y": 1},
        "b": b,
        "c": {**b, "z": 3},
        "d": b,
        "e": [{"x": 1, "y": 1}] * 2,
    }


def test_values_of_an_alias_are_not_shared():
    values = values_of("a: &a {x: [1]}\nb: *a\n")
    merge(values, {"b": {"x+": 2, "y": 3}})
    assert values == {"a": {"x": [1]}, "b": {"x": [1, 2], "y": 3}}


def nested(levels, count):
    """Lists of aliases of the list before, `count` each."""
    lines = [f"a0: &a0 [{', '.join(['x'] * count)}]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * count)}]" for level in range(1, levels)]
    return "\n".join(lines)


LARGE = "a0: &a {" + ", ".join(f"k{number}: 1" for number in range(4_000)) + "}\n"
BOMBS = {
    "aliases": (nested(9, 9), "more than 10,000 values"),
    "aliases of mappings": (nested(9, 9).replace("[x", "[{k: x}"), "more than 10,000 values"),
    "merges": (LARGE + "b: &b {<<: *a}\nc: {<<: [" + "*b, " * 8_000 + "]}\n", "more than 10,000 values"),
    "itself": ("a: &a [*a]", "more than 64 deep"),
    "itself merged": ("a: &a {<<: *a}", "not YAML"),
    "deep lists": ("a: " + "[" * 400_000, "more than 64 deep"),
    "deep JSON": ('{"a":' * 80_000, "more than 64 deep"),
    "deep blocks": ("- " * 200_000, "more than 64 deep"),
    "many values": ("a: [" + "0," * 200_000 + "]", "more than 10,000 values"),
    "many lines": ("".join(f"k{number}: 1\n" for number in range(40_000)), "more than 10,000 values"),
    "a long file": ("a: " + "x" * 600_000, "more than 524,288 characters"),
    "a long number": ("a: " + "1" * 5_000, "5,000 digits"),
    "a long hexadecimal": ("a: 0x" + "f" * 5_000, "5,002 digits"),
    "a set": ("a: !!set {x: null}", "the tag 'set'"),
    "bytes": ("a: !!binary aGVsbG8=", "the tag 'binary'"),
    "a list merged as key": ("a: {<<: {? [b] : 1}}", "a key is a word"),
    "a long tag": ("a: !<" + "x" * 500_000 + "> 1", "the tag"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name == "deep blocks")) for name in BOMBS]
)
def test_what_would_take_all_memory_or_time_is_refused(name, write_yaml):
    text, said = BOMBS[name]
    error = message(composed, write_yaml("a.yaml", text))
    assert said in error
    assert len(error) < 500


@pytest.mark.parametrize("name", [name for name in BOMBS if name != "a long file"])
def test_a_bomb_on_the_command_line_stays_a_text_or_is_refused(name):
    text = BOMBS[name][0]
    assert parse_value(text) == text or len(text) < 10_000


def test_words_of_lightning_mean_the_strategies_that_declare_them():
    meant = {"ddp": "ddp.DDP", "fsdp": "fsdp.FSDP", "deepspeed": "deepspeed_zero.DeepSpeedZero"}
    for word, path in meant.items():
        chosen = prepare([f"--trainer.strategy={word}"]).composed.values["trainer"]["strategy"]
        assert chosen == {"class_path": f"plugins.strategies.{path}"}


def test_of_an_option_that_is_given_twice_the_last_value_counts():
    options = ["--trainer.strategy=ddp", "--trainer.strategy", "fsdp", "--trainer.strategy=DDP"]
    request = prepare([*options, "--trainer.strategy.find_unused_parameters=true"])
    assert request.composed.values["trainer"]["strategy"] == {"class_path": "plugins.strategies.ddp.DDP"}
    assert request.arguments == ["--trainer.strategy.find_unused_parameters=true"]
    assert prepare(["--trainer.strategy=DDP", "--trainer.strategy=ddp_spawn"]).arguments == [
        "--trainer.strategy=ddp_spawn"
    ]
