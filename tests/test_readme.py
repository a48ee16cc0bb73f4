"""The README says of the techniques what the catalogue holds, and its Python runs."""

import os
import re
import subprocess
import sys

import pytest

from core import catalog
from tests.conftest import HOUSE

README = (HOUSE / "README.md").read_text(encoding="utf-8")


def kinds_table():
    """Returns the README's table: kind, number of our techniques, the first few names."""
    names = {}
    for entry in catalog.entries():
        if entry.package == "leyden":
            names.setdefault(entry.kind, []).append(entry.name)
    lines = ["| kind | count | such as |", "| --- | --- | --- |"]
    for kind, found in sorted(names.items()):
        folders = (f"{kind}/", f"plugins/{kind}/", "datamodules/")
        folder = next(name for name in folders if (HOUSE / name).is_dir())
        lines.append(f"| [{kind}]({folder}) | {len(found)} | {', '.join(sorted(found)[:5])} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_kinds_is_current():
    written = README.partition("<!-- generated: kinds -->\n")[2].partition("<!-- end: kinds -->")[0]
    assert written == kinds_table(), f"put this table into README.md:\n{kinds_table()}"


def test_the_readme_is_short():
    assert README.count("\n") <= 150


@pytest.mark.ci
def test_the_python_example_trains(tmp_path):
    [source] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = [line for line in source.splitlines() if line and not line.startswith(("from ", "import "))]
    assert len(code) <= 15
    short = source.replace("max_steps=200", "max_steps=2, limit_val_batches=1")
    assert short != source
    (tmp_path / "example.py").write_text(short, encoding="utf-8")
    environment = {
        "PYTHONPATH": str(HOUSE),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "`max_steps=2` reached" in done.stderr
