"""Commands that stand in for SLURM's: `sbatch` runs the elements of an array on this machine."""

import os
from pathlib import Path


def use(monkeypatch, folder):
    """Puts them on the PATH; jobs are noted in a folder, which is returned."""
    jobs = Path(folder) / "jobs"
    jobs.mkdir()
    monkeypatch.setenv("PATH", f"{Path(__file__).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STAND_IN", str(jobs))
    return jobs
