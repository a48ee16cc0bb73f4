"""`plugins new`: what it writes is a package that installs, passes its own tests and trains."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

from core import API_VERSION, catalog
from core.__main__ import main
from plugins.commands.plugins_new import TEMPLATES, project
from tests.conftest import TINY, run_core

NAMES = {
    "callbacks": "SpikeGuard",
    "commands": "best_step",
    "datamodules": "Counting",
    "loggers": "MetricsJSONL",
    "networks": "BigramNet",
    "objectives": "ZLossLM",
    "optimizers": "Signum2",
    "schedules": "LinearDecay",
    "stages": "Paragraphs",
}


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """A folder with a new project of every kind."""
    folder = tmp_path_factory.mktemp("projects")
    for kind, name in NAMES.items():
        assert main(["plugins", "new", name, "--kind", kind, "--output", str(folder / name)]) == 0
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


def test_there_is_a_template_for_every_kind_that_is_tested_here():
    assert set(NAMES) == set(TEMPLATES)


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


@pytest.mark.ci
def test_the_tests_of_every_kind_pass(projects, site):
    told = passed(projects, site)
    for kind, name in NAMES.items():
        word = next((projects / name / "tests").glob("test_*.py")).name
        assert f"{word}::test_" in told, kind
    assert "skipped" not in told


@pytest.mark.slow
def test_the_conformance_kit_passes_for_every_kind(projects, site):
    """That plain `pytest` runs it is tested with the commands of CONTRIBUTING.md."""
    packages = [path.name.partition("-")[0] for path in site.glob("*.dist-info")]
    told = passed(projects, site, *(word for name in packages for word in ("--leyden-package", name)))
    for kind, name in NAMES.items():
        proof = "is_documented" if kind == "commands" else "resumes_bitwise"
        assert f"::{name}::{proof} PASSED" in told, kind


def test_a_run_selects_them_by_their_short_names(site, tmp_path):
    config = {
        "trainer": {**TINY["trainer"], "callbacks": ["SpikeGuard"], "logger": ["MetricsJSONL"]},
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
    done = run_core("fit", "--config", path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:4] for line in done.stdout.splitlines() if "leyden-" in line}
    chosen = ["callbacks", "loggers", "networks", "objectives", "optimizers", "schedules"]
    assert {name: row[0] for name, row in rows.items()} == {NAMES[kind]: kind for kind in chosen}
    assert rows["SpikeGuard"][1:] == ["leyden-spike-guard", "0.1.0"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("train/z_loss") == 3


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


@pytest.mark.parametrize("kind", NAMES)
def test_a_project_is_complete_and_nothing_is_left_to_fill_in(kind):
    files = project("OwnThing", "own_thing", kind)
    assert {"pyproject.toml", "README.md", ".github/workflows/test.yml", "tests/test_own_thing.py"} < set(
        files
    )
    assert tomllib.loads(files["pyproject.toml"])["tool"]["pytest"]["ini_options"]["addopts"] == (
        "--leyden-package leyden-own-thing"
    )
    assert (
        catalog.upgrade(
            re.search(r'api="(.*)"\)$', files["leyden_own_thing/own_thing.py"], re.M)[1], API_VERSION, "x"
        )
        is None
    )
    assert yaml.safe_load(files[".github/workflows/test.yml"])["jobs"]["test"]["steps"]
    name = "own_thing" if kind == "commands" else "OwnThing"
    assert f'[project.entry-points."leyden.{kind}"]\n' in files["pyproject.toml"]
    assert name in files["README.md"]
    for path, text in files.items():
        assert text.startswith(tuple('[#n"')), path
        for left in (
            "TechniqueName",
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
    assert "holds README.md already: nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_said(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert (
        main(["plugins", "new", "Mine", "--kind", "callbacks", "--output", str(tmp_path / "file" / "x")]) == 2
    )
    assert "Not a directory. Choose another folder with --output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("spike-guard", "callbacks", "Did you mean SpikeGuard?"),
        ("spikeGuard", "callbacks", "Did you mean SpikeGuard?"),
        ("Spike_Guard", "callbacks", "Did you mean SpikeGuard?"),
        ("2Fast", "callbacks", "write it like SpikeGuard."),
        ("", "callbacks", "write it like SpikeGuard."),
        ("Grün", "callbacks", "write it like SpikeGuard"),
        ("BestStep", "commands", "Did you mean best_step?"),
        ("Class", "callbacks", "a word of Python's own"),
        ("print", "commands", "a word of Python's own"),
        ("ValueError", "callbacks", "a word of Python's own"),
        ("Callback", "callbacks", "would hide what the template imports"),
        ("csv", "commands", "would hide what the template imports"),
        ("Throughput", "callbacks", "is a name of leyden"),
        ("GPT", "callbacks", "is a name of leyden"),
        ("fit", "commands", "is a name of leyden"),
        ("Zero", "strategies", "There is no template for strategies"),
        ("Float8", "precision", "There are templates for callbacks, commands,"),
        ("Lora", "adapters", "There is no template for adapters"),
        ("Async", "checkpoints", "There is no template for checkpoints"),
    ],
)
def test_what_cannot_be_made_is_refused(name, kind, told, tmp_path, capsys):
    assert main(["plugins", "new", name, "--kind", kind, "--output", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) <= 10
    assert not (tmp_path / "x").exists()
