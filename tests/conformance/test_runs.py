"""The runs of the kit: real processes that end, also when they hang; waits that are counted."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conformance import Case, NotProvable, proofs, runs
from conformance.own_state import LATE, steady_growth
from conformance.training import run_with, run_without
from conformance.waits import Waits
from conformance.workshop import workshop
from tests.conftest import HOUSE

HANGING = """
import os, sys, time

def hang(arguments):
    print("here", os.getpid(), flush=True)
    if os.environ.get("RANK") == "1":
        while "here" not in open("output.0.out").read():
            time.sleep(0.01)
        print("rank 1 gives up", file=sys.stderr, flush=True)
        return 3
    time.sleep(600)
"""


@pytest.fixture
def hang(packages):
    packages.add("acme", {"leyden.commands": {"hang": "acme:hang"}}, HANGING)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.usefixtures("hang")
def test_what_hangs_is_killed_and_what_it_wrote_is_told(monkeypatch):
    def clock():  # goes on when the process has begun
        return float("here" in (workshop() / "output.0.out").read_text())

    monkeypatch.setattr(runs, "monotonic", clock)
    with pytest.raises(
        AssertionError, match=r"`hang` was not done after 1 s. It wrote:\nhere (\d+)"
    ) as caught:
        runs.run(["hang"], workshop(), timeout=1)
    assert gone(int(str(caught.value).split()[-1]))


@pytest.mark.usefixtures("hang")
def test_a_rank_that_waits_for_one_that_failed_is_killed(monkeypatch):
    monkeypatch.setattr(runs, "GRACE_SECONDS", 0.5)
    done = runs.run(["hang"], workshop(), ranks=2)
    assert done.code == 3
    assert "rank 1 gives up" in done.error_text
    assert gone(int(done.stdout.split()[-1]))


@pytest.mark.parametrize("name", [*runs.PRELOADED, runs.LAST])
def test_what_is_preloaded_exists(name):
    assert importlib.util.find_spec(name) is not None


SECOND = """
from multiprocessing import forkserver, get_context

get_context("forkserver").set_forkserver_preload(["colorsys"])
forkserver.ensure_running()
from conformance import runs

runs.PRELOADED[:] = ["this"]
runs.in_subprocess(exec, "import sys; assert 'this' in sys.modules and 'colorsys' not in sys.modules")
"""


def test_a_fork_server_that_was_there_before_gives_way():
    """A LocalEngine in this process starts one without our imports, and each run would import all by itself."""
    done = subprocess.run(
        [sys.executable, "-c", SECOND], cwd=HOUSE, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


LEAN = """
from pathlib import Path
from conformance import runs

