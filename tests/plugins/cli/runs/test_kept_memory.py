"""A run on the CPU keeps what its steps free: no page is fetched from the kernel again."""

import os
import platform
import subprocess
import sys

import pytest

from plugins.cli.runs.kept_memory import keep_memory

STEPS = """
import resource, sys, torch
from plugins.cli.runs.kept_memory import keep_memory
if sys.argv[1] == "kept":
    assert keep_memory({})
def step():
    tensors = [torch.ones(size << 20, dtype=torch.uint8) for size in (1, 3, 40, 90)]
    return sum(int(tensor[-1]) for tensor in tensors)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
assert sum(step() for _ in range(5)) == 20
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str) -> int:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's settings")
def test_steps_fetch_no_page_again():
    # 134 MiB a step: 34,000 pages of 4 KiB, or 67 of 2 MiB where the kernel gives these to all
    assert _faults("plain") > 5 * 60
    assert (
        _faults("kept") < 3 * 60
    )  # now and then a tensor finds another place, whose pages are new: 45 or 90


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_who_has_decided_is_left_alone(name):
    assert keep_memory({name: "1"}) is False


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_limit_of_the_process_is_left_whole():
    limited = (
        "import resource\nfrom plugins.cli.runs.kept_memory import keep_memory\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**33, resource.RLIM_INFINITY))\nassert keep_memory({}) is False"
    )
    assert subprocess.run([sys.executable, "-c", limited]).returncode == 0
