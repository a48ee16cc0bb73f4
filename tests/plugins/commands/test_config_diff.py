"""`config diff`: what differs between configs, runs and checkpoints, techniques first."""

import json
from copy import deepcopy

import pytest
import yaml

from core.__main__ import main
from plugins.commands.config import differing, flatten, technique_cells
from tests.conftest import TINY


@pytest.fixture
def diff(capsys):
    """Calls the command; returns the lines below `A:` and `B:`."""

    def call(a, b, code=0):
        assert main(["config", "diff", str(a), str(b)]) == code
        shown = capsys.readouterr()
        return shown.err if code else shown.out.splitlines()[2:]

    return call


@pytest.fixture
def as_json(capsys):
    def call(a, b):
        assert main(["config", "diff", str(a), str(b), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of two tiny runs: `one`, and `two`, which differs in a callback, the optimizer and a number."""
    folder = tmp_path_factory.mktemp("runs")
    other = deepcopy(TINY)
    other["trainer"]["callbacks"].insert(0, {"class_path": "Throughput"})
    other["model"]["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    other["model"]["network"]["init_args"]["n_embd"] = 8
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it: restored afterwards
        for name, config in {"one": TINY, "two": other}.items():
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
            assert main(["fit", "--config", f"{name}.yaml", "--trainer.max_steps=4"]) == 0
    return folder


def test_written_configs_differ_by_name_not_by_place(diff, write_yaml):
    a = {
        "trainer": {
            "max_steps": 10,
            "callbacks": [
                {"class_path": "LossCurve", "init_args": {"every_n_validations": 2}},
                {"class_path": "TextSamples", "init_args": {"num_samples": 3}},
            ],
        },
        "model": {"network": {"class_path": "GPT", "init_args": {"n_layer": 2}}, "objective": "CausalLM"},
    }
    b = {
        "trainer": {
            "max_steps": 20,
            "callbacks": ["Throughput", {"class_path": "LossCurve", "init_args": {"every_n_validations": 1}}],
            "strategy": "ddp",
        },
        "model": {
            "network": {"class_path": "plugins.networks.gpt.GPT", "init_args": {"n_layer": 4}},
            "objective": {"class_path": "plugins.objectives.causal_lm.CausalLM"},
        },
    }
    assert diff(write_yaml("a.yaml", a), write_yaml("b.yaml", b)) == [
        "",
        "Techniques:",
        "  - trainer.callbacks: TextSamples(num_samples=3)",
        "  + trainer.callbacks: Throughput",
        "  + trainer.strategy: DDP",
        "",
        "Values:",
        "  trainer.callbacks.LossCurve.every_n_validations: 2 -> 1",
        "  trainer.max_steps: 10 -> 20",
        "  model.network.n_layer: 2 -> 4",
    ]


def test_the_same_has_no_difference(diff, as_json):
    assert diff("quickstart", "configs/quickstart.yaml") == ["", "There is no difference."]
    assert as_json("quickstart", "quickstart") == {"techniques": [], "values": []}


def test_a_config_is_completed_where_it_meets_a_run(diff, runs, monkeypatch):
    monkeypatch.chdir(runs)
    assert diff("one.yaml", "runs/one") == ["", "Values:", "  trainer.max_steps: 6 -> 4"]


def test_two_runs(diff, runs):
    lines = diff(runs / "runs/one", runs / "runs/two/config.yaml")
    assert lines[:4] == [
        "",
        "Techniques:",
        "  + trainer.callbacks: Throughput",
        "  ~ model.optimizer: AdamW -> SGD",
    ]
    values = lines[lines.index("Values:") + 1 :]
    assert values[0] == "  trainer.default_root_dir: runs/one -> runs/two"
    assert "  model.network.n_embd: 16 -> 8" in values
    assert "  model.optimizer.lr: 0.01 -> 0.5" in values
    assert "  model.optimizer.momentum: (absent) -> 0.0" in values
    assert not any("PeriodicCheckpoint" in line for line in lines)  # index 0 in one, 1 in the other


def test_a_checkpoint_counts_as_the_run_that_wrote_it(diff, as_json, runs):
    *_, checkpoint = sorted((runs / "runs/two").rglob("*.ckpt"))
    assert diff(checkpoint, runs / "runs/two") == ["", "There is no difference."]
    assert as_json(runs / "runs/one", checkpoint) == as_json(runs / "runs/one", runs / "runs/two")
    assert diff(checkpoint.parent, checkpoint) == ["", "There is no difference."]


def test_json_holds_class_paths_arguments_and_both_sides(as_json, runs):
    found = as_json(runs / "runs/two", runs / "runs/one")
    assert found["techniques"] == [
        {
            "key": "trainer.callbacks.Throughput",
            "change": "removed",
            "a": "callbacks.throughput.Throughput",
            "arguments": {},
        },
        {
            "key": "model.optimizer",
            "change": "replaced",
            "a": "torch.optim.SGD",
            "b": "plugins.optimizers.adamw.AdamW",
        },
    ]
    assert {"key": "model.optimizer.betas", "change": "added", "b": [0.9, 0.95]} in found["values"]
    assert {"key": "model.optimizer.momentum", "change": "removed", "a": 0.0} in found["values"]
    assert {"key": "model.network.n_embd", "change": "replaced", "a": 8, "b": 16} in found["values"]


def flat_of(**sections):
    return flatten(sections)


def test_two_of_a_kind_are_numbered():
    twice = {"trainer": {"logger": [{"class_path": "x.CSV", "init_args": {"n": n}} for n in (1, 2)]}}
    flat = flatten(twice)
    assert flat.techniques == {"trainer.logger.CSV": "x.CSV", "trainer.logger.CSV#2": "x.CSV"}
    assert flat.values == {"trainer.logger.CSV.n": 1, "trainer.logger.CSV#2.n": 2}


def test_one_name_of_two_packages_is_told_by_the_full_path():
    flats = [flat_of(model={"optimizer": {"class_path": path}}) for path in ("a.Adam", "b.Adam")]
    assert differing(flats) == (["model.optimizer"], [])
    assert technique_cells(flats, "model.optimizer") == ["a.Adam", "b.Adam"]


def test_a_bare_name_is_the_path_that_ends_in_it():
    flats = [flat_of(trainer={"callbacks": [name]}) for name in ("Monitor", "lightning.x.Monitor")]
    assert differing(flats) == ([], [])


def test_nothing_where_a_class_stands_is_no_difference_of_its_own():
    flats = [flat_of(trainer={"logger": value}) for value in (False, {"class_path": "x.CSV"}, None)]
    assert differing(flats) == (["trainer.logger.CSV"], [])
    assert technique_cells(flats, "trainer.logger.CSV") == ["(absent)", "CSV", "(absent)"]
    assert differing(flats[::2]) == ([], ["trainer.logger"])


def test_techniques_inside_techniques_and_lists_without_classes():
    reader = {"class_path": "data.Reader", "init_args": {"path": "x"}}
    data = {"class_path": "data.Module", "init_args": {"reader": reader, "writer": "TokenShards"}}
    flat = flat_of(data=data, trainer={"devices": [0, 1]})
    assert flat.techniques == {
        "data": "data.Module",
        "data.reader": "data.Reader",
        "data.writer": "TokenShards",
    }
    assert flat.values == {"data.reader.path": "x", "trainer.devices": [0, 1]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quickstrat", "no config file 'quickstrat'"),
        ("{runs}/runs/ones", "Did you mean {runs}/runs/one?"),
        ("{runs}/runs/one.ckpt", "there is no such file"),
        ("{runs}/empty", "is no run folder: it holds neither config.yaml nor a checkpoint"),
        ("{runs}/foreign.ckpt", "holds no configuration"),
        ("{runs}/broken.yaml", "broken.yaml:1: this is not YAML"),
    ],
)
def test_what_cannot_be_read_is_said(name, expected, diff, runs):
    import torch

    (runs / "empty").mkdir(exist_ok=True)
    (runs / "broken.yaml").write_text("a: [")
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6"}, runs / "foreign.ckpt")
    error = diff(name.format(runs=runs), "quickstart", code=2)
    assert expected.format(runs=runs) in error
    assert len(error.splitlines()) <= 10


def test_an_empty_config_differs_in_everything(diff, write_yaml):
    one, other = write_yaml("empty.yaml", "# nothing\n"), write_yaml("tiny.yaml", TINY)
    assert "  + model.objective: CausalLM" in diff(one, other)
    assert diff(one, one) == ["", "There is no difference."]