runs.in_subprocess(exec, "import sys; assert 'core.__main__' in sys.modules and 'torch._dynamo' not in sys.modules")
runs.in_subprocess(exec, "import re; print(re.search('AnonHugePages: *([0-9]+)', open('/proc/self/smaps_rollup').read())[1], flush=True)")
"""


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux says how memory is mapped")
def test_the_fork_server_starts_without_the_compiler_and_lies_in_huge_pages():
    done = subprocess.run(
        [sys.executable, "-c", LEAN], cwd=HOUSE, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    major, minor = map(int, os.uname().release.split(".")[:2])
    assert int(done.stdout) > 50_000 or (major, minor) < (6, 1)  # kB


def test_two_runs_of_the_same_are_the_same_to_the_bit():
    one, other = (run_with(Case("AdamW")) for _ in range(2))
    assert one.folder != other.folder
    assert one.record == other.record
    assert one.record["waits"] == []
    assert len(one.record["losses"]) == one.record["steps"] == 8
    assert sorted(map(int, one.record["figures"])) == [3, 4, 6, 8]


EXAMPLE = '''
from lightning.pytorch import Callback

class Guard(Callback):
    """Guards.

    Example:
        trainer:
          accumulate_grad_batches: 2
          devices: 2
          enable_checkpointing: null
          callbacks+:
            - {class_path: Guard, init_args: {limit: 1.0}}
            - Throughput
        model: {lr_scheduler: {class_path: WarmupLinear, init_args: {warmup_steps: 2}}}
    """
    def __init__(self, limit: float = 1.0): ...
'''


def test_the_baseline_has_what_else_an_example_sets_in_one_process(packages):
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, EXAMPLE)
    values = Case("Guard", config={"trainer": {"gradient_clip_val": 0.5}}).plain_values
    trainer = values["trainer"]
    assert [each["class_path"].rpartition(".")[2] for each in trainer["callbacks"]] == ["Throughput"]
    assert (trainer["accumulate_grad_batches"], trainer["devices"], trainer["gradient_clip_val"]) == (
        2,
        1,
        0.5,
    )
    assert trainer["enable_checkpointing"] is None
    assert values["model"]["lr_scheduler"]["init_args"] == {"warmup_steps": 2}


def test_the_baseline_of_what_stands_alone_is_the_tiny_run():
    case = Case("AdamW", {"lr": 0.5})
    assert case.values["model"]["optimizer"]["class_path"].endswith(".AdamW")
    assert case.plain_values["model"]["optimizer"]["class_path"] == "torch.optim.SGD"
    stage = Case("Normalise", {})
    assert "data" not in stage.plain_values["data"]["init_args"]
    packing = Case("BestFit")  # whose example names the data module as well
    assert packing.values["data"]["init_args"]["packing"]["class_path"].endswith(".BestFit")
    assert packing.plain_values["data"]["init_args"]["packing"]["class_path"].endswith(".Concatenate")


@pytest.mark.ci
def test_dropout_is_noticed_and_resumes_all_the_same():
    case = Case("GPT", {"n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 16, "dropout": 0.1})
    named = {proof.name: proof for proof in proofs(case)}
    named["resumes_bitwise"](case)
    with pytest.raises(NotProvable, match="draws random numbers"):
        named["agrees_on_two_ranks"](case)
    assert not run_without(case).record["random"]


WAITS = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "index": lambda x: [0, 1][x[0].long()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x + 0),
}
COMPUTATIONS = {
    "sum": lambda x: (x * 2).sum(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "copy": lambda x: x.detach().clone(),
    "shape": lambda x: len(x) + x.numel(),
}


def waits_of(action, optimizers=()):
    waits, x = Waits(), torch.ones(3)
    waits.start(optimizers)
    action(x)
    waits.stop()
    return waits.places


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_counted_with_its_place(name):
    [place] = waits_of(WAITS[name])
    assert f"{__file__}:" in place


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_a_computation_is_no_wait(name):
    assert waits_of(COMPUTATIONS[name]) == []


def test_after_the_end_nothing_is_counted():
    waits = Waits()
    waits.start([])
    waits.stop()
    assert float(torch.ones(1)) == 1.0
    assert waits.places == []


def test_the_step_of_torch_optimizers_lies_on_the_host():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], foreach=False)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert waits_of(lambda x: optimizer.step(), [optimizer]) == []
    assert waits_of(lambda x: optimizer.step()) != []


COUNTED = {  # objects after steps 200, 240, ..., 360; per step at least
    "a leak of one object": ([0, 43, 86, 129, 172], 1.075),
    "a leak beside what is freed now and then": ([0, 60, 220, 240, 300], 0.5),
    "once a thousand": ([0, 3, 1006, 1009, 1012], 0.075),
    "Lightning's bar": ([0, -61, 22, -39, -100], -1.525),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_leak_is_what_grows_in_every_interval(name, tmp_path):
    counts, least = COUNTED[name]
    objects = dict(zip(map(str, LATE[-5:]), counts, strict=True))
    (tmp_path / "record.0.json").write_text(json.dumps({"objects": objects}), encoding="utf-8")
    assert steady_growth(runs.Run(tmp_path, 0, "", "", ""), LATE[-5:]) == least
