"""Every technique that leyden registers keeps every promise of its kind: registering is what gets it tested."""

import pytest

from core import catalog
from core.testing import NotProvable, cases, proofs
from tests.conformance.conftest import pytest_leyden_cases

CASES = cases("leyden", pytest_leyden_cases())
PROMISES = [
    pytest.param(case, proof, id=f"{case.entry.name}-{proof}") for case in CASES for proof in proofs(case)
]


@pytest.mark.parametrize(("case", "proof"), PROMISES)
def test_promise(case, proof):
    try:
        proof(case)
    except NotProvable as reason:
        pytest.skip(str(reason))


def test_no_technique_is_left_out():
    ours = {entry for entry in catalog.entries() if entry.package == "leyden"}
    assert {case.entry for case in CASES} == ours
    assert len(ours) > 20


def test_none_of_ours_is_exempt():
    assert [case.entry.name for case in CASES if case.exempt] == []
