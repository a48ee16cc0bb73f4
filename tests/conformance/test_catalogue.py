"""Every technique that leyden registers keeps every promise of its kind: registering is what gets it tested."""

import pytest

from core import catalog
from core.testing import NotProvable, cases, proofs
from tests.conformance.conftest import pytest_leyden_cases

CASES = cases("leyden", pytest_leyden_cases())


def marks(case, proof):
    """What other tests prove as well is slow; of further cases of a technique, what is dear is CI's.

    RayEngine's own tests are on two machines; tests/test_configs.py has the examples of all.
    """
    if proof.name == "builds_from_yaml" or (case.entry.name == "RayEngine" and proof.contract == "Engine"):
        return [pytest.mark.slow]
    further = case != next(other for other in CASES if other.entry == case.entry)
    return [pytest.mark.ci] * (further and proof.name in ("resumes_bitwise", "agrees_on_two_ranks"))


PROMISES = [
    pytest.param(
        case,
        proof,
        id=f"{case.entry.name}-{proof}",
        marks=marks(case, proof),
    )
    for case in CASES
    for proof in proofs(case)
]


@pytest.fixture(scope="module")
def one_ray():
    """Ray on this machine, for all runs of RayEngine: to start it takes seconds."""
    from datamodules.preparation.ray_engine import _cluster

    with _cluster("local"):
        yield


@pytest.mark.parametrize(("case", "proof"), PROMISES)
def test_promise(case, proof, request):
    if case.entry.name == "RayEngine" and proof.contract == "Engine" and case.absent() is None:
        request.getfixturevalue("one_ray")
    try:
        proof(case)
    except NotProvable as reason:
        pytest.skip(str(reason))


def test_no_technique_is_left_out():
    ours = {entry for entry in catalog.entries() if entry.package == "leyden"}
    assert {case.entry for case in CASES} == ours
    assert len(ours) > 20


def test_few_of_ours_are_exempt():
    exempt = {case.entry.name: set(case.exempt) for case in CASES if case.exempt}
    tokens = {"rates_are_sound", "bind_tells_it_the_length"}
    schedules = {name: proofs for name, proofs in exempt.items() if proofs <= tokens}
    assert exempt == schedules | {
        "Adafactor": {"idle_costs_nothing"},
        "DeepSpeedZero": {"idle_costs_nothing"},
        "SOAP": {"honours_weight_decay_by_group", "agrees_on_two_ranks"},
        "ShardedCheckpoint": {"resumes_bitwise"},
        "SpikeRollback": {"idle_costs_nothing"},  # where it goes back in the middle
    }
