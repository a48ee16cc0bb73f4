"""The wheel holds everything: installed elsewhere, it runs from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

HOUSE = Path(__file__).resolve().parents[1]

IMPORTED = """
from pathlib import Path
import core, plugins, callbacks, datamodules
from conformance import Case
from plugins.commands import docs_source
print(core.__file__)
docs_source.write(Path("texts"))
print(Case("GPT").values["data"]["class_path"])
"""


@pytest.mark.ci
def test_a_wheel_runs_from_any_folder(tmp_path):
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "wheel"),
        ".",
    ]
    done = subprocess.run(build, cwd=copy_of_the_house(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [wheel] = (tmp_path / "wheel").glob("leyden-*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True)
    elsewhere.mkdir()

    def run(*words):
        return subprocess.run(
            [*words],
            cwd=elsewhere,
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )

    found = run(sys.executable, "-c", IMPORTED)
    assert found.stdout.startswith(str(site)), found.stderr
    assert found.stdout.splitlines()[-1] == "core.pretrain_datamodule.PretrainDataModule"
    printed = run(sys.executable, "-m", "core", "fit", "--config", "quickstart", "--print_config")
    assert printed.returncode == 0, printed.stderr
    assert yaml.safe_load(printed.stdout)["model"]["network"]["class_path"] == "plugins.networks.gpt.GPT"
    script = run(sys.executable, str(site / "bin" / "leyden"), "plugins", "list")
    assert "CausalLM" in script.stdout, script.stderr
    new = run(sys.executable, "-m", "core", "plugins", "new", "OwnSchedule", "--kind", "schedules")
    assert (elsewhere / "leyden-own-schedule" / ".github" / "workflows" / "test.yml").is_file(), new.stderr
    for name in ("docs/first-run.md", "docs/threat-model.md", "configs/README.md", "CHANGELOG.md"):
        assert (elsewhere / "texts" / name).is_file(), (name, found.stderr)
    assert (elsewhere / "texts" / "docs" / "pictures" / "WarmupCosine.png").is_file()
    assert (elsewhere / "texts" / "configs" / "quickstart.png").is_file()
    assert "docs/first-run.md" in (elsewhere / "texts" / "index.md").read_text(encoding="utf-8")


def copy_of_the_house(folder):
    """Copies what git tracks: building in the checkout would leave build/ behind."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=HOUSE, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (HOUSE / name).is_file() and not name.startswith("tests/"):
            target = folder / "house" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((HOUSE / name).read_bytes())
    return folder / "house"
