"""Web pages are prepared by real processes that are killed in each phase: the folder has the same bytes."""

import subprocess

import pytest

from tests.benchmarks.prepare_cost import HOUSE
from tests.support.corpus import contents
from tests.support.killed_preparation import MOMENTS, command, killed_at_all_moments
from tests.support.web_sample import write_web_sample

for package in ("fastwarc", "resiliparse", "py3langid"):
    pytest.importorskip(package)


@pytest.mark.slow
def test_killed_in_each_phase(tmp_path):
    write_web_sample(tmp_path / "source", 4, files=24)
    subprocess.run(
        command(tmp_path / "source", tmp_path / "whole"), cwd=HOUSE, check=True, capture_output=True
    )
    killed = killed_at_all_moments(tmp_path / "source", tmp_path / "killed")
    assert killed == [name for name, *_ in MOMENTS]
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
