"""Code of answers, run with limits: what passes, what does not, and what it cannot reach."""

import os
import socket
import subprocess
import sys
import time

import pytest

from core.errors import ConfigError
from plugins.rewards.sandbox import Sandbox
from plugins.rewards.unit_test_reward import UnitTestReward
from toolkit.rewards import Sample

ADD = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(1, 1) == 3"]


def values(*answers, tests=TESTS[0], **options):
    options = {"isolated": False, "cpu_seconds": 1, "seconds": 20.0, "workers": 2} | options
    samples = [Sample("Write add.", answer, [1], True, {"tests": tests}) for answer in answers]
    return UnitTestReward(**options).score(samples)


def test_code_in_and_without_fences():
    fenced = f"First:\n```python\nadd = None\n```\nBetter:\n```python\n{ADD}\n```\nDone."
    cut = f"```py\n{ADD}\n"
    assert values(fenced, ADD, cut, "I cannot.", "", f"```\n{ADD}\n```\n```\nadd = 1\n```") == [
        1,
        1,
        1,
        0,
        0,
        0,
    ]


def test_the_share_of_the_tests_that_pass():
    assert values(ADD, tests=TESTS, partial=True) == [pytest.approx(2 / 3)]
    assert values(ADD, tests=TESTS) == [0]
    assert values(ADD, tests=TESTS[:2]) == [1]


@pytest.mark.parametrize(
    "answer",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "open('result', 'w').write('1 1')\nimport os\nos._exit(0)",
        "import atexit\natexit.register(print)\nraise KeyboardInterrupt",
        "add = lambda a, b: input()",
        "\ud800",
        "x = 1\0",
        "add = lambda a, b: 3\nimport os\nfor fd in range(3, 50):\n    try: os.close(fd)\n    except OSError: pass",
    ],
)
def test_an_end_without_the_tests_is_no_success(answer):
    assert values(answer) == [0]


def test_limits_of_time_memory_and_output():
    started = time.monotonic()
    found = values(
        "while True: pass",
        "x = bytearray(1 << 30)\n" + ADD,
        f"with open('file', 'wb') as file:\n    for _ in range(100): file.write(bytes(1 << 20))\n{ADD}",
        f"for _ in range(1000): print('x' * 10000)\n{ADD}",
        memory_mib=256,
    )
    assert found == [0, 0, 0, 1]
    assert values("import time\ntime.sleep(600)", seconds=0.5) == [0]
    assert time.monotonic() - started < 60  # none of them ran to its end


def test_what_it_started_ends_with_it(tmp_path):
    beat = f"import os, time\nif os.fork() == 0:\n    while True: time.sleep(600)  # {tmp_path.name}\n{ADD}"
    assert values(beat) == [1]
    assert tmp_path.name not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_it_finds_no_environment_and_no_packages(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    assert values(f"import os\nassert 'SECRET_TOKEN' not in os.environ\n{ADD}") == [1]
    assert values(f"import numpy\n{ADD}") == [0]
    assert values(f"import json, random, dataclasses, decimal, threading, typing\n{ADD}") == [1]


@pytest.fixture
def isolated():
    try:
        Sandbox(2, 20, 512).check(required=True)
    except ConfigError as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.usefixtures("isolated")
def test_it_reaches_no_file_process_or_network(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reaching = [
            f"open({str(mine)!r}).read()",
            f"open({str(mine)!r}, 'a')",
            f"import os; os.unlink({str(mine)!r})",
            f"import os; os.listdir({str(tmp_path)!r})",
            f"open({str(tmp_path / 'new')!r}, 'w')",
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
            f"import os; os.kill({os.getpid()}, 0)",
            f"import subprocess; subprocess.run([{sys.executable!r}, '-c', ''], check=True)",
        ]
        assert values(*(f"{line}\n{ADD}" for line in reaching), isolated=True) == [0] * len(reaching)
    assert values(f"open('own', 'w').write('x'); assert open('own').read() == 'x'\n{ADD}", isolated=True) == [
        1
    ]
    assert mine.read_text() == "mine"


def test_where_it_cannot_be_isolated(monkeypatch, caplog):
    """Without namespaces, as in most containers."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"cannot keep .*other processes from the code") as caught:
        values(ADD, isolated=True)
    assert len(str(caught.value).splitlines()) <= 10
    assert values(ADD) == [1]
    assert "run in a container that holds no secrets" in caplog.text


def test_mistakes():
    for options in ({"cpu_seconds": 0}, {"seconds": float("nan")}, {"memory_mib": -1}, {"workers": 0}):
        with pytest.raises(ConfigError, match="it is above 0"):
            values(ADD, **options)
    with pytest.raises(ConfigError, match="cannot run Python code here"):
        values(ADD, memory_mib=1)
    with pytest.raises(ConfigError, match="has to be Python code, or a list"):
        values(ADD, tests=[1])
    with pytest.raises(ConfigError, match="'tests' of a record is empty"):
        values(ADD, tests=[])
