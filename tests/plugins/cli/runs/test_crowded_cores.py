"""Threads sleep while they wait where other programs compute, and only there."""

import os
import subprocess
import sys

import pytest

from plugins.cli.runs.crowded_cores import _running, share_cores

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("environ", "running", "policy"),
    [
        ({}, 1, None),  # this program alone
        ({}, 2, "passive"),
        ({"OMP_NUM_THREADS": "2"}, CORES, "passive"),
        ({"OMP_NUM_THREADS": "1"}, 99, None),  # one thread waits for nobody
        ({"OMP_WAIT_POLICY": "active"}, 99, "active"),
        ({"GOMP_SPINCOUNT": "5"}, 99, None),
    ],
)
def test_where_others_compute(monkeypatch, environ, running, policy):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: CORES)
    given = dict(environ)
    note = share_cores(given, lambda: running)
    assert given.get("OMP_WAIT_POLICY") == policy
    assert ("other threads compute" in note) == (policy == "passive")


def test_threads_on_cores_that_are_not_ours_are_not_counted(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64 * CORES)
    assert share_cores(given := {}, lambda: 99) == ""
    assert given == {}


def test_the_kernel_counts_programs_that_compute():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(CORES + 1)]
    try:
        seen = max(_running() for _ in range(200))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert seen > CORES
