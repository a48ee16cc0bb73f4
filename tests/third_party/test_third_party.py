"""Packages that strangers could have written: installed, selected by short name, put through the kit, and broken."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core import API_VERSION, catalog
from core.__main__ import main
from tests.conftest import run_core
from tests.support.installing import copied, install
from tests.support.public_contracts import not_public

pytestmark = pytest.mark.ci

HERE = Path(__file__).resolve().parent
SOUND = {
    "acme_guard": ["DivergenceGuard"],
    "acme_network": ["MinGRU"],
    "acme_pretraining": ["SmoothedLM", "CsvDocuments"],
}
"""Package -> its techniques."""

COPIES = ("acme_clip", "acme_rollback", "acme_fsdp")
"""Packages that do what techniques of ours do: see test_copies.py."""

RUN = """
base: defaults
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 4
  log_every_n_steps: 1
  limit_val_batches: 0
  enable_progress_bar: false
  default_root_dir: run
  callbacks: [PeriodicCheckpoint, GUARD]
  logger: [MetricsCSV]
model:
  network:
    class_path: MinGRU
    init_args: {vocab_size: 320, n_layer: 1, n_embd: 16}
  objective: SmoothedLM
  optimizer:
    init_args: {lr: 0.01}
data:
  init_args:
    source: articles.csv
    reader: {class_path: CsvDocuments, init_args: {column: body}}
    tokenizer: {init_args: {vocab_size: 300}}
    cache_dir: cache
    sequence_length: 16
    batch_size: 4
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Copies of the packages: what builds and tests leave behind stays out of the checkout."""
    return copied(tmp_path_factory.mktemp("third_party"), *(HERE / name for name in (*SOUND, "acme_broken")))


@pytest.fixture(scope="module")
def site(sources):
    """The folder into which the three sound packages are installed."""
    return install(sources / "site", *(sources / name for name in SOUND))


@pytest.fixture(scope="module")
def broken_site(sources):
    """The folder into which the broken package is installed."""
    return install(sources / "broken-site", sources / "acme_broken")


@pytest.fixture
def all_installed(site, broken_site, monkeypatch):
    """Lets this process see the four packages; their modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(broken_site))
    catalog.entries.cache_clear()
    yield
    catalog.entries.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in (*SOUND, "acme_broken")]:
        del sys.modules[name]


def test_they_are_written_against_the_public_contracts_alone():
    files = sorted(HERE.glob("acme_*/**/*.py"))
    assert {path.parts[len(HERE.parts)] for path in files} == {*SOUND, *COPIES, "acme_broken"}
    house = ("core", "toolkit", "conformance", "plugins", "callbacks", "datamodules", "configs", "tests")
    found = {str(path.relative_to(HERE)): not_public(path, house) for path in files}
    assert not {path: names for path, names in found.items() if names}
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert "import_module" not in text


def fit(folder, *site_packages, guard="DivergenceGuard"):
    """Trains with everything that the sound packages offer; returns the figures of each step."""
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN.replace("GUARD", guard))
    shutil.copy(HERE / "acme_pretraining" / "tests" / "articles.csv", folder)
    done = run_core(
        "fit", "--config", "run.yaml", cwd=folder, PYTHONPATH=os.pathsep.join(map(str, site_packages))
    )
    assert done.returncode == 0, done.stderr
    with open(folder / "run" / "metrics.csv") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(site, tmp_path_factory):
    """The folder of a run with the three sound packages, and the figures of each step."""
    folder = tmp_path_factory.mktemp("fit") / "sound"
    return folder, fit(folder, site)


def test_one_run_selects_all_of_them_by_their_short_names(run):
    folder, rows = run
    table = [line.split() for line in (folder / "run" / "techniques.txt").read_text().splitlines()]
    assert {row[0]: row[1:4] for row in table if "acme" in row[2]} == {
        "DivergenceGuard": ["callbacks", "acme-guard", "0.1.0"],
        "MinGRU": ["networks", "acme-network", "0.1.0"],
        "SmoothedLM": ["objectives", "acme-pretraining", "0.1.0"],
        "CsvDocuments": ["data", "acme-pretraining", "0.1.0"],
    }
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    for row in rows:
        loss, entropy, uniform = (
            float(row[f"train/{name}"]) for name in ("loss", "cross_entropy", "uniform_cross_entropy")
        )
        assert loss == pytest.approx(0.9 * entropy + 0.1 * uniform)


