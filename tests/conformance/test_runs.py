"""The runs of the kit: real processes that end, also when they hang; waits that are counted."""

import os

import pytest
import torch

from core.testing import Case, NotProvable, proofs, runs
from core.testing.training import plain, whole
from core.testing.waits import Waits
from core.testing.workshop import workshop

HANGING = """
import os, sys, time

def hang(arguments):
    print("here", os.getpid(), flush=True)
    if os.environ.get("RANK") == "1":
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
def test_what_hangs_is_killed_and_what_it_wrote_is_told():
    with pytest.raises(
        AssertionError, match=r"`hang` was not done after 2 s. It wrote:\nhere (\d+)"
    ) as caught:
        runs.run(["hang"], workshop(), timeout=2)
    assert gone(int(str(caught.value).split()[-1]))


@pytest.mark.usefixtures("hang")
def test_a_rank_that_waits_for_one_that_failed_is_killed(monkeypatch):
    monkeypatch.setattr(runs, "GRACE_SECONDS", 0.5)
    done = runs.run(["hang"], workshop(), ranks=2)
    assert done.code == 3
    assert "rank 1 gives up" in done.complaint
    assert gone(int(done.printed.split()[-1]))


def test_two_runs_of_the_same_are_the_same_to_the_bit():
    one, other = (whole(Case("AdamW")) for _ in range(2))
    assert one.folder != other.folder
    assert one.record == other.record
    assert one.record["waits"] == []
    assert len(one.record["losses"]) == one.record["steps"] == 8
    assert sorted(map(int, one.record["figures"])) == [3, 4, 6, 8]


def test_dropout_is_noticed_and_resumes_all_the_same():
    case = Case("GPT", {"n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 16, "dropout": 0.1})
    named = {proof.name: proof for proof in proofs(case)}
    named["resumes_bitwise"](case)
    with pytest.raises(NotProvable, match="draws random numbers"):
        named["agrees_on_two_ranks"](case)
    assert not plain(case).record["random"]


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
