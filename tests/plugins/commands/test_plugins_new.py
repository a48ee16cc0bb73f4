"""`plugins new`: what it writes is a package that installs, passes its own tests and trains."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

from conformance.runs import run
from core import API_VERSION, catalog
from core.__main__ import main
from plugins.commands.plugins_new import TEMPLATES, project
from tests.conftest import TINY

NAMES = {
    "adapters": "LastBlocks",
    "callbacks": "SpikeGuard",
    "checkpoints": "PrivateCheckpoint",
    "commands": "best-step",
    "datamodules": "Counting",
    "loggers": "MetricsJSONL",
    "networks": "BigramNet",
    "objectives": "ZLossLM",
    "optimizers": "Signum2",
    "precision": "RoundedProducts",
    "evaluations": "TextLoss",
    "rewards": "ShortAnswer",
    "schedules": "LinearDecay",
    "data": "Lines",
    "data-Transform": "LongEnough",
    "strategies": "WideDDP",
}
"""Template -> the name of what is made from it."""


def options_of(template):
    """Returns the words that choose a template."""
    kind, _, contract = template.partition("-")
    return ["--kind", kind, *(["--contract", contract] if contract else [])]


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """A folder with a new project of every kind."""
    folder = tmp_path_factory.mktemp("projects")
    for template, name in NAMES.items():
        words = [*options_of(template), "--output", str(folder / name)]
        assert main(["plugins", "new", name, *words]) == 0
    return folder


@pytest.fixture(scope="module")
def site(projects):
    """A folder into which pip has installed all of them."""
    site = projects / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    sources = [str(projects / name) for name in NAMES.values()]
    done = subprocess.run([*install, "--target", str(site), *sources], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def test_there_is_a_template_for_every_kind():
    assert set(NAMES) == set(TEMPLATES)
    assert {template.partition("-")[0] for template in TEMPLATES} == set(catalog.KINDS)


def test_the_former_name_of_a_kind_still_works(tmp_path):
    with pytest.warns(DeprecationWarning, match="--kind stages.*data"):
        assert main(["plugins", "new", "Old", "--kind", "stages", "--output", str(tmp_path / "old")]) == 0
    assert 'leyden.data"]' in (tmp_path / "old" / "pyproject.toml").read_text()


def passed(projects, site, *words):
    """Runs pytest on all projects at once; returns what it printed."""
    (projects / "pytest.ini").write_text("[pytest]\n")  # in place of the options that each has of its own
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *words, *NAMES.values()],
        cwd=projects,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.slow  # tests/test_contributing.py has one kind, in CI
def test_the_tests_of_every_kind_pass(projects, site):
    output = passed(projects, site)
    for kind, name in NAMES.items():
        word = next((projects / name / "tests").glob("test_*.py")).name
        assert f"{word}::test_" in output, kind
    assert "skipped" not in output


@pytest.mark.slow
def test_the_conformance_kit_passes_for_every_kind(projects, site):
    """That plain `pytest` runs it is tested with the commands of CONTRIBUTING.md."""
    packages = [path.name.partition("-")[0] for path in site.glob("*.dist-info")]
    output = passed(projects, site, *(word for name in packages for word in ("--leyden-package", name)))
    for kind, name in NAMES.items():
        without_run = {"commands": "is_documented", "rewards": "judges_each_answer_alone"}
        without_run["evaluations"] = "measures_each_item_alone"
        proof = without_run.get(kind, "resumes_bitwise")
        assert f"::{name}::{proof} PASSED" in output, kind


@pytest.mark.slow  # tests/third_party has such a run of several kinds, in CI
def test_a_run_selects_them_by_their_short_names(site, tmp_path, monkeypatch):
    config = {
        "trainer": {
            **TINY["trainer"],
            "callbacks": ["SpikeGuard", "LastBlocks", *TINY["trainer"]["callbacks"]],
            "logger": ["MetricsJSONL"],
            "plugins": ["RoundedProducts", "PrivateCheckpoint"],
            "strategy": "WideDDP",
        },
        "model": {
            "network": {"class_path": "BigramNet", "init_args": {"vocab_size": 64, "n_embd": 8}},
            "objective": "ZLossLM",
            "optimizer": {"class_path": "Signum2", "init_args": {"lr": 0.01}},
            "lr_scheduler": "LinearDecay",
        },
        "data": TINY["data"],
    }
    config["trainer"]["default_root_dir"] = str(tmp_path / "run")
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.syspath_prepend(str(site))  # a forked process has this one's path
    done = run(["fit", f"--config={path}"], tmp_path / "run").succeeded("`fit`")
    rows = {line.split()[0]: line.split()[1:4] for line in done.stdout.splitlines() if "leyden-" in line}
    chosen = {
        kind: name for kind, name in NAMES.items() if kind[:4] not in ("comm", "data", "eval", "rewa", "stag")
    }
    assert {name: row[0] for name, row in rows.items()} == {name: kind for kind, name in chosen.items()}
    assert rows["SpikeGuard"][1:] == ["leyden-spike-guard", "0.1.0"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("train/z_loss") == 3
    files = list((tmp_path / "run" / "checkpoints").glob("*.ckpt"))
    assert files
    assert all(path.stat().st_mode & 0o777 == 0o640 for path in files)


@pytest.mark.ci
def test_they_pass_the_check_and_are_shown(site, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(site))
    catalog.entries.cache_clear()
    try:
        packages = {entry.package for entry in catalog.entries()} - {"leyden"}
        assert len(packages) == len(NAMES)
        for package in packages:
            assert main(["plugins", "check", package]) == 0, capsys.readouterr().out
        capsys.readouterr()
        assert main(["plugins", "show", "SpikeGuard"]) == 0
        assert "  limit: float = 20.0\n      The highest loss to go on with" in capsys.readouterr().out
    finally:
        catalog.entries.cache_clear()
        for name in [name for name in sys.modules if name.startswith("leyden_")]:
            del sys.modules[name]


def test_what_is_written_is_in_order_for_ruff(projects):
    pytest.importorskip("ruff")
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", *NAMES.values()],
            cwd=projects,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("template", NAMES)
def test_a_project_is_complete_and_nothing_is_left_to_fill_in(template):
    kind = template.partition("-")[0]
    name = "own-thing" if kind == "commands" else "OwnThing"
    files = project(name, "own_thing", kind, template)
    assert {"pyproject.toml", "README.md", ".github/workflows/test.yml", "tests/test_own_thing.py"} < set(
        files
    )
    metadata = tomllib.loads(files["pyproject.toml"])
    assert metadata["tool"]["pytest"]["ini_options"]["addopts"] == "--leyden-package leyden-own-thing"
    attribute = "own_thing" if kind == "commands" else name
    assert metadata["project"]["entry-points"] == {
        f"leyden.{kind}": {name: f"leyden_own_thing.own_thing:{attribute}"}
    }
    assert (
        catalog.upgrade(
            re.search(r'api="(.*)"\)$', files["leyden_own_thing/own_thing.py"], re.M)[1], API_VERSION, "x"
        )
        is None
    )
    assert yaml.safe_load(files[".github/workflows/test.yml"])["jobs"]["test"]["steps"]
    assert name in files["README.md"]
    for path, text in files.items():
        assert text.startswith(tuple('[#n"')), path
        for left in (
            "TechniqueName",
            "ENTRY_NAME",
            "technique_name",
            "technique-name",
            "SUMMARY",
            "USAGE",
            "CORE_VERSION",
            "API_RANGE",
        ):
            assert left not in path + text, (path, left)


def test_the_folder_is_named_after_the_technique(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "GPT2Guard", "--kind", "callbacks"]) == 0
    assert (tmp_path / "leyden-gpt2-guard" / "leyden_gpt2_guard" / "gpt2_guard.py").is_file()
    assert "cd leyden-gpt2-guard" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "README.md").write_text("mine")
    assert main(["plugins", "new", "Mine", "--kind", "callbacks", "--output", str(tmp_path)]) == 2
    assert "README.md already: nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_said(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert (
        main(["plugins", "new", "Mine", "--kind", "callbacks", "--output", str(tmp_path / "file" / "x")]) == 2
    )
    assert "Not a directory. Nothing was written." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("spike-guard", "callbacks", "Did you mean SpikeGuard?"),
        ("spikeGuard", "callbacks", "Did you mean SpikeGuard?"),
        ("Spike_Guard", "callbacks", "Did you mean SpikeGuard?"),
        ("2Fast", "callbacks", "write it like SpikeGuard."),
        ("", "callbacks", "write it like SpikeGuard."),
        ("Grün", "callbacks", "write it like SpikeGuard"),
        ("BestStep", "commands", "Did you mean best-step?"),
        ("best step", "commands", "Did you mean best-step?"),
        ("best-", "commands", "Did you mean best?"),
        ("a" * 61, "commands", "it has 61 characters, 60 are the most"),
        ("Class", "callbacks", "a word of Python's own"),
        ("print", "commands", "a word of Python's own"),
        ("ValueError", "callbacks", "a word of Python's own"),
        ("Callback", "callbacks", "would hide what the template imports"),
        ("csv", "commands", "would hide what the template imports"),
        ("Throughput", "callbacks", "is taken by leyden"),
        ("GPT", "callbacks", "is taken by leyden"),
        ("fit", "commands", "is taken by leyden"),
        ("GradBucket", "strategy", "Did you mean"),
        ("Precision", "precision", "would hide what the template imports"),
    ],
)
def test_what_cannot_be_made_is_refused(name, kind, expected, tmp_path, capsys):
    assert main(["plugins", "new", name, "--kind", kind, "--output", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) <= 10
    assert not (tmp_path / "x").exists()