def test_a_run_that_does_not_name_a_broken_package_is_untouched(run, site, broken_site, tmp_path):
    rows = fit(tmp_path / "x", broken_site, site, guard="acme_guard.divergence_guard.DivergenceGuard")
    assert (tmp_path / "x" / "run" / "techniques.txt").read_text() == (
        run[0] / "run" / "techniques.txt"
    ).read_text()
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in run[1]]


BROKEN = {
    "Unwritten": "Unwritten of acme-broken 0.1.0 cannot be imported: ModuleNotFoundError: No module named "
    "'acme_broken.unwritten'\n"
    "It is registered as acme_broken.unwritten:Unwritten in the group leyden.callbacks.\n"
    "Reinstall or repair acme-broken, or take Unwritten out of the run.\n",
    "DivergenceGuard": "DivergenceGuard is registered by 2 packages; write the full path:\n"
    "  acme_broken.divergence_guard.DivergenceGuard  (from acme-broken 0.1.0)\n"
    "  acme_guard.divergence_guard.DivergenceGuard  (from acme-guard 0.1.0)\n",
    "NoCallback": "run.yaml:11: NoCallback of acme-broken 0.1.0 is registered in leyden.callbacks, but is no Callback.\n"
    "Upgrade or repair acme-broken, or take NoCallback out of the run.\n",
    "Unlicensed": "Unlicensed of acme-broken 0.1.0 cannot be imported: PermissionError: the licence server does not "
    "answer\nIt is registered as acme_broken.unlicensed:Unlicensed in the group leyden.callbacks.\n"
    "Reinstall or repair acme-broken, or take Unlicensed out of the run.\n",
    "FromTomorrow": "This selection cannot run, 1 problem:\n"
    f"- FromTomorrow (run.yaml:11) of acme-broken 0.1.0 was written for core API >=99,<100, this is {API_VERSION}: "
    "pip install --upgrade leyden\n",
}
"""Technique -> what a run that names it prints."""


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("name", BROKEN)
def test_a_run_that_names_a_broken_technique_is_told_which_and_what_to_do(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN.replace("GUARD", name))
    assert main(["fit", "--config", "run.yaml"]) == 2
    message = capsys.readouterr().err
    assert message == BROKEN[name]
    assert len(message.splitlines()) <= 10
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("all_installed")
def test_they_are_listed_broken_or_not(capsys):
    assert main(["plugins", "list", "--kind", "callbacks"]) == 0
    shown = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if "acme" in line]
    assert shown == [
        ["callbacks", "DivergenceGuard", "acme-broken"],
        ["callbacks", "DivergenceGuard", "acme-guard"],
        ["callbacks", "FromTomorrow", "acme-broken"],
        ["callbacks", "NoCallback", "acme-broken"],
        ["callbacks", "Unlicensed", "acme-broken"],
        ["callbacks", "Unwritten", "acme-broken"],
    ]


@pytest.mark.usefixtures("all_installed")
def test_the_check_of_the_broken_package_shows_what_is_wrong(capsys):
    assert main(["plugins", "check", "acme-broken"]) == 1
    message = capsys.readouterr().out
    for name, found in {
        "Unwritten": "ModuleNotFoundError: No module named 'acme_broken.unwritten'",
        "DivergenceGuard": "registered 2 times (acme-broken 0.1.0, acme-guard 0.1.0)",
        "NoCallback": "does not derive from lightning.pytorch.callbacks.Callback",
        "Unlicensed": "PermissionError: the licence server does not answer",
        "FromTomorrow": f"written for core API >=99,<100, this is {API_VERSION}: pip install --upgrade leyden",
    }.items():
        [line] = [line for line in message.splitlines() if line.split()[1:2] == [name]]
        assert found in line
    assert message.endswith("5 checked, 5 broken.\n")


@pytest.mark.parametrize("package", [pytest.param(name, marks=pytest.mark.slow) for name in SOUND])
def test_its_own_tests_and_the_kit_pass(package, sources, site):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--leyden-package", package],
        cwd=sources / package,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    for name in SOUND[package]:
        for promise in ("trains", "resumes_bitwise", "agrees_on_two_ranks", "is_documented"):
            assert f"{package}::{name}::{promise} PASSED" in done.stdout
    assert "tests/test_" in done.stdout
