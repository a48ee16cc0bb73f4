"""Commands that stand in for SLURM's: `sbatch` runs the elements of an array on this machine."""

import os
from pathlib import Path


def environment(folder):
    """Returns the variables with which they are found, behind those of the machine; jobs are noted in a folder."""
    jobs = Path(folder) / "jobs"
    jobs.mkdir(exist_ok=True)
    path = f"{os.environ['PATH']}{os.pathsep}{Path(__file__).parent}"
    return {"PATH": path, "SLURM_STAND_IN": str(jobs)}
